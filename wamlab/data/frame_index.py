"""When every frame of a video file is shown and where decoding may start: exact random access rests on it.

An mp4 states all of it in its ``moov`` box, which numpy reads about a hundred times faster than the packets
can be walked. Files whose box needs interpretation (several edits, fragments, cuts) are walked instead.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from jaxtyping import Int64

from wamlab.errors import InputError

# Sample tables that say nothing about time beyond what is read here; sample groups and partial sync tables
# would name further key frames.
KNOWN_TABLES = {b"stsd", b"stts", b"stss", b"ctts", b"stsz", b"stsc", b"stco", b"co64", b"sdtp"}


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
    return index_by_demuxing(path) if index is None else index


def open_container(path: Path) -> InputContainer:
    """Open a video file for PyAV; an InputError names the file and what is wrong with it."""
    try:
        container = av.open(str(path))
    except (OSError, ValueError) as error:  # av.error.FFmpegError is one or the other
        reason = "it does not exist" if not path.exists() else getattr(error, "strerror", None) or error
        raise InputError(f"cannot open the video {path}: {reason}") from error
    if not container.streams.video:
        container.close()
        raise InputError(f"{path} holds no video stream")
    return container


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
        except FFmpegError as error:
            raise InputError(f"{path} is damaged: {error.strerror}") from error
        time_base = stream.time_base
    if not packets:
        raise InputError(f"the video {path} holds no frame")
    if time_base is None or any(pts is None for pts, *_ in packets):
        raise InputError(f"{path} has frames without a time stamp; remux it into an mp4 file")
    pts = np.array([packet[0] for packet in packets])
    dts = np.array([packet[0] if packet[1] is None else packet[1] for packet in packets])
    is_key, is_hidden = np.array([packet[2:] for packet in packets]).T
    return _index(path, pts, dts, is_key, is_hidden, time_base)


def _index(
    path: Path, pts: np.ndarray, dts: np.ndarray, is_key: np.ndarray, is_hidden: np.ndarray, base: Fraction
) -> FrameIndex:
    """Sort packets, given in file order, into a frame index."""
    shown = np.sort(pts[~is_hidden])
    if len(shown) == 0:
        raise InputError(f"the video {path} holds no frame that is shown")
    if np.any(np.diff(shown) == 0):
        raise InputError(f"two frames of {path} have the same time stamp; re-encode it")
    # The last key frame at or before each packet in the file; a packet shown before it "leads" it.
    last_key = np.maximum.accumulate(np.where(is_key, np.arange(len(pts)), -1))
    has_leading = bool(np.any((last_key >= 0) & (pts < pts[last_key])))
    order = np.argsort(pts[is_key], kind="stable")
    return FrameIndex(
        pts=shown.astype(np.int64),
        key_pts=pts[is_key][order].astype(np.int64),
        key_dts=dts[is_key][order].astype(np.int64),
        time_base=base,
        has_leading_frames=has_leading,
        num_hidden=int(is_hidden.sum()),
    )


def index_by_moov(path: Path) -> FrameIndex | None:
    """Index an mp4 file by its sample tables, or return None where they do not tell all."""
    try:
        moov = _read_moov(path)
        return _parse_moov(path, moov) if moov else None
    except (struct.error, ValueError, IndexError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        return None  # a broken box: walking the packets finds out what is left and says what is wrong


def _read_moov(path: Path) -> bytes | None:
    """Return the content of the moov box without reading the media data."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            position = 0
            while position + 8 <= end:
                file.seek(position)
                size, kind = struct.unpack(">I4s", file.read(8))
                header = 8
                if size == 1:
                    size, header = struct.unpack(">Q", file.read(8))[0], 16
                if size == 0:
                    size = end - position
                if kind == b"moof" or size < header or position + size > end:
                    return None
                if kind == b"moov":
                    return file.read(size - header)
                position += size
    except OSError:
        return None  # opening by PyAV names the reason
    return None


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    position = 0
    while position + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        if size < 8 or position + size > len(data):
            raise ValueError("a box is longer than its parent")
        yield kind, data[position + 8 : position + size]
        position += size


def _parse_moov(path: Path, moov: bytes) -> FrameIndex | None:
    children = list(_boxes(moov))
    if any(kind == b"mvex" for kind, _ in children):  # fragments follow
        return None
    movie_scale = _time_scale(dict(children)[b"mvhd"])
    for kind, trak in children:
        if kind != b"trak":
            continue
        boxes = dict(_boxes(trak))
        media = dict(_boxes(boxes[b"mdia"]))
        if media[b"hdlr"][8:12] != b"vide":
            continue
        tables = dict(_boxes(dict(_boxes(media[b"minf"]))[b"stbl"]))
        num_formats = struct.unpack_from(">I", tables[b"stsd"], 4)[0]
        if num_formats != 1 or not tables.keys() <= KNOWN_TABLES:
            return None
        edits = dict(_boxes(boxes[b"edts"]))[b"elst"] if b"edts" in boxes else None
        return _parse_samples(path, tables, edits, _time_scale(media[b"mdhd"]), movie_scale)
    return None


def _time_scale(header: bytes) -> int:
    return struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)[0]


def _pairs(table: bytes) -> np.ndarray:
    """Return a run-length table as int64 [entries, 2]: run lengths and values."""
    count = struct.unpack_from(">I", table, 4)[0]
    return np.frombuffer(table, ">u4", count * 2, 8).astype(np.int64).reshape(-1, 2)


def _parse_samples(
    path: Path, tables: dict[bytes, bytes], edits: bytes | None, scale: int, movie_scale: int
) -> FrameIndex | None:
    """Turn sample tables into an index, with the one edit that merely takes the decoder's delay back."""
    durations = np.repeat(*_pairs(tables[b"stts"]).T[::-1])
    count = struct.unpack_from(">I", tables[b"stsz"], 8)[0]
    if len(durations) != count or count == 0 or np.any(durations <= 0) or np.any(durations >= 2**31):
        return None
    dts = np.cumsum(durations) - durations
    pts = dts
    if b"ctts" in tables:
        delays = np.repeat(*_pairs(tables[b"ctts"]).T[::-1])
        if edits is None or len(delays) != count or np.any(delays >= 2**31):  # negative: readers differ
            return None
        pts = dts + delays
    if edits is not None:
        start = _start_of_only_edit(edits, int(pts.max() + durations[-1] // 2), scale, movie_scale)
        if start is None or start != pts.min():
            return None
        pts, dts = pts - start, dts - start
    if np.any(np.diff(np.sort(pts)) == 0):
        return None
    is_key = np.ones(count, bool)
    if b"stss" in tables:
        num_keys = struct.unpack_from(">I", tables[b"stss"], 4)[0]
        is_key[:] = False
        is_key[np.frombuffer(tables[b"stss"], ">u4", num_keys, 8).astype(np.int64) - 1] = True
    return _index(path, pts, dts, is_key, np.zeros(count, bool), Fraction(1, scale))


def _start_of_only_edit(edits: bytes, shown_until: int, scale: int, movie_scale: int) -> int | None:
    """Return the media time at which the only edit starts, None where edits do more than shift."""
    count = struct.unpack_from(">I", edits, 4)[0]
    duration, start, rate = struct.unpack_from(">QqI" if edits[0] == 1 else ">IiI", edits, 8)
    covers_all = start >= 0 and start * movie_scale + duration * scale >= shown_until * movie_scale
    return start if count == 1 and rate == 1 << 16 and covers_all else None
