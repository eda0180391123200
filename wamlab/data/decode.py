"""Exact frames of a video file in any order, by PyAV (default) or by a named backend that is refused where it errs.

Frames come out as stored: a rotation in the container's display matrix is not applied (PyAV's behaviour).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import av
import numpy as np
from av.error import FFmpegError
from av.video.reformatter import VideoReformatter
from jaxtyping import Int, UInt8

from wamlab.data.frame_index import FrameIndex, open_container, read_frame_index
from wamlab.errors import InputError

BACKENDS = ("pyav", "torchcodec", "decord")


@runtime_checkable
class VideoReader(Protocol):
    """Random access to one video file; not to be shared between threads or across a fork."""

    path: Path
    index: FrameIndex

    def read(self, frames: Int[np.ndarray, " n"], /) -> UInt8[np.ndarray, "n h w 3"]: ...

    def close(self) -> None: ...


def open_video(path: Path | str, backend: str = "pyav", index: FrameIndex | None = None) -> VideoReader:
    """Open a video file for exact random access.

    Raises InputError for an unknown backend, one that is not installed, a file that is no video, and a file
    that the named backend is known to read wrongly.
    """
    path = Path(path)
    check_backend(backend)
    if backend == "pyav":
        return PyAVReader(path, index or read_frame_index(path))
    from wamlab.data.foreign_decoders import DecordReader, TorchCodecReader  # optional packages

    return (TorchCodecReader if backend == "torchcodec" else DecordReader)(path)


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


class PyAVReader:
    """Decode asked frames by key frame and time stamp; a frame with another time stamp is never returned.

    One decoding and one converting thread: at robot-camera sizes more threads cost more than they give, and
    the default converter would start a thread pool per reader.
    """

    def __init__(self, path: Path, index: FrameIndex):
        self.path, self.index = path, index
        self._open()
        codec = self._container.streams.video[0].codec_context
        self._size = codec.height, codec.width
        self._converter = VideoReformatter()

    def _open(self) -> None:
        self._container = open_container(self.path)
        self._container.streams.video[0].codec_context.thread_count = 1
        self._decoded: Iterator[av.VideoFrame] | None = None  # where decoding stands
        self._last = -1  # number of the frame it gave last

    def close(self) -> None:
        self._decoded = None
        self._container.close()

    def read(self, frames: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Return the frames with these numbers, in their order, repeats allowed.

        Raises InputError where the file is damaged, ends early or changes its frame size.
        """
        wanted, places = np.unique(checked_frames(frames, self.path, len(self.index)), return_inverse=True)
        pixels = np.empty((len(wanted), *self._size, 3), np.uint8)
        for row, number in enumerate(wanted.tolist()):
            frame = self._decode(number)
            if (frame.height, frame.width) != self._size:
                raise InputError(
                    f"frame {number} of {self.path} is {frame.width}x{frame.height} while the file says "
                    f"{self._size[1]}x{self._size[0]}; re-encode it at one size"
                )
            rgb = self._converter.reformat(frame, format="rgb24", threads=1)
            plane = rgb.planes[0]
            lines = np.frombuffer(memoryview(plane), np.uint8).reshape(rgb.height, plane.line_size)
            pixels[row] = lines[:, : rgb.width * 3].reshape(rgb.height, rgb.width, 3)
        if len(wanted) == len(places) and np.array_equal(places, np.arange(len(places))):
            return pixels
        return pixels[places]

    def _decode(self, number: int) -> av.VideoFrame:
        pts = int(self.index.pts[number])
        group = int(np.searchsorted(self.index.key_pts, pts, side="right")) - 1
        try:
            frame = self._advance_to(pts) if self._is_ahead(number, group) else None
            for seek_to in () if frame else self._seek_points(group):
                self._seek(seek_to, pts)
                frame = self._advance_to(pts)
                if frame is not None:
                    break
        except FFmpegError as error:
            self._decoded = None
            raise InputError(
                f"frame {number} of {self.path} cannot be decoded, the file is damaged: {error.strerror}"
            ) from error
        if frame is None:
            raise InputError(
                f"frame {number} of {self.path} cannot be decoded: the file announces {len(self.index)} "
                "frames but is damaged or ends before this one"
            )
        self._last = number
        return frame

    def _is_ahead(self, number: int, group: int) -> bool:
        """Say whether decoding on reaches the frame without passing a key frame that a seek could use."""
        if self._decoded is None or self._last >= number:
            return False
        is_same_group = group < 0 or bool(self.index.pts[self._last] >= self.index.key_pts[group])
        return is_same_group or number == self._last + 1

    def _seek_points(self, group: int) -> Iterator[int | None]:
        """Yield time stamps to seek to, cheapest first; None is the start of the file.

        Seeking by pts lands best, but behind the key frame in files with open groups, edits or short groups;
        by dts it lands on it or one group early; streams without an index may need to start much earlier.
        """
        if group >= 0:
            yield int(self.index.key_pts[group])
        for earlier in range(group, max(group - 3, -1), -1):
            yield int(self.index.key_dts[earlier])
        yield None

    def _seek(self, seek_to: int | None, pts: int) -> None:
        if seek_to is None:
            self._container.close()
            self._open()
        stream = self._container.streams.video[0]
        if seek_to is not None:
            self._container.seek(seek_to, stream=stream)
        self._decoded = self._decode_from_here(stream, pts, is_start=seek_to is None)

    def _decode_from_here(self, stream: av.VideoStream, pts: int, *, is_start: bool) -> Iterator[av.VideoFrame]:
        """Decode packet after packet, but nothing if the first is no key frame shown at or before ``pts``."""
        is_landing = not is_start
        for packet in self._container.demux(stream):
            if is_landing and packet.size:
                if not packet.is_keyframe or packet.pts is None or packet.pts > pts:
                    return  # frames decoded from here could lack what they refer to
                is_landing = False
            yield from packet.decode()

    def _advance_to(self, pts: int) -> av.VideoFrame | None:
        """Decode on until the frame shown at ``pts``; None when it was passed or never comes."""
        for frame in self._decoded or ():
            if frame.pts == pts and not frame.is_corrupt:
                return frame
            if frame.pts is None or frame.pts >= pts:
                break
        self._decoded = None  # past it: only a seek can find it
        return None
