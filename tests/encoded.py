"""Encoded files of numbered frames in many codecs and layouts, and their full sequential decode."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from barcode import barcode_frames

from wamlab.data.encode import ordinary_scheduling


def decode_all(path: Path) -> dict[int, np.ndarray]:
    """Decode a file from start to end, as far as it is sound: presentation time -> RGB frame."""
    frames: dict[int, np.ndarray] = {}
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for packet in container.demux(stream):
            try:
                frames |= {f.pts: f.to_ndarray(format="rgb24") for f in packet.decode() if f.pts is not None}
            except FFmpegError:
                continue
    return frames


def encode(path: Path, codec: str = "libx264", size: tuple[int, int] = (32, 96), **options: Any) -> Path:
    """Encode 60 numbered frames; ``pts`` and ``pix_fmt`` are taken from the options."""
    pts = options.pop("pts", range(60))
    muxing = {"movflags": options.pop("movflags")} if "movflags" in options else {}
    with av.open(str(path), "w", options=muxing) as container:
        stream = container.add_stream(codec, rate=15)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = size
        stream.pix_fmt = options.pop("pix_fmt", "yuv420p")
        stream.codec_context.time_base = Fraction(1, 15)
        stream.codec_context.gop_size = options.pop("g", 12)
        stream.codec_context.max_b_frames = options.pop("bf", 3)
        stream.options = {name.replace("_", "-"): str(value) for name, value in options.items()}
        with ordinary_scheduling():
            stream.codec_context.open()
        for picture, time in zip(barcode_frames(np.arange(60), *size), pts, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = time
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


SYNTHETIC = {
    "b_frames.mp4": {},
    "open_gop.mp4": {"x264_params": "open-gop=1:keyint=12"},
    "short_open_groups.mp4": {"x264_params": "open-gop=1:keyint=3:min-keyint=1:bframes=2:b-adapt=0"},
    "every_second_a_key.mp4": {"g": 2, "bf": 1},
    "varying_rate.mp4": {"pts": [i + i // 3 * 2 for i in range(60)]},
    "start_offset.mp4": {"pts": range(20, 80)},
    "tiny.mp4": {"size": (16, 96)},
    "odd_size.mp4": {"size": (33, 97), "pix_fmt": "yuv444p"},
    "fragmented.mp4": {"movflags": "frag_keyframe+empty_moov"},
    "hevc_open_gop.mp4": {"codec": "libx265", "x265_params": "log-level=none:keyint=12:open-gop=1:pools=1"},
    "mpeg4_b_frames.mp4": {"codec": "mpeg4", "bf": 2},
    "mpeg4_b_frames.avi": {"codec": "mpeg4", "bf": 2},
    "intra_refresh.mp4": {"x264_params": "intra-refresh=1:keyint=12"},
    "transport_stream.ts": {},
    "av1.mp4": {"codec": "libsvtav1", "preset": 12, "size": (64, 96), "bf": 0},
}  # fmt: skip
