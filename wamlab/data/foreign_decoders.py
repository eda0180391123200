"""Optional video backends, each behind a check that refuses the files it is known to return wrong frames of.

The refusals were measured against a full sequential decode (decord 0.6.0, decord2 3.4.0, torchcodec 0.13.0);
a backend that was merely slow or raised an error of its own on a file is not refused for it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from av.error import FFmpegError
from jaxtyping import Int, UInt8

from wamlab.data.decode import checked_frames
from wamlab.data.frame_index import FrameIndex, index_by_demuxing, open_container
from wamlab.errors import InputError

SAFE_CONTAINERS = {"mov", "matroska"}  # transport streams and AVI: wrong frames in both backends
SEI, RECOVERY_POINT = 6, 6  # H.264 (ITU-T H.264 7.4.1, D.2.8)


class TorchCodecReader:
    """Decode by torchcodec's exact mode; every frame's time stamp is checked against the index."""

    def __init__(self, path: Path):
        decoders = _import("torchcodec.decoders", "pip install torchcodec (it needs FFmpeg libraries)")
        self.path, self.index = path, index_by_demuxing(path)
        refuse("torchcodec", path, probe(path, self.index))
        try:
            self._decoder = decoders.VideoDecoder(
                str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact"
            )
        except (RuntimeError, ValueError) as error:
            raise InputError(f"torchcodec cannot open {path}: {_first_line(error)}") from error

    def close(self) -> None:
        del self._decoder

    def read(self, frames: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Return the frames with these numbers; InputError where torchcodec fails or answers with another."""
        frames = checked_frames(frames, self.path, len(self.index))
        try:
            batch = self._decoder.get_frames_at(indices=frames.tolist())
        except (RuntimeError, IndexError) as error:
            raise InputError(f"torchcodec cannot decode {self.path}: {_first_line(error)}") from error
        drift_s = np.abs(batch.pts_seconds.numpy() - self.index.times_s[frames])
        if len(frames) and drift_s.max() > 1e-4:
            raise InputError(
                f"torchcodec returned another frame than number {frames[drift_s.argmax()]} of {self.path}; "
                'use backend="pyav"'
            )
        return batch.data.numpy()


class DecordReader:
    """Decode by decord, opened anew for every read: an open decord reader decodes ahead without bound."""

    def __init__(self, path: Path):
        self._decord = _import("decord", "pip install decord, or decord2 for AV1")
        self.path, self.index = path, index_by_demuxing(path)
        refuse(_name_of(self._decord), path, probe(path, self.index))

    def close(self) -> None:
        """Do nothing: no reader outlives a read."""

    def read(self, frames: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Return the frames with these numbers; InputError where decord fails or counts other frames."""
        frames = checked_frames(frames, self.path, len(self.index))
        try:
            reader = self._decord.VideoReader(str(self.path), num_threads=1)
            num_frames = len(reader)
            pixels = reader.get_batch(frames.tolist()).asnumpy() if len(frames) else None
        except (self._decord.DECORDError, RuntimeError, IndexError) as error:
            raise InputError(f"decord cannot decode {self.path}: {_first_line(error)}") from error
        if num_frames != len(self.index):
            raise InputError(f"decord sees {num_frames} of {len(self.index)} frames in {self.path}; use pyav")
        return np.empty((0, 0, 0, 3), np.uint8) if pixels is None else pixels


@dataclass(frozen=True)
class Probe:
    """What decides whether a backend can be trusted with a file."""

    container: str
    codec: str
    pixel_format: str
    rotation: int  # degrees
    has_leading_frames: bool  # open groups of pictures
    num_hidden: int  # frames cut off by an edit list
    is_reordered: bool  # B-frames: shown in another order than stored
    has_gradual_refresh: bool  # H.264 without instantaneous key frames


def probe(path: Path, index: FrameIndex) -> Probe:
    """Read off a file what is known to mislead one backend or another."""
    with open_container(path) as container:
        stream = container.streams.video[0]
        codec = stream.codec_context.codec.canonical_name
        is_reordered, has_gradual_refresh, newest_pts = False, False, None
        for packet in container.demux(stream):
            if packet.pts is None:
                continue
            is_reordered |= newest_pts is not None and packet.pts < newest_pts
            newest_pts = packet.pts
            if codec == "h264" and packet.is_keyframe:
                has_gradual_refresh |= is_gradual_refresh(bytes(packet))
        container.seek(0)
        rotation = 0
        try:
            rotation = next(container.decode(stream)).rotation
        except (StopIteration, FFmpegError) as error:
            raise InputError(f"{path} is damaged: its first frame cannot be decoded") from error
        return Probe(
            container=container.format.name.split(",")[0],
            codec=codec,
            pixel_format=stream.codec_context.pix_fmt or "",
            rotation=rotation,
            has_leading_frames=index.has_leading_frames,
            num_hidden=index.num_hidden,
            is_reordered=is_reordered,
            has_gradual_refresh=has_gradual_refresh,
        )


def refuse(backend: str, path: Path, found: Probe) -> None:
    """Raise InputError if the backend (torchcodec, decord or decord2) returns wrong frames of such a file."""
    is_decord = backend != "torchcodec"
    reasons = {
        "the container is neither mp4 nor Matroska": found.container not in SAFE_CONTAINERS,
        "an edit list cuts frames off": found.num_hidden > 0,
        "it has no instantaneous key frames (gradual refresh)": found.has_gradual_refresh,
        "it turns frames by the display matrix": found.rotation != 0,
        "its codec is AV1 (decord2 can)": backend == "decord" and found.codec == "av1",
        "its codec is HEVC": is_decord and found.codec == "hevc",
        "its groups of pictures are open": is_decord and found.has_leading_frames,
        "it is MPEG-4 with B-frames": is_decord and found.codec == "mpeg4" and found.is_reordered,
        "its pixels are deep grey": is_decord and found.pixel_format.startswith(("gray1", "gray9")),
    }
    for reason, is_found in reasons.items():
        if is_found:
            raise InputError(f'{backend} does not give exact frames of {path}: {reason}; use backend="pyav"')


def is_gradual_refresh(packet: bytes) -> bool:
    """Say whether an H.264 packet (length-prefixed NAL units) recovers only some frames after its start."""
    position = 0
    while position + 5 <= len(packet):
        size = int.from_bytes(packet[position : position + 4], "big")
        unit = packet[position + 4 : position + 4 + size]
        position += 4 + size
        if unit[:1] and unit[0] & 31 == SEI and len(unit) > 3 and unit[1] == RECOVERY_POINT:
            return not unit[3] & 0x80  # recovery_frame_cnt is Exp-Golomb: a leading 1 means zero frames
    return False


def _name_of(decord: ModuleType) -> str:
    """Tell decord (and eva-decord) from decord2: all three install a module of the same name."""
    version = getattr(decord, "__version__", "")
    major = version.split(".")[0]
    if not major.isdigit():
        raise InputError("the installed decord states no version; reinstall decord or decord2")
    return "decord" if int(major) < 1 else "decord2"


def _import(module: str, advice: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # broken binary pairs raise the latter two
        name = module.split(".")[0]
        raise InputError(
            f'the video backend {name} does not load ({_first_line(error)}): {advice}, or use backend="pyav"'
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
