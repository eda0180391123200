"""Which files the optional video backends return wrong frames of: found out once per file, then remembered.

The refusals were measured against a full sequential decode (decord 0.6.0, decord2 3.4.0, torchcodec 0.13.0);
a backend that was merely slow or raised an error of its own on a file is not refused for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from av.error import FFmpegError

from wamlab.data.frame_index import FrameIndex, open_container
from wamlab.data.video_notes import read_note, write_note
from wamlab.errors import InputError

SAFE_CONTAINERS = {"mov", "matroska"}  # transport streams and AVI: wrong frames in both backends
SEI, RECOVERY_POINT = 6, 6  # H.264 (ITU-T H.264 7.4.1, D.2.8)


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
    """Read off a file what is known to mislead one backend or another; a later process finds it noted."""
    note = read_note(path, "probe", ("words", "numbers"))
    if note is not None:
        container, codec, pixel_format = note["words"].tolist()
        rotation, has_leading, num_hidden, is_reordered, has_refresh = note["numbers"].tolist()
        facts = bool(has_leading), num_hidden, bool(is_reordered), bool(has_refresh)
        return Probe(container, codec, pixel_format, rotation, *facts)
    found = _probe_anew(path, index)
    words = np.array([found.container, found.codec, found.pixel_format])
    facts = found.has_leading_frames, found.num_hidden, found.is_reordered, found.has_gradual_refresh
    write_note(path, "probe", words=words, numbers=np.array([found.rotation, *facts], np.int64))
    return found


def _probe_anew(path: Path, index: FrameIndex) -> Probe:
    """Walk a file's packets and decode its first frame."""
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
            rotation = int(next(container.decode(stream)).rotation)
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
    """Raise InputError if the backend (torchcodec, decord or decord2) returns wrong frames of such a file, or none."""
    is_decord = backend != "torchcodec"
    if backend == "decord" and found.codec == "av1":
        raise InputError(f'decord cannot read AV1 ({path}); use backend="pyav", or decord2')
    reasons = {
        "the container is neither mp4 nor Matroska": found.container not in SAFE_CONTAINERS,
        "an edit list cuts frames off": found.num_hidden > 0,
        "it has no instantaneous key frames (gradual refresh)": found.has_gradual_refresh,
        "it turns frames by the display matrix": found.rotation != 0,
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
