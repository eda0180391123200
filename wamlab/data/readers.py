"""Open video readers within a memory limit, each used by one thread at a time, and the frame indices of their files."""

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

MAX_BYTES = 512 << 20  # about 70 readers at 640x480, 170 at 320x180; opening one takes 1 to 4 ms
MIN_BYTES = 2 << 20  # what a reader counts at least: it also holds a file descriptor, so at most 256 are open
INDICES = 1024  # 24 bytes a frame


class Readers:
    """Lend open readers of files to threads, and forget all in a forked child, where none would work.

    A reader goes from thread to thread, so that how many threads read does not decide how often files are opened.
    """

    def __init__(self, backend: str = "pyav", max_bytes: int = MAX_BYTES):
        check_backend(backend)
        self.backend, self._max_bytes = backend, max_bytes
        self.index = lru_cache(maxsize=INDICES)(read_frame_index)  # no lock that a fork could leave closed
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
        reader = self._taken(path) or open_video(path, self.backend, self.index(path))
        try:
            return reader.read(frames, out)
        finally:
            self._give_back(path, reader)

    def close(self) -> None:
        """Close all readers that no thread has."""
        with self._lock:
            idle, self._idle, self._used_bytes = self._idle, OrderedDict(), 0
        for readers in idle.values():
            for reader in readers:
                reader.close()

    def _forget(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._idle: OrderedDict[Path, list[VideoReader]] = OrderedDict()  # the file used longest ago first
        self._used_bytes = 0  # of idle readers

    def _taken(self, path: Path) -> VideoReader | None:
        with self._lock:
            readers = self._idle.get(path)
            if not readers:
                return None
            reader = readers.pop()
            if not readers:
                del self._idle[path]
            self._used_bytes -= _size_of(reader)
            return reader

    def _give_back(self, path: Path, reader: VideoReader) -> None:
        closing = []
        with self._lock:
            self._idle.setdefault(path, []).append(reader)
            self._idle.move_to_end(path)
            self._used_bytes += _size_of(reader)
            while self._used_bytes > self._max_bytes and (len(self._idle) > 1 or len(self._idle[path]) > 1):
                oldest = next(iter(self._idle))  # the one just given back comes last
                closing.append(self._idle[oldest].pop())
                self._used_bytes -= _size_of(closing[-1])
                if not self._idle[oldest]:
                    del self._idle[oldest]
        for old in closing:
            old.close()


def _size_of(reader: VideoReader) -> int:
    return max(MIN_BYTES, reader.num_bytes)


_ALL: weakref.WeakSet[Readers] = weakref.WeakSet()


def _forget_all() -> None:
    for readers in list(_ALL):
        readers._forget()


os.register_at_fork(after_in_child=_forget_all)
