"""When every frame of a video file is shown and where decoding may start: exact random access rests on it.

An mp4 states all of it in its ``moov`` box. Files whose box does not suffice are walked packet by packet, once:
that index is kept in the user's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from jaxtyping import Int64

from wamlab.data.moov import read_sample_times
from wamlab.data.video_notes import read_note, write_note
from wamlab.errors import InputError


@dataclass(frozen=True)
class FrameIndex:
    """Presentation times of a file's shown frames and of the key frames that decoding may start from."""

    pts: Int64[np.ndarray, " frames"]  # strictly rising, in time_base units
    key_pts: Int64[np.ndarray, " keys"]  # rising; also of key frames an edit list hides
    key_dts: Int64[np.ndarray, " keys"]
    time_base: Fraction  # seconds
    has_leading_frames: bool  # frames that follow a key frame in the file but are shown before it (open GOP)
    num_hidden: int  # packets an edit list or a flag hides

    def __len__(self) -> int:
        return len(self.pts)

    @property
    def times_s(self) -> np.ndarray:
        """Return when each frame is shown, float64 [frames]."""
        return self.pts * (self.time_base.numerator / self.time_base.denominator)

    def nearest(self, times_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the frame shown closest to each time: frame numbers and how far off they are in seconds."""
        shown_s = self.times_s
        right = np.clip(np.searchsorted(shown_s, times_s), 1, max(1, len(shown_s) - 1))
        right = np.minimum(right, len(shown_s) - 1)
        left = np.maximum(right - 1, 0)
        is_left = np.abs(times_s - shown_s[left]) <= np.abs(times_s - shown_s[right])
        frames = np.where(is_left, left, right)
        return frames, np.abs(times_s - shown_s[frames])


def read_frame_index(path: Path) -> FrameIndex:
    """Index a video file exactly, from its moov box where that is unambiguous, else packet by packet.

    Raises InputError when the file is missing, is no video or holds no frame.
    """
    index = index_by_moov(path)
    if index is None:
        index = _noted_index(path)
    if index is None:
        index = index_by_demuxing(path)
        _note_index(path, index)
    return index


def open_container(path: Path) -> InputContainer:
    """Open a video file for PyAV; an InputError names the file and what is wrong with it."""
    try:
        container = av.open(str(path))
    except (FFmpegError, OSError, ValueError) as error:  # of damaged files MemoryError and UnicodeDecodeError, too
        reason = "it does not exist" if not path.exists() else getattr(error, "strerror", None) or error
        raise InputError(f"cannot open the video {path}: {reason}") from error
    if not container.streams.video:
        container.close()
        raise InputError(f"{path} holds no video stream")
    if container.streams.video[0].codec_context is None:
        container.close()
        raise InputError(f"{path} is of a codec that PyAV does not know; re-encode it")
    return container


def index_by_moov(path: Path) -> FrameIndex | None:
    """Index an mp4 file by its sample tables, or return None where they do not tell all."""
    times = read_sample_times(path)
    if times is None or len(times.keys) == 0:
        return None
    shown = np.sort(times.pts) if times.is_reordered else times.pts
    if (shown[1:] == shown[:-1]).any():
        return None
    return FrameIndex(
        pts=shown,
        **_keys(times.pts, times.dts, times.keys, is_reordered=times.is_reordered),
        time_base=times.time_base,
        num_hidden=0,
    )


def index_by_demuxing(path: Path) -> FrameIndex:
    """Index a video file by walking all its packets."""
    with open_container(path) as container:
        stream = container.streams.video[0]
        try:
            packets = [
                (packet.pts, packet.dts, packet.is_keyframe, packet.is_discard)
                for packet in container.demux(stream)
                if packet.size
            ]
        except (FFmpegError, IndexError) as error:  # IndexError: PyAV 18 lists no stream of unknown kind
            raise InputError(f"{path} is damaged: {getattr(error, 'strerror', error)}") from error
        time_base = stream.time_base
    if not packets:
        raise InputError(f"the video {path} holds no frame")
    if time_base is None or any(pts is None for pts, *_ in packets):
        raise InputError(f"{path} has frames without a time stamp; remux it into an mp4 file")
    pts = np.array([packet[0] for packet in packets])
    dts = np.array([packet[0] if packet[1] is None else packet[1] for packet in packets])
    is_key, is_hidden = np.array([packet[2:] for packet in packets]).T
    shown = np.sort(pts[~is_hidden])
    if len(shown) == 0:
        raise InputError(f"the video {path} holds no frame that is shown")
    if np.any(np.diff(shown) == 0):
        raise InputError(f"two frames of {path} have the same time stamp; re-encode it")
    keys = np.flatnonzero(is_key)
    found = _keys(pts, dts, keys, is_reordered=True)
    return FrameIndex(pts=shown, **found, time_base=time_base, num_hidden=int(is_hidden.sum()))


def _keys(pts: np.ndarray, dts: np.ndarray, keys: np.ndarray, *, is_reordered: bool) -> dict:
    """Sort the key frames of packets given in file order, and say whether frames lead one."""
    has_leading = False
    key_pts, key_dts = pts[keys], dts[keys]
    if is_reordered and len(keys):
        # A frame leads if a packet from its key frame on is shown before that key frame.
        has_leading = bool((np.minimum.reduceat(pts, keys) < key_pts).any())
        order = np.argsort(key_pts, kind="stable")
        key_pts, key_dts = key_pts[order], key_dts[order]
    return {"key_pts": key_pts, "key_dts": key_dts, "has_leading_frames": has_leading}


def _noted_index(path: Path) -> FrameIndex | None:
    note = read_note(path, "index", ("pts", "key_pts", "key_dts", "facts"))
    if note is None:
        return None
    numerator, denominator, has_leading, num_hidden = note.pop("facts").tolist()
    base = Fraction(numerator, denominator)
    return FrameIndex(**note, time_base=base, has_leading_frames=bool(has_leading), num_hidden=num_hidden)


def _note_index(path: Path, index: FrameIndex) -> None:
    base = index.time_base
    facts = np.array([base.numerator, base.denominator, index.has_leading_frames, index.num_hidden])
    write_note(path, "index", pts=index.pts, key_pts=index.key_pts, key_dts=index.key_dts, facts=facts)
