"""Decoded frames of whole episodes, kept in memory as long as there is room."""

from __future__ import annotations

import threading

import numpy as np
from jaxtyping import Int, UInt8

from wamlab.data.lerobot import RobotDataset


class FrameCache:
    """Reads a dataset's frames, keeping what it decoded until ``max_bytes`` are full; safe to share by threads.

    Nothing kept is ever dropped: training visits every episode once an epoch, and a least-recently-used rule
    would drop each just before its turn. Frames come out the same with any amount of room.
    """

    def __init__(self, dataset: RobotDataset, max_bytes: int):
        self._dataset, self._max_bytes = dataset, max_bytes
        self._episodes: dict[tuple[int, str], np.ndarray] = {}
        self._reserved: set[tuple[int, str]] = set()  # kept, or being decoded by one of the threads
        self._frame_bytes: dict[str, int] = {}  # by camera
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def frames(self, episode: int, camera: str, rows: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Return frames of an episode by row, as ``RobotDataset.frames`` does."""
        kept = self._episodes.get((episode, camera))
        if kept is None and self._reserve(episode, camera):
            kept = self._dataset.frames(episode, camera, np.arange(self._dataset.lengths[episode]))
            self._episodes[episode, camera] = kept
        return self._dataset.frames(episode, camera, rows) if kept is None else kept[rows]

    def _reserve(self, episode: int, camera: str) -> bool:
        """Take the room for a whole episode; say whether there was enough and no thread had taken it."""
        if self._max_bytes == 0:
            return False
        if camera not in self._frame_bytes:
            self._frame_bytes[camera] = self._dataset.frames(episode, camera, np.array([0])).nbytes
        needed = self._frame_bytes[camera] * int(self._dataset.lengths[episode])
        with self._lock:
            if (episode, camera) in self._reserved or self._used_bytes + needed > self._max_bytes:
                return False
            self._reserved.add((episode, camera))
            self._used_bytes += needed
            return True
