"""Safetensors files read by their headers and streamed one tensor at a time, so that size never meets memory.

A sharded checkpoint is a folder of files and one ``*.safetensors.index.json`` that says which file holds which tensor.
Format: https://huggingface.co/docs/safetensors (a length, a JSON header, the bytes).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from wamlab.errors import InputError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SHARD_BYTES = 5_000_000_000
INDEX = "*.safetensors.index.json"
SHARD_NAME = re.compile(r".*-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class Spec:
    """Shape and type of a tensor that need not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Entry(Spec):
    """Where a stored tensor's bytes are."""

    file: Path
    start: int  # of its first byte in the file


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint by their stored names, in the order they lie on disk."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_index(path: Path) -> Index:
    """Read the headers of a file, or of a folder with one file or with shards and their index; no weights.

    A folder of a whole Diffusers pipeline stands for its ``transformer`` folder. Raises InputError for a file that is
    missing, cut short or no safetensors file, and for shards without an index, as an interrupted copy leaves them.
    """
    if path.is_dir():
        indexes = _visible(path, INDEX)
        files = _visible(path, "*.safetensors")
        if len(indexes) == 1:
            return _read_sharded(indexes[0])
        if not indexes and len(files) == 1 and not SHARD_NAME.fullmatch(files[0].name):
            return Index(path, *read_header(files[0]))
        if not indexes and not files and (path / "transformer").is_dir():
            return read_index(path / "transformer")
        raise InputError(
            f"{path} holds {len(files)} safetensors files and {len(indexes)} indexes: give a folder with one file, "
            "or with shards and their one *.safetensors.index.json"
        )
    if path.name.endswith(".index.json"):
        return _read_sharded(path)
    return Index(path, *read_header(path))


def _visible(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def _read_sharded(path: Path) -> Index:
    try:
        files = dict(json.loads(path.read_text())["weight_map"])
        if not all(isinstance(file, str) and Path(file).name == file for file in files.values()):
            raise ValueError("a shard's name is no plain file name")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as an index of shards ({error!r}): get it again") from error
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for file in sorted(set(files.values())):
        found, notes = read_header(path.parent / file)
        wrong = sorted(found.keys() ^ {name for name, holder in files.items() if holder == file})
        if wrong:
            raise InputError(f"{path} and {file} disagree about {listed(wrong)}: get both again")
        entries |= found
        metadata |= notes
    return Index(path.parent, entries, metadata)


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read a safetensors file's tensors and notes from its header; checks that the file is as long as it says."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            size = file.seek(0, os.SEEK_END)
            if head == b"version ":
                raise InputError(f"{path} is a Git LFS pointer, not weights: fetch them with `git lfs pull`")
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > MAX_HEADER_BYTES:
                raise ValueError("its first bytes are no header length")
            file.seek(8)
            text = file.read(length)
        if len(text) < length:
            raise _cut_short(path, size, 8 + length)
        header: dict[str, Any] = json.loads(text)
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        entries = {name: _entry(path, 8 + length, fields) for name, fields in header.items()}
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} is no safetensors file ({error}): get it again") from error
    entries = dict(sorted(entries.items(), key=lambda item: item[1].start))
    end = max((entry.start + entry.num_bytes for entry in entries.values()), default=8 + length)
    if end > size:
        raise _cut_short(path, size, end)
    return entries, metadata


def _entry(path: Path, offset: int, fields: dict[str, Any]) -> Entry:
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"values of type {fields['dtype']} cannot be read")
    start, end = fields["data_offsets"]
    if not all(type(number) is int and abs(number) < 2**63 for number in (start, end, *fields["shape"])):
        raise ValueError("a tensor's shape and place are not whole numbers")
    entry = Entry(tuple(fields["shape"]), DTYPES[fields["dtype"]], path, offset + start)
    if start < 0 or min(entry.shape, default=0) < 0 or entry.num_bytes != end - start:
        raise ValueError(f"{end - start} bytes are not a {fields['dtype']} tensor of shape {entry.shape}")
    return entry


def _cut_short(path: Path, size: int, wanted: int) -> InputError:
    return InputError(f"{path} is cut short ({size} of {wanted} bytes): copy or download it again")


def read_tensor(entry: Entry) -> Tensor:
    """Read one tensor into memory of its own."""
    return read_values(entry, 0, entry.numel).reshape(entry.shape)


def read_values(entry: Entry, first: int, count: int) -> Tensor:
    """Read ``count`` values of a stored tensor in a row, flat, from value number ``first`` on."""
    found = torch.empty(count * entry.dtype.itemsize, dtype=torch.uint8)
    start = entry.start + first * entry.dtype.itemsize
    try:
        with entry.file.open("rb") as file:
            file.seek(start)
            num_read = file.readinto(found.numpy().data)
    except OSError as error:
        raise InputError(f"{entry.file} cannot be read ({error.strerror}): check the disk") from error
    if num_read != len(found):
        raise _cut_short(entry.file, start + num_read, start + len(found))
    return found.view(entry.dtype)


def write_tensors(
    target: Path,
    plan: Mapping[str, Spec],
    read: Callable[[str], Tensor],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the tensors of a plan, asking ``read`` for one at a time; return the weight files.

    ``target`` is a new folder, or a new ``.safetensors`` file, which is never sharded. Everything is written beside the
    target under a hidden name, an index last, and renamed at the end: a process that is killed leaves no target. Raises
    InputError if the target exists, the disk is full or ``read`` returns a tensor that is not as planned.
    """
    is_file = target.suffix == ".safetensors"
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists: choose a new name")
    shards = _shards(plan, None if is_file else max_shard_bytes)
    total = sum(spec.num_bytes for spec in plan.values())
    partial = target.with_name(f".{target.name}.partial")
    with _explained(target, total):
        if partial.exists():  # of a process that was killed in here
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    try:
        with _explained(target, total):
            free = shutil.disk_usage(partial).free
            if free < total:
                raise OSError(0, f"the disk has {free / 1e9:.2f} GB left")
            names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
            names = names if len(shards) > 1 else [f"{stem}.safetensors"]
            for name, shard in zip(names, shards, strict=True):
                with (partial / name).open("wb") as file:
                    _write_file(file, shard, read, metadata or {})
            if len(shards) > 1:
                weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
                (partial / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))
            (partial / names[0] if is_file else partial).rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [target] if is_file else [target / name for name in names]


@contextmanager
def _explained(target: Path, total: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{target} cannot be written ({error.strerror}): it needs {total / 1e9:.2f} GB; "
            "free space or choose another folder"
        ) from error


def _shards(plan: Mapping[str, Spec], max_bytes: int | None) -> list[dict[str, Spec]]:
    """Cut a plan, in its order, into files; a tensor larger than the limit gets a file of its own."""
    if max_bytes is not None and max_bytes < 1:
        raise InputError(f"max_shard_bytes is {max_bytes}: give at least 1")
    shards: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in plan.items():
        if shards[-1] and max_bytes is not None and size + spec.num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.num_bytes
    # other readers map the file and need each tensor's first byte at a multiple of its item size
    return [dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize)) for shard in shards]


def _write_file(
    file: BinaryIO, shard: Mapping[str, Spec], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for name, spec in shard.items():
        offsets = [start, start + spec.num_bytes]
        header[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        start += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, spec in shard.items():
        tensor = read(name)
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise InputError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {spec.shape} {spec.dtype} as planned"
            )
        file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        del tensor  # or it would wait in memory for the next one
    file.flush()
    os.fsync(file.fileno())


def listed(names: list[str], most: int = 8) -> str:
    """Name the first of many things and count them."""
    return f"{len(names)} ({', '.join(names[:most])}{', ...' if len(names) > most else ''})"
