"""Exact frames of a video file in any order, by PyAV (default) or by a named backend that is refused where it errs.

Frames come out as stored: a rotation in the container's display matrix is not applied (PyAV's behaviour).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, UInt8

from wamlab.data.frame_index import FrameIndex, read_frame_index
from wamlab.errors import InputError

BACKENDS = ("pyav", "torchcodec", "decord")


@runtime_checkable
class VideoReader(Protocol):
    """Random access to one video file; not to be shared between threads or across a fork."""

    path: Path
    index: FrameIndex

    def read(
        self, frames: Int[np.ndarray, " n"], /, out: UInt8[np.ndarray, "n h w 3"] | None = None
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Return the frames with these numbers, in their order, repeats allowed; in ``out`` where it is given.

        Raises InputError where a frame cannot be had exactly; ``out`` is undefined then.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Return about how much memory the open reader holds."""
        ...

    def close(self) -> None: ...


def open_video(path: Path | str, backend: str = "pyav", index: FrameIndex | None = None) -> VideoReader:
    """Open a video file for exact random access; ``index`` is its frame index where that is known already.

    Raises InputError for an unknown backend, one that is not installed, a file that is no video, and a file
    that the named backend reads wrongly.
    """
    from wamlab.data import foreign_readers, pyav_reader  # both speak of what this module defines

    path = Path(path)
    check_backend(backend)
    index = index or read_frame_index(path)
    readers = {
        "pyav": pyav_reader.PyAVReader,
        "torchcodec": foreign_readers.TorchCodecReader,
        "decord": foreign_readers.DecordReader,
    }
    return readers[backend](path, index)


def check_backend(backend: str) -> None:
    """Raise InputError unless the decoder's name is one of BACKENDS."""
    if backend not in BACKENDS:
        raise InputError(f"unknown video backend {backend!r}; choose one of {', '.join(BACKENDS)}")


def checked_frames(frames: np.ndarray, path: Path, num_frames: int) -> np.ndarray:
    """Return frame numbers as int64, or raise InputError naming the first that the file does not have."""
    frames = np.asarray(frames, dtype=np.int64)
    outside = frames[(frames < 0) | (frames >= num_frames)]
    if len(outside):
        raise InputError(f"{path} has frames 0..{num_frames - 1}, frame {outside[0]} was asked for")
    return frames


class WrongBuffer(InputError):
    """Frames are of another size than the buffer given for them."""


def checked_buffer(out: np.ndarray | None, shape: tuple[int, int, int, int], path: Path) -> np.ndarray:
    """Return ``out``, or a new array where it is None; WrongBuffer where frames of that shape do not fit in."""
    if out is None:
        return np.empty(shape, np.uint8)
    if out.shape != shape or out.dtype != np.uint8:
        raise WrongBuffer(f"frames of {path} are uint8 {shape}, the buffer for them is {out.dtype} {out.shape}")
    return out
