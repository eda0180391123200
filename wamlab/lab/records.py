"""Files of one strict JSON record a line, written by one process while others read them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from wamlab.errors import InputError

Record = dict[str, Any]
TAIL_BYTES = 65_536  # enough for the last record of any run


def plain(value: Any, where: str = "the record") -> Any:
    """Reduce a value to what strict JSON can hold; NaN and infinities become null, so that readers see a gap.

    Raises ``InputError`` naming the key of a value that has no JSON form.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}[{str(key)!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value), where)
    if isinstance(value, Enum):
        return plain(value.value, where)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    to_list = getattr(value, "tolist", None)  # numpy and torch, without importing either
    if callable(to_list):
        return plain(to_list(), where)
    raise InputError(f"{where} is a {type(value).__name__}, which JSON cannot hold: give numbers or text")


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file under a temporary name and move it into place, so that no reader meets half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written ({error.strerror}): free space or rights there") from error


def write_json(path: Path, value: Any) -> None:
    """Write one indented JSON document."""
    write_whole(path, json.dumps(plain(value, path.name), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Record:
    """Read one JSON document that is a mapping."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} is missing: {path.parent} is not a whole run folder") from None
    except (ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}): restore it from a copy") from error


def encode_line(record: Mapping[str, Any]) -> bytes:
    """Return the record as one line of strict JSON."""
    return json.dumps(plain(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record by a single unbuffered write, so that readers meet no parts but of the last line.

    The file is opened for each one: on a network disk closing it is what makes the line visible to others.
    """
    line = encode_line(record)
    try:
        with path.open("ab", buffering=0) as file:
            file.write(line)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): free space or rights there") from error


def read_lines(path: Path, since: int = 0) -> tuple[list[Record], int]:
    """Read the finished lines after byte ``since``; return them and the byte to go on from.

    A last line without its end is being written and is left for the next call. A file that is not there
    yet has no lines. Raises ``InputError`` on a line that is not a JSON mapping, with its number, and on an
    offset past the end (the run was resumed and its later records dropped: read again from 0).
    """
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if since > size:
            raise InputError(f"{path} shrank below byte {since}, its run was resumed: read again from 0")
        file.seek(since)
        finished, _, _ = file.read().rpartition(b"\n")
    if not finished:
        return [], since
    lines = finished.split(b"\n")
    return [_decode(line, path, since, lines, i) for i, line in enumerate(lines)], since + len(finished) + 1


def _decode(line: bytes, path: Path, since: int, lines: list[bytes], index: int) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if isinstance(record, dict):
        return record
    with path.open("rb") as file:
        number = file.read(since).count(b"\n") + index + 1
    raise InputError(f"line {number} of {path} is not a JSON record ({line[:40]!r}): mend or delete that line")


def read_last(path: Path) -> Record | None:
    """Read the last finished record without reading a long file whole; None when there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")[:-1]
    if start:
        lines = lines[1:]  # the first one may be cut
    return _decode(lines[-1], path, start, lines, len(lines) - 1) if lines else None


def forget_after(path: Path, step: int, kept_in: Path) -> None:
    """Move the records after ``step``, if there are any, to another file.

    Readers see the old file or the new one, never a part.
    """
    records, _ = read_lines(path)
    forgotten = [record for record in records if record["step"] > step]
    if forgotten:
        write_whole(kept_in, b"".join(map(encode_line, forgotten)))
        write_whole(path, b"".join(encode_line(record) for record in records if record["step"] <= step))


def drop_unfinished_line(path: Path) -> None:
    """Cut a last line that a killed writer left half-written, before others are appended to it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
