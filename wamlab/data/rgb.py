"""Decoded frames to RGB, straight into an array where PyAV's own converter library can be called directly.

PyAV 18 converts into memory of its own, from which a copy follows: a tenth of the cost of a 640x480 frame of AV1
(measured 2026-12). The direct call goes when ``VideoReformatter`` takes a destination.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from jaxtyping import UInt8

Planes, Strides = ctypes.c_void_p * 4, ctypes.c_int * 4
YUV420P, RGB24, BILINEAR = 0, 2, 2  # AVPixelFormat, SWS_BILINEAR: what VideoReformatter uses
BLOCK = 16  # pixels; whole ones, else the converter could write past a row
PLAIN_RANGES = {0, 1}  # unspecified, limited
PLAIN_SPACES = {2, 5, 6}  # unspecified, BT.601: what a converter does unless it is told otherwise


class RgbConverter:
    """Write frames of one size as RGB; the first one both ways, so that the direct way is known to be equal."""

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()
        self._is_direct: bool | None = None  # None until the first frame has shown it
        self._library: ctypes.CDLL | None = None
        self._context: int | None = None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Free the converter's tables."""
        context, self._context, self._is_direct = self._context, None, False
        if context and self._library:
            self._library.sws_freeContext(context)

    def write(self, frame: av.VideoFrame, pixels: UInt8[np.ndarray, "h w 3"]) -> None:
        """Write a frame of the array's size into it."""
        height, width = pixels.shape[:2]
        can_be_direct = (
            self._is_direct is not False
            and pixels.strides[1:] == (3, 1)
            and frame.format.name == "yuv420p"
            and frame.color_range in PLAIN_RANGES
            and frame.colorspace in PLAIN_SPACES
        )
        if can_be_direct and self._is_direct:
            self._write_directly(frame, pixels)
            return
        # Freed at once, so that the next frame is converted into the same memory while the cache has it.
        plane = self._reformatter.reformat(frame, format="rgb24", threads=1).planes[0]
        pixels[:] = (
            np.frombuffer(memoryview(plane), np.uint8).reshape(height, -1)[:, : width * 3].reshape(height, width, 3)
        )
        if can_be_direct:
            self._is_direct = self._try_directly(frame, pixels)

    def _try_directly(self, frame: av.VideoFrame, expected: np.ndarray) -> bool:
        height, width = expected.shape[:2]
        self._library = _library()
        if self._library is None or width % BLOCK:
            return False
        self._context = self._library.sws_getContext(
            width, height, YUV420P, width, height, RGB24, BILINEAR, None, None, None
        )
        if not self._context:
            return False
        found = np.empty_like(expected, order="C")
        self._write_directly(frame, found)
        return np.array_equal(found, expected)

    def _write_directly(self, frame: av.VideoFrame, pixels: np.ndarray) -> None:
        assert self._library
        luma, blue, red = frame.planes
        self._library.sws_scale(
            self._context,
            Planes(luma.buffer_ptr, blue.buffer_ptr, red.buffer_ptr, None),
            Strides(luma.line_size, blue.line_size, red.line_size, 0),
            0,
            pixels.shape[0],
            Planes(pixels.ctypes.data, None, None, None),
            Strides(pixels.strides[0], 0, 0, 0),
        )


@cache
def _library() -> ctypes.CDLL | None:
    """Load the libswscale that PyAV's wheel brings and uses; None where PyAV is built otherwise."""
    package = Path(av.__file__).parent
    for pattern in ("av.libs/libswscale*.so*", "av/.dylibs/libswscale*.dylib"):
        for file in package.parent.glob(pattern):
            try:
                library = ctypes.CDLL(str(file))
                library.sws_getContext.restype = ctypes.c_void_p
                library.sws_getContext.argtypes = [ctypes.c_int] * 7 + [ctypes.c_void_p] * 3
                library.sws_scale.argtypes = [
                    ctypes.c_void_p, Planes, Strides, ctypes.c_int, ctypes.c_int, Planes, Strides,
                ]  # fmt: skip
                library.sws_freeContext.argtypes = [ctypes.c_void_p]
                return library
            except (OSError, AttributeError):
                continue
    return None
