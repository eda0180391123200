"""Open video readers, within a memory limit per thread, and the frame indices that all threads share."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from wamlab.data.decode import VideoReader, check_backend, open_video
from wamlab.data.frame_index import read_frame_index

BYTES_A_THREAD = 96 << 20  # about a dozen readers at 640x480; each counts at least 2 MiB, so at most 48
INDICES = 1024  # 24 bytes a frame


class Readers:
    """Give each thread its own reader of a file, and forget all in a forked child, where none would work."""

    def __init__(self, backend: str = "pyav", bytes_a_thread: int = BYTES_A_THREAD):
        check_backend(backend)
        self.backend = backend
        self.index = lru_cache(maxsize=INDICES)(read_frame_index)  # no lock that a fork could leave closed
        self._limit = bytes_a_thread
        self._forget()
        _ALL.add(self)

    def read(
        self, path: Path, frames: Int[np.ndarray, " n"], out: UInt8[np.ndarray, "n h w 3"] | None = None
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Return frames of a file by number, in their order, repeats allowed; in ``out`` where it is given.

        Raises InputError where a frame cannot be had exactly; ``out`` is undefined then.
        """
        if self._pid != os.getpid():  # forked without Python's hooks
            self._forget()
        return self._reader(path).read(frames, out)

    def close(self) -> None:
        """Close the calling thread's readers; a thread that ends does so by itself."""
        readers = self._readers_here()
        while readers:
            readers.popitem()[1].close()

    def _forget(self) -> None:
        self._own, self._pid = threading.local(), os.getpid()

    def _readers_here(self) -> OrderedDict[Path, VideoReader]:
        readers = getattr(self._own, "readers", None)
        if readers is None:
            readers = self._own.readers = OrderedDict()
        return readers

    def _reader(self, path: Path) -> VideoReader:
        readers = self._readers_here()
        reader = readers.pop(path, None) or open_video(path, self.backend, self.index(path))
        room = self._limit - max(MIN_BYTES, reader.num_bytes)
        while readers and sum(max(MIN_BYTES, other.num_bytes) for other in readers.values()) > room:
            readers.popitem(last=False)[1].close()
        readers[path] = reader
        return reader


MIN_BYTES = 2 << 20  # what a reader counts at least: it also holds a file descriptor
_ALL: weakref.WeakSet[Readers] = weakref.WeakSet()


def _forget_all() -> None:
    for readers in list(_ALL):
        readers._forget()


os.register_at_fork(after_in_child=_forget_all)
