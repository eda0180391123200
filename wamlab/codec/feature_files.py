"""Records of tensors under text keys, in memory-mapped shards: many writers at once, killed at any time.

A shard ``NAME.bin`` holds records of one size, one after another; its manifest entry ``NAME.json`` says which, with
the SHA-256 of the shard and a checksum of every record. A writer makes both under temporary names and moves the
entry into place first, the shard last: an entry without its shard counts for nothing, so no reader meets half a
record, and deleting a damaged shard is all it takes to have its records made again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from wamlab.errors import InputError

FORMAT = "wamlab-features-1"
ALIGNMENT = 16  # bytes; a tensor of a record begins at a multiple of it
MAX_MAPPED = 128  # shards mapped at once; each holds a file open
FLUSH_S = 60.0  # a killed writer loses no more than the last minute's records
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}

Record = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a record lie in its bytes."""

    fields: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape

    @cached_property
    def spans(self) -> list[tuple[str, torch.dtype, tuple[int, ...], slice]]:
        spans, start = [], 0
        for name, dtype, shape in self.fields:
            end = start + math.prod(shape) * DTYPES[dtype].itemsize
            spans.append((name, DTYPES[dtype], shape, slice(start, end)))
            start = -(-end // ALIGNMENT) * ALIGNMENT
        return spans

    @cached_property
    def record_bytes(self) -> int:
        end = self.spans[-1][-1].stop if self.spans else 0
        return max(1, -(-end // ALIGNMENT)) * ALIGNMENT

    def packed(self, record: Record) -> UInt8[np.ndarray, " bytes"]:
        row = np.zeros(self.record_bytes, np.uint8)
        for name, _, _, span in self.spans:
            row[span] = record[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return row

    def unpacked(self, row: UInt8[np.ndarray, " bytes"]) -> Record:
        data = torch.from_numpy(row)
        return {name: data[span].view(dtype).reshape(shape) for name, dtype, shape, span in self.spans}


def layout_of(record: Record) -> Layout:
    """Return the layout of a record's tensors; only floating-point ones can be kept."""
    fields = [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in record.items()]
    if odd := [f"{name} ({dtype})" for name, dtype, _ in fields if dtype not in DTYPES]:
        raise InputError(f"features {', '.join(odd)} cannot be stored: give one of {', '.join(DTYPES)}")
    return Layout(tuple(sorted(fields)))


@dataclass(eq=False)
class Shard:
    """One file of records and what its manifest entry says of it."""

    path: Path
    layout: Layout
    keys: list[str]
    checksums: list[int]  # CRC-32 of each record
    sha256: str
    is_checked: bytearray = field(init=False)  # 1 for each record that was read and found whole

    def __post_init__(self) -> None:
        self.is_checked = bytearray(len(self.keys))

    @property
    def num_bytes(self) -> int:
        return len(self.keys) * self.layout.record_bytes

    def map(self) -> UInt8[np.ndarray, "records bytes"]:
        """Map the file; one that is missing or of another size raises ``InputError``."""
        try:
            size = self.path.stat().st_size
            if size != self.num_bytes:
                raise self.damage(f"has {size} bytes, not {self.num_bytes}")
            return np.memmap(self.path, np.uint8, "r", shape=(len(self.keys), self.layout.record_bytes))
        except OSError as error:
            raise self.damage(f"cannot be read ({error.strerror})") from error

    def damage(self, what: str) -> InputError:
        return InputError(f"{self.path} {what}: delete that file and run `wamlab encode` again, which makes it anew")


class RecordFolder:
    """All records made under one description, found by key; ``add`` and ``flush`` write new ones.

    Reading never makes the folder. One object writes from one thread; other threads may ask what it holds.
    """

    def __init__(self, root: Path, about: Mapping[str, str], *, shard_mib: int | float = 64.0) -> None:
        """Take the folder of ``root`` that belongs to ``about``: another description is another folder."""
        self.about = dict(about)
        content = json.dumps(self.about, sort_keys=True)
        self.folder = root / hashlib.sha256(content.encode()).hexdigest()[:16]
        self._limit = shard_mib * 2**20
        self._shards: dict[str, Shard] = {}
        self._index: dict[str, tuple[Shard, int]] = {}
        self._pending: dict[str, tuple[Layout, np.ndarray]] = {}
        self._pending_bytes, self._flushed_s = 0, time.monotonic()
        self._mapped = lru_cache(maxsize=MAX_MAPPED)(Shard.map)
        self.refresh()

    def __contains__(self, key: str) -> bool:
        return key in self._index or key in self._pending

    def __len__(self) -> int:
        return len(self._index) + len(self._pending)

    @property
    def num_bytes(self) -> int:
        """Size of the finished shards."""
        return sum(shard.num_bytes for shard in self._shards.values())

    def refresh(self) -> None:
        """Take note of the shards that other processes have finished since."""
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        for name in sorted(names):
            stem = name.removesuffix(".bin")
            if stem != name and not name.startswith(".") and stem not in self._shards and f"{stem}.json" in names:
                self._take(read_entry(self.folder / f"{stem}.json"))

    def read(self, key: str) -> Record:
        """Return a copy of one record; raise ``InputError`` naming the file of a damaged one."""
        if key in self._pending:
            layout, row = self._pending[key]
            return layout.unpacked(row.copy())
        shard, number = self._index[key]
        row = np.array(self._mapped(shard)[number])
        if not shard.is_checked[number]:
            if zlib.crc32(row.data) != shard.checksums[number]:
                raise shard.damage(f"is damaged in record {number}")
            shard.is_checked[number] = 1
        return shard.layout.unpacked(row)

    def add(self, key: str, record: Record) -> None:
        """Keep a record, writing a shard when there are enough; one that is there already is left as it is."""
        if key in self:
            return
        layout = layout_of(record)
        self._pending[key] = (layout, layout.packed(record))
        self._pending_bytes += layout.record_bytes
        if self._pending_bytes >= self._limit or time.monotonic() - self._flushed_s > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what was added as finished shards; raise ``InputError`` if that fails, leaving nothing behind."""
        groups: dict[Layout, list[str]] = {}
        for key, (layout, _) in self._pending.items():
            groups.setdefault(layout, []).append(key)
        for layout, keys in groups.items():
            self._take(write_shard(self.folder, layout, keys, [self._pending[key][1] for key in keys], self.about))
            for key in keys:
                self._pending_bytes -= len(self._pending.pop(key)[1])
        self._flushed_s = time.monotonic()

    def verify(self) -> None:
        """Compare every finished shard with the hash in its manifest entry; raise ``InputError`` at the first that
        differs."""
        for shard in self._shards.values():
            if hashlib.sha256(shard.map().data).hexdigest() != shard.sha256:
                raise shard.damage("is damaged")

    def sweep(self) -> None:
        """Delete what killed writers of this host left unfinished, and the entries of shards that were deleted."""
        for path in self.folder.glob(".*.tmp"):
            host, pid = path.name.removesuffix(".tmp").split("@")[1:]
            if is_gone(host, int(pid)):
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.json"):
            if path.name != "about.json" and not path.with_suffix(".bin").exists():
                writer = read_json(path).get("writer", {})
                if is_gone(str(writer.get("host")), int(writer.get("pid", 0))):
                    path.unlink(missing_ok=True)

    def _take(self, shard: Shard) -> None:
        self._shards[shard.path.stem] = shard
        for number, key in enumerate(shard.keys):
            self._index.setdefault(key, (shard, number))


def is_gone(host: str, pid: int) -> bool:
    """Say whether a writer is certainly dead; one of another host never is."""
    if host != socket.gethostname() or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it lives and belongs to another user
    return False


def read_json(path: Path) -> dict:
    """Read a manifest entry's mapping; ``InputError`` names a file that holds none."""
    try:
        entry = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise InputError(f"{path} is no manifest entry: delete that file and run `wamlab encode` again")
    return entry


def read_entry(path: Path) -> Shard:
    """Read a manifest entry; ``InputError`` names one that is damaged or of another version."""
    entry = read_json(path)
    if entry.get("format") != FORMAT:
        raise InputError(f"{path} has format {entry.get('format')}, not {FORMAT}: give another features.root")
    try:
        fields = tuple((str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in entry["fields"])
        keys, checksums = [str(key) for key in entry["keys"]], [int(number) for number in entry["checksums"]]
        if not len(keys) == len(checksums) > 0 or any(dtype not in DTYPES for _, dtype, _ in fields):
            raise ValueError("its lists do not fit together")
        if any(not 0 <= size < 2**40 for _, _, shape in fields for size in shape):
            raise ValueError("a tensor has no such shape")
        return Shard(path.with_suffix(".bin"), Layout(fields), keys, checksums, str(entry["sha256"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path} is damaged: delete that file and run `wamlab encode` again") from error


def write_shard(
    folder: Path, layout: Layout, keys: Sequence[str], rows: Sequence[np.ndarray], about: Mapping[str, str]
) -> Shard:
    """Write records and their manifest entry under a new name, both or neither.

    Raises ``InputError`` naming the folder when it is full or closed to writing.
    """
    name = uuid.uuid4().hex[:20]
    shard = folder / f"{name}.bin"
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.data)
    sha256, checksums = digest.hexdigest(), [zlib.crc32(row.data) for row in rows]
    entry = {
        "format": FORMAT,
        "sha256": sha256,
        "writer": {"host": socket.gethostname(), "pid": os.getpid()},
        "fields": layout.fields,
        "keys": list(keys),
        "checksums": checksums,
    }
    suffix = f".@{socket.gethostname()}@{os.getpid()}.tmp"
    moves = {folder / f".{name}{kind}{suffix}": folder / f"{name}{kind}" for kind in (".json", ".bin")}
    contents: list[list[bytes | memoryview]] = [[json.dumps(entry).encode()], [row.data for row in rows]]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "about.json").exists():  # for people; nothing reads it
            moves = {folder / f".{name}.about{suffix}": folder / "about.json"} | moves
            contents.insert(0, [json.dumps(about, indent=2).encode()])
        for temporary, content in zip(moves, contents, strict=True):
            with temporary.open("xb") as file:
                for part in content:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in moves.items():
            temporary.replace(path)
    except OSError as error:
        for path in (*moves, folder / f"{name}.json", shard):
            with suppress(OSError):  # the folder itself may be out of reach
                path.unlink(missing_ok=True)
        raise InputError(
            f"{folder} cannot take more features ({error.strerror}): free space or rights there"
        ) from error
    return Shard(shard, layout, list(keys), checksums, sha256)
