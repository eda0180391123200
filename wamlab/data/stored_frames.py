"""One file of decoded frames of one episode and camera: a checked header, then raw RGB or JPEG pictures.

    magic, header length, CRC-32 of the header | header as JSON, padded to whole pages | frames

It is written under a temporary name and moved into place when complete. Nothing is flushed to the device: after a power
cut the checksums tell.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from jaxtyping import Int, UInt8
from PIL import Image

from wamlab.errors import InputError

Kind = Literal["raw", "mjpeg"]
MAGIC = b"wamlabF1"
PREFIX = struct.Struct("<8sII")
PAGE = 4096
QUALITY = 90  # of JPEG, with colours at half resolution, as video has them
TEMPORARY = ".tmp"
ABANDONED_S = 3600.0  # since the last byte; a writer of another host cannot be asked


class Damaged(Exception):
    """A stored file that is not what it should be."""


@dataclass(frozen=True)
class Header:
    """What a file holds."""

    identity: str  # of the video and table it was decoded from
    kind: str
    shape: tuple[int, int, int, int]
    checksums: tuple[int, ...]  # CRC-32 of each frame
    ends: tuple[int, ...]  # where the bytes of each frame end, from the first frame's start
    origin: str  # for people: which episode and camera of which dataset


class StoredFrames:
    """An open file, mapped into memory; safe to share by threads."""

    def __init__(self, path: Path, is_checked: bytearray | None = None):
        """Raises FileNotFoundError where there is none, Damaged for a file that is not whole.

        ``is_checked`` has a 1 for each frame that was found whole before.
        """
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise Damaged("is empty") from error
        self.header, self._start = _read_header(self._map)
        self._bytes = np.frombuffer(self._map, np.uint8)[self._start :]
        self._check_size()
        self._firsts = (0, *self.header.ends)
        is_known = len(is_checked or b"") == self.header.shape[0]
        self.is_checked = is_checked if is_checked and is_known else bytearray(self.header.shape[0])
        is_raw = self.header.kind == "raw"
        self._frames = self._bytes[: self.header.ends[-1]].reshape(self.header.shape) if is_raw else None

    def read(
        self, rows: Int[np.ndarray, " n"], out: UInt8[np.ndarray, "n h w 3"] | None = None
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Return frames by row, in ``out`` if given; raises Damaged when one's checksum is wrong or the file shrank."""
        self._check_size()  # touching what was cut off a mapped file would kill the process
        for row in rows.tolist():
            if not self.is_checked[row]:
                if zlib.crc32(self._stored(row).data) != self.header.checksums[row]:
                    raise Damaged(f"is damaged in frame {row}")
                self.is_checked[row] = 1
        if out is None:
            out = np.empty((len(rows), *self.header.shape[1:]), np.uint8)
        if self._frames is not None:
            return np.take(self._frames, rows, axis=0, out=out, mode="clip")  # other modes copy twice
        return unpack([self._stored(row).data for row in rows.tolist()], out)

    def _stored(self, row: int) -> np.ndarray:
        return self._bytes[self._firsts[row] : self._firsts[row + 1]]

    def _check_size(self) -> None:
        size, needed = self._map.size(), self._start + self.header.ends[-1]
        if size != needed:
            raise Damaged(f"has {size} bytes, not {needed}")


def _read_header(content: mmap.mmap) -> tuple[Header, int]:
    """Return a file's header and where its frames start."""
    try:
        magic, length, checksum = PREFIX.unpack(content[: PREFIX.size])
        text = content[PREFIX.size : PREFIX.size + length]
        if magic != MAGIC or len(text) != length or zlib.crc32(text) != checksum:
            raise ValueError("no such header")
        entry = json.loads(text).items()
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry}
        header = Header(**fields)
    except (struct.error, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged("has no valid header") from error
    return header, -(-(PREFIX.size + length) // PAGE) * PAGE


def write_frames(
    path: Path,
    chunks: Iterable[UInt8[np.ndarray, "_ h w 3"]],
    shape: tuple[int, int, int, int],
    kind: Kind,
    identity: str,
    origin: str,
    has_room: Callable[[], bool],
) -> int:
    """Write the frames of an episode, given piece by piece; return the file's size, 0 where there is no room.

    ``has_room`` is asked when the space is taken, before raw frames are decoded. Raises OSError where the folder cannot
    take them, InputError for frames of several sizes; nothing is left behind then.
    """
    num_frames, frame_bytes = shape[0], int(np.prod(shape[1:]))
    packed: list[bytes] = []
    if kind == "mjpeg":
        for chunk in chunks:
            packed += pack(chunk)
        ends = np.cumsum([len(frame) for frame in packed]).tolist()
    else:
        ends = [frame_bytes * (row + 1) for row in range(num_frames)]
    widest = Header(identity, kind, shape, (2**32 - 1,) * num_frames, tuple(ends), origin)
    start = -(-(PREFIX.size + len(_encoded(widest))) // PAGE) * PAGE
    temporary = path.with_name(f".{path.name}@{threading.get_ident()}@{socket.gethostname()}@{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            _reserve(file, start + ends[-1])
            if not has_room():
                return 0
            file.seek(start)
            checksums: list[int] = []
            for frame in packed or (np.ascontiguousarray(frame).data for chunk in chunks for frame in chunk):
                checksums.append(zlib.crc32(frame))
                file.write(frame)
            if len(checksums) != num_frames or file.tell() != start + ends[-1]:
                raise InputError(f"{origin} has frames of other shapes than {shape}")
            text = _encoded(Header(identity, kind, shape, tuple(checksums), tuple(ends), origin))
            text = text.ljust(start - PREFIX.size)
            file.seek(0)
            file.write(PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return start + ends[-1]


def _encoded(header: Header) -> bytes:
    return json.dumps(asdict(header)).encode()


def _reserve(file: io.BufferedWriter, num_bytes: int) -> None:
    """Take the disk space at once, where the file system can, so that others see it and a full disk shows now."""
    file.truncate(num_bytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, num_bytes)


def is_being_written(path: Path) -> bool:
    """Say whether a living process writes a file; what a dead one left is deleted."""
    is_written = False
    for temporary in path.parent.glob(f".{path.name}@*{TEMPORARY}"):
        is_written |= not remove_if_dead(temporary)
    return is_written


def remove_if_dead(temporary: Path) -> bool:
    """Delete a temporary file whose writer is gone; say whether it was."""
    host, pid = temporary.name.removesuffix(TEMPORARY).split("@")[-2:]
    try:
        is_dead = time.time() - temporary.stat().st_mtime > ABANDONED_S
        if host == socket.gethostname():
            os.kill(int(pid), 0)
    except ProcessLookupError:
        is_dead = True
    except (OSError, ValueError):
        return False  # it has just gone, or the process belongs to another user
    if is_dead:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return is_dead


def pack(frames: UInt8[np.ndarray, "t h w 3"]) -> list[bytes]:
    """Encode frames as JPEG pictures. Pillow does it in half the time of FFmpeg's encoder (2026-12)."""
    packed = []
    for frame in frames:
        stream = io.BytesIO()
        Image.fromarray(frame).save(stream, "jpeg", quality=QUALITY, subsampling=2)
        packed.append(stream.getvalue())
    return packed


class _Decoder(threading.local):
    """FFmpeg's JPEG decoder, which takes two thirds of the time of Pillow's (2026-12); one a thread."""

    def __init__(self) -> None:
        self.codec = av.CodecContext.create("mjpeg", "r")
        self.codec.thread_count = 1
        self.converter = VideoReformatter()


_decoder = _Decoder()


def unpack(packed: list[bytes] | list[memoryview], out: UInt8[np.ndarray, "t h w 3"]) -> UInt8[np.ndarray, "t h w 3"]:
    """Decode JPEG pictures into ``out``."""
    for picture, place in zip(packed, out, strict=True):
        codec = _decoder.codec
        assert isinstance(codec, av.VideoCodecContext)
        (frame,) = codec.decode(av.Packet(picture))  # pyright: ignore[reportArgumentType]
        rgb = _decoder.converter.reformat(frame, format="rgb24", threads=1)
        plane = rgb.planes[0]
        lines = np.frombuffer(memoryview(plane), np.uint8).reshape(rgb.height, plane.line_size)
        place[:] = lines[:, : rgb.width * 3].reshape(rgb.height, rgb.width, 3)
    return out
