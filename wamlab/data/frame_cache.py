"""Decoded frames of whole episodes in memory, shared by threads, as long as the stream of samples needs them soon.

Whole episodes, not the rows asked for. Rows alone cost up to 30 % less where key frames are close and the shuffle is
exact, but up to 60 % more where they are 250 apart, as in DROID's own files (`experiments/2026-12-02_frame_caches`).
"""

from __future__ import annotations

import threading
from concurrent.futures import Future as Flight
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int64, UInt8

from wamlab.data.eviction import Key, NextUse, make_eviction
from wamlab.data.frame_source import FrameSource, has_rows
from wamlab.errors import InputError


@dataclass(frozen=True)
class CacheReport:
    """What a frame cache did so far."""

    hits: int  # requests served from memory
    misses: int
    dropped: int  # episodes of one camera that left
    num_kept: int
    used_bytes: int
    max_bytes: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class FrameCache:
    """Read a source's frames, keeping episodes that were read while ``max_bytes`` last; safe to share by threads.

    Frames come out the same with any amount of room and under any policy. Threads that want an episode at once decode
    it once. The policy "future" asks ``next_use`` when an episode comes again, "keep" never drops anything, "lru" is
    there to compare with; None means "future" where there is a ``next_use``, else "keep".
    """

    def __init__(
        self, source: FrameSource, max_bytes: int, *, next_use: NextUse | None = None, policy: str | None = None
    ):
        """Raises InputError for an unknown policy, a future without ``next_use`` and less than no room."""
        if max_bytes < 0:
            raise InputError(f"a frame cache got {max_bytes} bytes of room, need at least 0")
        self._source, self._max_bytes = source, max_bytes
        self._eviction = make_eviction(policy or ("future" if next_use else "keep"), next_use)
        self._kept: dict[Key, Flight[np.ndarray | None]] = {}  # decoded, or being decoded by one of the threads
        self._sizes: dict[Key, int] = {}
        self._refused: set[Key] = set()  # cannot be decoded as a whole
        self._frame_bytes: dict[str, int] = {}  # by camera
        self._hits = self._misses = self._dropped = self._used_bytes = self._position = 0
        self._lock = threading.Lock()

    @property
    def lengths(self) -> Int64[np.ndarray, " episodes"]:
        return self._source.lengths

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def follow(self, next_use: NextUse) -> None:
        """Keep from now on what a stream of samples needs soonest."""
        eviction = make_eviction("future", next_use)
        with self._lock:
            for key, flight in self._kept.items():
                if flight.done():
                    eviction.touch(key, 0)
            self._eviction, self._position = eviction, 0

    def report(self) -> CacheReport:
        """Return the counters and what is kept."""
        with self._lock:
            counters = self._hits, self._misses, self._dropped
            return CacheReport(*counters, len(self._kept), self._used_bytes, self._max_bytes)

    def frames(
        self, episode: int, camera: str, rows: Int[np.ndarray, " n"], *, position: int | None = None
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Return frames of an episode by row, as the source does.

        ``position`` is where the stream of samples stands; None: where it was last.
        """
        rows = np.asarray(rows, np.int64)
        if not self._max_bytes or not has_rows(self._source, episode, rows):
            return self._source.frames(episode, camera, rows)
        kept = self._whole(episode, camera, rows, position)
        return self._source.frames(episode, camera, rows) if kept is None else kept[rows]

    def _whole(self, episode: int, camera: str, rows: np.ndarray, position: int | None) -> np.ndarray | None:
        """Return all frames of an episode that is kept, or is let in now; None for one that stays out."""
        key, length = (episode, camera), int(self._source.lengths[episode])
        if camera not in self._frame_bytes:
            self._frame_bytes[camera] = self._source.frames(episode, camera, rows[:1]).nbytes
        needed = self._frame_bytes[camera] * length
        num_uses = -(-length // int(rows.max() - rows.min() + 1))  # windows that cost as much as the whole episode
        with self._lock:
            self._position = position = self._position if position is None else position
            flight = self._kept.get(key)
            is_new = flight is None
            self._hits, self._misses = self._hits + (not is_new), self._misses + is_new
            if flight is None:
                if not self._admit(key, position, num_uses, needed):
                    return None
                flight = self._kept[key] = Flight()
            elif flight.done():
                self._eviction.touch(key, position)
        if is_new:
            self._fill(key, flight, position)
        return flight.result()

    def _admit(self, key: Key, position: int, num_uses: int, needed: int) -> bool:
        """Take the room for an episode, dropping others if the policy says so; say whether it may come in."""
        lacking = self._used_bytes + needed - self._max_bytes
        if key in self._refused or needed > self._max_bytes:
            return False
        if lacking > 0:
            dropped = self._eviction.make_way(key, position, num_uses, lacking, self._sizes)
            if not dropped:
                return False
            self._dropped += len(dropped)
            for old in dropped:
                self._drop(old)
        self._sizes[key] = needed
        self._used_bytes += needed
        return True

    def _drop(self, key: Key) -> None:
        del self._kept[key]
        self._used_bytes -= self._sizes.pop(key)
        self._eviction.forget(key)

    def _fill(self, key: Key, flight: Flight[np.ndarray | None], position: int) -> None:
        """Decode an episode that was let in; None where only some of its frames can be decoded."""
        frames = None
        try:
            frames = self._source.frames(*key, np.arange(self._source.lengths[key[0]]))
        except InputError:
            pass  # whoever asks for the rows that are at fault hears of it
        finally:
            with self._lock:
                if frames is None or frames.nbytes != self._sizes[key]:
                    frames = None
                    self._refused.add(key)
                    self._drop(key)
                else:
                    self._eviction.touch(key, position)
            flight.set_result(frames)
