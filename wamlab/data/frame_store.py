"""Decoded frames on disk: raw, bit for bit, or as JPEG pictures. Filled while training reads, shared by processes.

There is one file an episode and camera. Reading one costs a copy instead of decoding; anything wrong with a file, the
folder or the disk costs no more than decoding again.
"""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, Int64, UInt8

from wamlab.data.frame_filling import Filler, Item, Room
from wamlab.data.frame_source import has_rows
from wamlab.data.lerobot import RobotDataset
from wamlab.data.store_kind import choose_kind
from wamlab.data.stored_frames import Damaged, Kind, StoredFrames, is_being_written, pack, unpack, write_frames
from wamlab.errors import InputError

MAX_MAPPED = 256  # files mapped at once; each holds one open
CHUNK_BYTES = 32 * 2**20  # of frames that the background thread decodes before it looks whether it should end


@dataclass(frozen=True)
class StoreReport:
    """What a frame store did so far and holds."""

    kind: str
    hits: int  # requests served from files
    misses: int
    written: int  # files this process made
    damaged: int  # files found damaged
    num_files: int
    used_bytes: int
    max_bytes: int
    stopped: str  # why no more files are made; empty while they are

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class FrameStore:
    """A dataset's frames by way of files in ``folder``; safe to share by threads and processes.

    A file belongs to the size and time of its video and table: others than those have it made anew. With the kind
    "raw" frames equal the decoder's. With "mjpeg" all frames are as JPEG leaves them, stored or not, so that clips do
    not depend on what is stored. "auto" measures, and chooses raw where all fits: it allows what "mjpeg" loses.
    """

    def __init__(
        self,
        dataset: RobotDataset,
        folder: Path | str,
        max_bytes: int,
        *,
        kind: str = "raw",
        cameras: Sequence[str] | None = None,
        is_filling: bool = True,
        say: Callable[[str], Any] = print,
    ):
        """Take the cameras that are read, to measure for "auto" whether they fit; None for all of the dataset.

        Raises InputError for an unknown kind, less than no room, and a folder that is a file.
        """
        if kind not in ("raw", "mjpeg", "auto"):
            raise InputError(f'the kind of a frame store is "{kind}": give raw, mjpeg or auto')
        if max_bytes < 0:
            raise InputError(f"a frame store got {max_bytes} bytes of room, need at least 0")
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file: give the frame store a folder")
        self.dataset, self.folder, self._root = dataset, folder, dataset.root.resolve()
        self._arguments = (dataset, folder, max_bytes)
        self._room = Room(folder, max_bytes)
        self.kind: Kind | Literal["none"] = (
            kind if kind != "auto" else choose_kind(dataset, folder, max_bytes, cameras, say)
        )
        self._is_filling = is_filling and max_bytes > 0
        self._hits = self._misses = self._written = self._damaged = 0
        self._stopped, self._has_told = "", False
        self._refused: set[Item] = set()  # cannot be decoded as a whole, or stored
        self._checked: dict[Path, bytearray] = {}
        self._lock = threading.Lock()
        self._open = lru_cache(maxsize=MAX_MAPPED)(self._open_file)
        self._identity = lru_cache(maxsize=2**16)(self._identify)
        self._filler = Filler(self._fill)
        self._room.sweep()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (*self._arguments, self.kind, self._is_filling)

    @property
    def lengths(self) -> Int64[np.ndarray, " episodes"]:
        return self.dataset.lengths

    @property
    def pixels(self) -> str:
        """Return what a fingerprint of pixels must name: empty where frames equal the decoder's."""
        return "jpeg-90-1" if self.kind == "mjpeg" else ""

    def report(self) -> StoreReport:
        """Return the counters and what the folder holds, other processes' files included."""
        self._room.scan(is_forced=True)
        counters = self._hits, self._misses, self._written, self._damaged
        room = self._room
        return StoreReport(self.kind, *counters, room.num_files, room.used_bytes, room.max_bytes, self._stopped)

    def wait(self, timeout_s: int | float | None = None) -> bool:
        """Wait until all that was asked for is stored, or cannot be; say whether that came about."""
        return self._filler.wait(timeout_s)

    def close(self) -> None:
        """End the thread that fills; frames can still be read."""
        self._filler.close()

    def frames(
        self,
        episode: int,
        camera: str,
        rows: Int[np.ndarray, " n"],
        *,
        position: int | None = None,
        out: UInt8[np.ndarray, "n h w 3"] | None = None,
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Return frames of an episode by row, as ``RobotDataset.frames`` does, in ``out`` if given.

        ``position`` is for caches that look ahead.
        """
        rows = np.asarray(rows, np.int64)
        if self.kind == "none" or camera not in self.dataset.cameras or not has_rows(self.dataset, episode, rows):
            return _in(out, self.dataset.frames(episode, camera, rows))
        item = (int(episode), camera)
        if (stored := self._stored(item)) is not None:
            try:
                found = stored.read(rows, out)
                self._count(is_hit=True)
                return found
            except Damaged as damage:
                self._remove(stored.path, str(damage))
        self._count(is_hit=False)
        frames = self.dataset.frames(episode, camera, rows)
        if self._stopped and not self._has_told:
            self._has_told = True
            warnings.warn(f"{self.folder} takes no more frames: {self._stopped}; reading goes on", stacklevel=2)
        elif self._is_filling and not self._stopped and np.array_equal(rows, np.arange(self.lengths[episode])):
            self._fill(item, frames=frames)
        elif self._is_filling and not self._stopped and item not in self._refused:
            self._filler.ask(item)
        if self.kind == "mjpeg":
            frames = unpack(pack(frames), np.empty_like(frames))
        return _in(out, frames)

    def _count(self, *, is_hit: bool) -> None:
        with self._lock:
            self._hits, self._misses = self._hits + is_hit, self._misses + (not is_hit)

    def _stored(self, item: Item) -> StoredFrames | None:
        try:
            return self._open(item)
        except LookupError:
            return None  # not remembered: the next request looks again

    def _open_file(self, item: Item) -> StoredFrames:
        """Open an episode's file; LookupError where there is none of this video."""
        path = self._path(item)
        try:
            stored = StoredFrames(path, self._checked.get(path))
        except Damaged as damage:
            self._remove(path, str(damage))
            raise LookupError from damage
        except OSError as error:
            raise LookupError from error
        header = stored.header
        if header.identity != self._identity(item) or header.shape[0] != self.lengths[item[0]]:
            raise LookupError  # of another video; it will be overwritten
        self._checked[path] = stored.is_checked
        return stored

    def _path(self, item: Item) -> Path:
        place = f"{self._root}\n{self.dataset.episode_index[item[0]]}\n{item[1]}"
        return self.folder / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.{self.kind}"

    def _identify(self, item: Item) -> str:
        """Hash what says that the files an episode's frames are decoded from are the same."""
        episode, camera = item
        paths, place = [self.dataset.table_path(episode)], []
        if self.dataset.features[camera]["dtype"] == "video":
            span = self.dataset.video_span(episode, camera)
            paths.append(span.path)
            place = [span.start_s, span.end_s]
        states = [(path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None for path in paths]
        return hashlib.sha256(json.dumps([self.kind, states, place]).encode()).hexdigest()

    def _remove(self, path: Path, what: str) -> None:
        """Have a damaged file made again."""
        with self._lock:
            self._open.cache_clear()
            self._checked.pop(path, None)
            self._damaged += 1
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                what += f" and cannot be deleted ({error.strerror})"
        warnings.warn(f"the stored frames {path} {what}: they are decoded again", stacklevel=4)

    def _fill(self, item: Item, end: threading.Event | None = None, *, frames: np.ndarray | None = None) -> bool:
        """Store an episode's frames, decoding them until ``end`` is set unless given; say whether to go on."""
        if item in self._refused or self._stored(item) is not None:
            return True
        path = self._path(item)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if is_being_written(path):
                return True
            size = self._write(item, path, self._decoded(item, end) if frames is None else iter([frames]))
        except InputError:
            self._refused.add(item)  # whoever asks for the frames at fault hears of it
        except _Ended:
            return False
        except OSError as error:
            self._stopped = error.strerror or str(error)
        else:
            self._written += size > 0
            self._stopped = (
                "" if size else f"the {self._room.max_bytes / 2**30:.3g} GiB given to it, or the disk, are full"
            )
        return not self._stopped

    def _write(self, item: Item, path: Path, chunks: Iterator[np.ndarray]) -> int:
        assert self.kind != "none"
        identity = self._identity(item)
        first = next(chunks)
        shape = (int(self.lengths[item[0]]), *first.shape[1:])
        origin = f"episode {item[0]}, {item[1]} of {self.dataset.root}"
        return write_frames(path, chain([first], chunks), shape, self.kind, identity, origin, self._room.is_left)

    def _decoded(self, item: Item, end: threading.Event | None) -> Iterator[np.ndarray]:
        """Decode an episode piece by piece."""
        size_px = self.dataset.frames(*item, np.array([0])).shape[1:]
        length, step = int(self.lengths[item[0]]), max(1, CHUNK_BYTES // int(np.prod(size_px)))
        for first in range(0, length, step):
            if end is not None and end.is_set():
                raise _Ended
            yield self.dataset.frames(*item, np.arange(first, min(first + step, length)))


class _Ended(Exception):
    """The thread that fills was told to end."""


def _reopened(dataset: RobotDataset, folder: Path, max_bytes: int, kind: Any, is_filling: bool) -> FrameStore:
    """Make a store of a kind that was chosen already, in another process."""
    store = FrameStore(dataset, folder, max_bytes, kind="raw" if kind == "none" else kind, is_filling=is_filling)
    store.kind = kind
    return store


def _in(out: np.ndarray | None, frames: np.ndarray) -> np.ndarray:
    if out is None:
        return frames
    out[:] = frames
    return out
