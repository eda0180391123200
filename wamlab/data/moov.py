"""What the ``moov`` box of an mp4 file says about when its frames are shown, read by numpy without the packets.

It costs a hundredth of a walk over the packets. Boxes that need interpretation (several edits, cuts, fragments,
negative delays) give None: the demuxer is the authority on those.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import Int64

# Sample tables that say nothing about time beyond what is read here; sample groups and partial sync tables
# would name further key frames.
KNOWN_TABLES = {b"stsd", b"stts", b"stss", b"ctts", b"stsz", b"stsc", b"stco", b"co64", b"sdtp"}
LONGEST_DURATION = 2**31  # ticks; what is longer is a negative number or damage


@dataclass(frozen=True)
class SampleTimes:
    """Times of a video track's samples in file order, in time_base units."""

    pts: Int64[np.ndarray, " samples"]
    dts: Int64[np.ndarray, " samples"]
    keys: Int64[np.ndarray, " keys"]  # numbers of the samples that are key frames, rising
    is_reordered: bool  # samples are stored in another order than shown
    time_base: Fraction  # seconds


def read_sample_times(path: Path) -> SampleTimes | None:
    """Read the sample times of an mp4's first video track, or return None where its header does not tell all."""
    try:
        moov = _read_moov(path)
        return _parse_moov(moov) if moov else None
    except (struct.error, ValueError, IndexError, KeyError, OverflowError):
        return None  # a broken box: walking the packets finds out what is left and says what is wrong


def _read_moov(path: Path) -> memoryview | None:
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
                    return memoryview(file.read(size - header))
                position += size
    except OSError:
        return None  # opening by PyAV names the reason
    return None


def _boxes(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    position = 0
    while position + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        if size < 8 or position + size > len(data):
            raise ValueError("a box is longer than its parent")
        yield kind, data[position + 8 : position + size]
        position += size


def _parse_moov(moov: memoryview) -> SampleTimes | None:
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
        return _parse_samples(tables, edits, _time_scale(media[b"mdhd"]), movie_scale)
    return None


def _time_scale(header: memoryview) -> int:
    scale = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)[0]
    if scale == 0:
        raise ValueError("no time scale")
    return scale


def _runs(table: memoryview, count: int) -> np.ndarray | int:
    """Expand a run-length table to one value a sample, or to one number if all are equal."""
    num_runs = struct.unpack_from(">I", table, 4)[0]
    runs = np.frombuffer(table, ">u4", num_runs * 2, 8).reshape(-1, 2).astype(np.int64)
    lengths, values = runs[:, 0], runs[:, 1]
    if lengths.sum() != count:  # checked before a damaged length could ask for all memory
        raise ValueError("a table covers another number of samples")
    if values.max() >= LONGEST_DURATION:  # negative: readers differ
        raise ValueError("a table holds negative numbers")
    return int(values[0]) if len(values) == 1 else np.repeat(values, lengths)


def _count_samples(sizes: memoryview, max_num: int) -> int:
    size, count = struct.unpack_from(">II", sizes, 4)
    if count == 0 or count > max_num or (size == 0 and len(sizes) < 12 + 4 * count):
        raise ValueError("the sample count cannot be")
    return count


def _parse_samples(
    tables: dict[bytes, memoryview], edits: memoryview | None, scale: int, movie_scale: int
) -> SampleTimes | None:
    """Turn sample tables into times, with the one edit that merely takes the decoder's delay back."""
    count = _count_samples(tables[b"stsz"], max_num=1 << 26)
    durations = _runs(tables[b"stts"], count)
    if isinstance(durations, int):
        if durations == 0:
            return None
        dts = np.arange(0, durations * count, durations)
        last_duration = durations
    else:
        if durations.min() == 0:
            return None
        dts = np.cumsum(durations) - durations
        last_duration = int(durations[-1])
    delays = _runs(tables[b"ctts"], count) if b"ctts" in tables else 0
    if b"ctts" in tables and edits is None:
        return None
    pts = dts + delays
    is_reordered = not isinstance(delays, int) and bool((pts[1:] < pts[:-1]).any())
    if edits is not None:
        first, last = (int(pts.min()), int(pts.max())) if is_reordered else (int(pts[0]), int(pts[-1]))
        start = _start_of_only_edit(edits, last + last_duration // 2, scale, movie_scale)
        if start is None or start != first:
            return None
        if start:
            pts, dts = pts - start, dts - start
    keys = np.arange(count)
    if b"stss" in tables:
        num_keys = struct.unpack_from(">I", tables[b"stss"], 4)[0]
        keys = np.frombuffer(tables[b"stss"], ">u4", num_keys, 8).astype(np.int64) - 1
        if num_keys and (keys[0] < 0 or keys[-1] >= count or (keys[1:] <= keys[:-1]).any()):
            return None
    return SampleTimes(pts, dts, keys, is_reordered, Fraction(1, scale))


def _start_of_only_edit(edits: memoryview, shown_until: int, scale: int, movie_scale: int) -> int | None:
    """Return the media time at which the only edit starts, None where edits do more than shift."""
    count = struct.unpack_from(">I", edits, 4)[0]
    duration, start, rate = struct.unpack_from(">QqI" if edits[0] == 1 else ">IiI", edits, 8)
    covers_all = start >= 0 and start * movie_scale + duration * scale >= shown_until * movie_scale
    return start if count == 1 and rate == 1 << 16 and covers_all else None
