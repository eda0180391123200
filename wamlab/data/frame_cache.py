"""Decoded frames in memory, in stretches of an episode, those that the stream of samples needs soonest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt8

from wamlab.data.cache_room import Room
from wamlab.data.frame_source import FrameSource, has_rows
from wamlab.data.order import NEVER
from wamlab.errors import InputError

# Rows kept or dropped together. Simulated (experiments/bench/frame_caches.py): with whole episodes a rule that drops
# decodes up to twice what no cache would, as a window touches a third of an episode; single rows hit too rarely.
STRETCH_ROWS = 32
COVER = 0.9  # a stretch takes another's place only if a request spans so much of it: the rest is decoded on a guess

Key = tuple[int, str, int]  # episode, camera, number of the stretch


@dataclass(frozen=True)
class FrameCacheReport:
    """What a cache of frames did so far."""

    hits: int  # frames delivered from memory, or while another thread decoded them
    misses: int  # frames delivered from the source
    num_evicted: int  # stretches
    used_bytes: int
    max_bytes: int

    @property
    def hit_rate(self) -> float:
        """Return the share of frames that came from memory."""
        return self.hits / max(1, self.hits + self.misses)


class FrameCache:
    """Reads a source's frames and keeps some within ``max_bytes``; safe to share by threads.

    With ``follow`` it drops what the stream needs latest; before, nothing kept is ever dropped. Frames come out the
    same with any amount of room and any policy. Two threads that want the same stretch decode it once.
    """

    def __init__(self, source: FrameSource, max_bytes: int, *, policy: str = "future"):
        self._source, self._room = source, Room(max_bytes, policy)
        self._next_use: Callable[[int, int], int] | None = None
        self._kept: dict[Key, np.ndarray] = {}
        self._decoding: dict[Key, Future[np.ndarray | None]] = {}
        self._frame_bytes: dict[str, int] = {}  # by camera
        self._hits = self._misses = 0
        self._lock, self._first_lock = threading.Lock(), threading.Lock()

    @property
    def lengths(self) -> np.ndarray:
        return np.asarray(self._source.lengths)

    @property
    def used_bytes(self) -> int:
        return self._room.used_bytes

    def follow(self, next_use: Callable[[int, int], int] | None) -> None:
        """Take what says which stream position, above a given one, needs an episode next (``SampleOrder.next_use``)."""
        self._next_use = next_use

    def report(self) -> FrameCacheReport:
        """Return what was delivered from where, and how full the cache is."""
        room = self._room
        return FrameCacheReport(self._hits, self._misses, room.num_evicted, room.used_bytes, room.max_bytes)

    def frames(
        self, episode: int, camera: str, rows: Int[np.ndarray, " n"], position: int | None = None
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Return frames of an episode by row, as the source does.

        ``position`` is where the stream stands; of samples decoded together, the position of the last one.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if self._room.max_bytes == 0 or not has_rows(self._source, episode, rows):
            return self._source.frames(episode, camera, rows)
        wanted, places = np.unique(rows, return_inverse=True)
        frame_bytes = self._size_of_frame(episode, camera, wanted)
        kept, mine, others = self._claim(episode, camera, wanted, frame_bytes, position)
        stretches = self._decode(episode, camera, wanted, kept, mine, others)
        is_straight = len(wanted) == len(rows) and bool((places[1:] > places[:-1]).all())
        decoded_rows, decoded = stretches[0]
        is_whole = not kept and np.array_equal(decoded_rows, wanted)
        frames = decoded if is_whole and not others else _assemble(wanted, stretches)
        return frames if is_straight else frames[places]

    def _size_of_frame(self, episode: int, camera: str, rows: np.ndarray) -> int:
        if camera not in self._frame_bytes:
            with self._first_lock:
                if camera not in self._frame_bytes:
                    self._frame_bytes[camera] = self._source.frames(episode, camera, rows[:1]).nbytes
        return self._frame_bytes[camera]

    def _claim(
        self, episode: int, camera: str, rows: np.ndarray, frame_bytes: int, position: int | None
    ) -> tuple[dict[int, np.ndarray], list[int], dict[int, Future[np.ndarray | None]]]:
        """Divide the stretches that rows lie in: kept ones, those to decode and keep, and those others decode now."""
        next_use = self._next_use
        due = None if next_use is None or position is None else next_use(episode, position)
        kept: dict[int, np.ndarray] = {}
        others: dict[int, Future[np.ndarray | None]] = {}
        mine: list[int] = []
        with self._lock:
            if next_use is not None and position is not None:
                self._room.renew(position, lambda key: next_use(key[0], position))  # pyright: ignore[reportIndexIssue]
            for number in np.unique(rows // STRETCH_ROWS).tolist():
                key = (episode, camera, number)
                if key in self._room:
                    self._room.touch(key, due)
                if key in self._kept:
                    kept[number] = self._kept[key]
                elif key in self._decoding:
                    others[number] = self._decoding[key]
                else:
                    start, end = self._span(episode, number)
                    overlap = min(end, int(rows[-1]) + 1) - max(start, int(rows[0]))
                    is_covered = overlap >= COVER * (end - start)
                    size = (end - start) * frame_bytes
                    victims = self._room.admit(key, size, NEVER if due is None else due, can_evict=is_covered)
                    if victims is None:
                        continue
                    for victim in victims:
                        self._kept.pop(victim, None)  # one still being decoded is not kept when it is
                    self._decoding[key] = Future()
                    mine.append(number)
        return kept, mine, others

    def _decode(
        self,
        episode: int,
        camera: str,
        wanted: np.ndarray,
        kept: dict[int, np.ndarray],
        mine: list[int],
        others: dict[int, Future[np.ndarray | None]],
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return rows and frames that together hold all wanted ones, in rising order of rows."""
        numbers = wanted // STRETCH_ROWS
        passed = wanted[~np.isin(numbers, [*kept, *mine, *others])]  # not worth keeping
        found: dict[int, np.ndarray] = dict(kept)
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        try:
            spans = [np.arange(*self._span(episode, number)) for number in mine]
            rows = np.sort(np.concatenate([passed, *spans]))
            if len(rows):
                frames = self._read(episode, camera, rows, wanted)
                if frames is None:  # a row nobody asked for cannot be read: leave the stretches out
                    rows = wanted[np.isin(numbers, mine) | np.isin(wanted, passed)]
                    frames = self._source.frames(episode, camera, rows)
                    mine_found: list[int] = []
                else:
                    mine_found = mine
                pieces.append((rows, frames))
                self._keep(episode, camera, mine_found, rows, frames)
        finally:
            self._release(episode, camera, mine)
        for number, future in others.items():
            stretch = future.result()
            if stretch is None:  # the other thread met an error; this one meets it or does not
                rows = wanted[numbers == number]
                pieces.append((rows, self._source.frames(episode, camera, rows)))
            else:
                found[number] = stretch
        num_found = int(np.isin(numbers, list(found)).sum())
        with self._lock:
            self._hits += num_found
            self._misses += len(wanted) - num_found
        pieces += [(np.arange(*self._span(episode, number)), stretch) for number, stretch in found.items()]
        return pieces

    def _read(self, episode: int, camera: str, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
        try:
            return self._source.frames(episode, camera, rows)
        except InputError:
            if len(rows) <= len(wanted) and np.isin(rows, wanted).all():
                raise
            return None

    def _keep(self, episode: int, camera: str, mine: list[int], rows: np.ndarray, frames: np.ndarray) -> None:
        """Keep decoded stretches that still have their room, and hand them to the threads that wait."""
        for number in mine:
            start, end = self._span(episode, number)
            first = int(np.searchsorted(rows, start))
            stretch = frames[first : first + end - start].copy()  # a view would hold on to all that was decoded
            key = (episode, camera, number)
            with self._lock:
                if key in self._room:
                    due = self._room.next_use_of(key)
                    if stretch.nbytes != self._room.bytes_of(key):  # this episode's frames have another size
                        self._room.drop(key)
                        for victim in self._room.admit(key, stretch.nbytes, due) or ():
                            self._kept.pop(victim, None)
                    if key in self._room:
                        self._kept[key] = stretch
                self._decoding.pop(key).set_result(stretch)

    def _release(self, episode: int, camera: str, mine: list[int]) -> None:
        """Give back the room of stretches that were not decoded after all."""
        with self._lock:
            for number in mine:
                key = (episode, camera, number)
                future = self._decoding.pop(key, None)
                if future is not None:
                    if key in self._room and key not in self._kept:
                        self._room.drop(key)
                    future.set_result(None)

    def _span(self, episode: int, number: int) -> tuple[int, int]:
        """Return the first row of a stretch and the one after its last."""
        start = number * STRETCH_ROWS
        return start, min(start + STRETCH_ROWS, int(self._source.lengths[episode]))


def _assemble(wanted: np.ndarray, pieces: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Gather rising rows from pieces that hold them, each pixel copied once."""
    frames = np.empty((len(wanted), *pieces[0][1].shape[1:]), np.uint8)
    for rows, stretch in pieces:
        places = np.flatnonzero(np.isin(wanted, rows, assume_unique=True))
        sources = np.searchsorted(rows, wanted[places])
        if len(places) and places[-1] - places[0] + 1 == len(places):
            np.take(stretch, sources, axis=0, out=frames[places[0] : places[-1] + 1], mode="clip")
        else:
            frames[places] = stretch[sources]
    return frames
