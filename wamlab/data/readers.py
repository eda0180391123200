"""Open video readers, a few per thread, and the frame indices that all threads share."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from wamlab.data.decode import VideoReader, check_backend, open_video
from wamlab.data.frame_index import read_frame_index

READERS_A_THREAD = 12  # about 6 MB each at 640x480, and a file descriptor
INDICES = 1024  # 24 bytes a frame


class Readers:
    """Give each thread its own reader of a file, and forget all in a forked child, where none would work."""

    def __init__(self, backend: str = "pyav", readers_a_thread: int = READERS_A_THREAD):
        check_backend(backend)
        self.backend = backend
        self.index = lru_cache(maxsize=INDICES)(read_frame_index)  # no lock that a fork could leave closed
        self._limit = readers_a_thread
        self._own = threading.local()
        self._pid = os.getpid()

    def read(self, path: Path, frames: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Return frames of a file by number, in their order, repeats allowed."""
        return self._reader(path).read(frames)

    def _reader(self, path: Path) -> VideoReader:
        if self._pid != os.getpid():
            self._own, self._pid = threading.local(), os.getpid()
        readers: OrderedDict[Path, VideoReader] | None = getattr(self._own, "readers", None)
        if readers is None:
            readers = self._own.readers = OrderedDict()
        if path not in readers:
            while len(readers) >= self._limit:
                readers.popitem(last=False)[1].close()
            readers[path] = open_video(path, self.backend, self.index(path))
        readers.move_to_end(path)
        return readers[path]
