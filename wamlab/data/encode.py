"""Frames into mp4 files of constant frame rate that every LeRobot reader seeks exactly."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.frame import PictureType
from jaxtyping import UInt8

from wamlab.data.layout_v3 import VIDEO_FILE_MB
from wamlab.errors import InputError

# Without B-frames and with closed groups frames are stored in the order they are shown, which even the
# readers that err on reordered streams seek rightly; one thread makes the bytes the same on every machine.
ENCODERS: Mapping[str, tuple[str, dict[str, str]]] = {
    "h264": ("libx264", {"preset": "veryfast", "bf": "0", "forced-idr": "1", "threads": "1"}),
    "hevc": ("libx265", {"preset": "fast", "x265-params": "bframes=0:open-gop=0:pools=1:log-level=none"}),
    "av1": ("libsvtav1", {"preset": "10", "svtav1-params": "lp=1:pred-struct=1"}),
}


@dataclass(frozen=True)
class VideoConfig:
    """How recorded frames are compressed."""

    codec: str = "h264"
    crf: int = 18  # constant rate factor: lower is better and larger; 18 is about 40 dB
    keyframe_interval: int = 10  # frames; short groups are cheap to enter anywhere, long ones smaller
    file_mb: float = float(VIDEO_FILE_MB)  # v3.0 only: a file grown beyond is followed by the next

    def __post_init__(self) -> None:
        if self.codec not in ENCODERS:
            raise InputError(f"unknown video codec {self.codec!r}; choose one of {', '.join(ENCODERS)}")
        if not 0 <= self.crf <= 63 or self.keyframe_interval < 1:
            raise InputError(f"need crf 0..63 and keyframe_interval above 0, got {self}")


class VideoWriter:
    """Encode frames into one mp4; frame i is shown at exactly i / fps seconds."""

    def __init__(self, path: Path, fps: float, height: int, width: int, config: VideoConfig):
        if height % 2 or width % 2:
            raise InputError(
                f"frames of {width}x{height} cannot become yuv420p video, which needs even sizes; "
                "crop or pad them by a pixel"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        rate = exact_rate(fps)
        encoder, options = ENCODERS[config.codec]
        self.path, self.num_frames, self.num_bytes = path, 0, 0
        self._container = av.open(str(path), "w", format="mp4")
        stream = self._container.add_stream(encoder, rate=rate)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.codec_context.gop_size = config.keyframe_interval
        stream.codec_context.time_base = 1 / rate
        stream.options = {**options, "crf": str(config.crf)}
        with ordinary_scheduling():
            stream.codec_context.open()
        self._stream = stream

    def append(self, frames: UInt8[np.ndarray, "t h w 3"]) -> int:
        """Add frames, the first as a key frame, and return its number in the file."""
        first = self.num_frames
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = self.num_frames, self._stream.codec_context.time_base
            if self.num_frames == first:
                frame.pict_type = PictureType.I
            self._mux(frame)
            self.num_frames += 1
        return first

    def close(self) -> None:
        """Finish the file."""
        self._mux(None)
        self._container.close()

    def _mux(self, frame: av.VideoFrame | None) -> None:
        for packet in self._stream.encode(frame):
            self.num_bytes += packet.size
            self._container.mux(packet)


@contextlib.contextmanager
def ordinary_scheduling() -> Iterator[None]:
    """Give this process's threads back the scheduling they had, also new ones; open encoders inside.

    SVT-AV1 (4.1), opened by root as in most containers, makes the calling thread and all its own real-time ones of the
    highest priority; every later thread and process inherits it, and one that spins starves the machine.
    """
    if not hasattr(os, "sched_getscheduler"):  # not Linux
        yield
        return
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != policy:
            for thread in Path("/proc/self/task").iterdir():
                with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
                    os.sched_setscheduler(int(thread.name), policy, parameter)


def exact_rate(fps: float) -> Fraction:
    """Return frames per second as the fraction meant, e.g. 30000/1001 for 29.97003."""
    return Fraction(fps).limit_denominator(1001)


def video_feature(height: int, width: int, fps: float, codec: str, pixel_format: str) -> dict[str, Any]:
    """Describe a camera as info.json does."""
    info = {
        "video.height": height,
        "video.width": width,
        "video.codec": codec,
        "video.pix_fmt": pixel_format,
        "video.is_depth_map": False,
        "video.fps": as_number(fps),
        "video.channels": 3,
        "has_audio": False,
    }
    names = ["height", "width", "channels"]
    return {"dtype": "video", "shape": [height, width, 3], "names": names, "info": info}


def as_number(fps: float) -> int | float:
    """Return whole frame rates as integers, the only kind that lerobot itself accepts."""
    return int(fps) if float(fps).is_integer() else float(fps)
