"""Files of one strict JSON record a line, written by one process while others read them."""

from __future__ import annotations

import io
import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from wamlab.errors import InputError, advice_for

Record = dict[str, Any]
MOST_STEPS = 2**53  # that a chart can tell apart
MOST = 1e300  # of a figure; a whole number of more digits is none to compute with
FIGURES = (
    "loss", "video_loss", "action_loss", "samples_per_s", "mfu", "memory_gib", "gradient_norm", "step_s",
    "held_out_loss", "action_error", "action_error_mean_baseline", "video_psnr_db", "video_psnr_copy_db",
)  # fmt: skip
KEYS = {  # of figures by name, and what the names may be
    "split_s": re.compile(r".+", re.DOTALL),
    "held_out_loss_by_level": re.compile(r"\d+(\.\d*)?([eE][-+]?\d+)?"),
}
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
    if not path.name:
        raise InputError(f'"{path}" names no file to write: give a path with a name')
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.encode(errors="replace") if isinstance(data, str) else data)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written ({error.strerror}): {advice_for(error)}") from error
    except BaseException:  # an interrupt leaves no part either
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write one indented JSON document."""
    write_whole(path, json.dumps(plain(value, path.name), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Record:
    """Read one JSON document that is a mapping."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} is missing: {path.parent} is not a whole run folder") from None
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}): restore it from a copy") from error
    if not isinstance(document, dict):
        raise InputError(f"{path} holds no JSON object but {str(document)[:40]!r}: restore it from a copy")
    return document


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
            start = file.seek(0, os.SEEK_END)
            try:
                _write_all(file, line)
            except BaseException:  # a full disk, an interrupt: no part that the next line would be joined to
                file.truncate(start)
                raise
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): {advice_for(error)}") from error


def _write_all(file: io.RawIOBase, data: bytes) -> None:
    """Write all of the data: on a disk that is nearly full the system takes a part and does not complain yet."""
    while data:
        data = data[file.write(data) or 0 :]


def read_lines(path: Path, since: int = 0, *, is_strict: bool = False, num_bytes: int = -1) -> tuple[list[Record], int]:
    """Read the finished lines after byte ``since``; return them and the byte to go on from.

    ``num_bytes`` ends the reading early, so that a long file can be read in pieces.

    A last line without its end is being written and is left for the next call. A file that is not there
    yet has no lines. A damaged line, no JSON mapping with a whole ``step``, is left out with a warning that names its
    number, or raises ``InputError`` if ``is_strict``; so does, in any case, an offset past the end (the run was
    resumed and its later records dropped: read again from 0).
    """
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if since > size:
            raise InputError(f"{path} shrank below byte {since}, its run was resumed: read again from 0")
        file.seek(since)
        finished, _, _ = file.read(num_bytes).rpartition(b"\n")
        if not finished and 0 < num_bytes < size - since:  # a line longer than the piece
            file.seek(since)
            finished, _, _ = file.read().rpartition(b"\n")
    if not finished:
        return [], since
    lines = finished.split(b"\n")
    records = [_decode(line) for line in lines]
    if damaged := [place for place, record in enumerate(records) if record is None]:
        with path.open("rb") as file:
            number = file.read(since).count(b"\n") + damaged[0] + 1
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        wrong = (
            f"line {number} of {path}{more} is not a JSON record with a step and numbers ({lines[damaged[0]][:40]!r})"
        )
        if is_strict:
            raise InputError(f"{wrong}: mend or delete it")
        warnings.warn(f"{wrong} and is left out", stacklevel=2)  # one place, so one notice
    return [record for record in records if record is not None], since + len(finished) + 1


def _decode(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and is_sound(record) else None


def is_sound(record: Record) -> bool:
    """Say whether a record has a whole step, and numbers or nothing where figures are drawn from it."""
    step = record.get("step")
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        return False
    values = [record[name] for name in FIGURES if name in record]
    for name in KEYS:
        group = record.get(name) or {}
        if not isinstance(group, dict) or not all(map(KEYS[name].fullmatch, group)):
            return False
        values += group.values()
    return all(value is None or (isinstance(value, int | float) and not abs(value) > MOST) for value in values)


def read_last(path: Path) -> Record | None:
    """Read the last finished, sound record without reading a long file whole; None when there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")[:-1]
    if start:
        lines = lines[1:]  # the first one may be cut
    return next((record for line in reversed(lines) if (record := _decode(line)) is not None), None)


def forget_after(path: Path, step: int, kept_in: Path) -> None:
    """Move the records after ``step``, if there are any, to another file.

    Readers see the old file or the new one, never a part. Raises InputError for a damaged line.
    """
    records, _ = read_lines(path, is_strict=True)
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
