"""JSON files of dataset metadata, read with one clear sentence for whatever is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from wamlab.errors import InputError


def read_json(path: Path) -> Any:
    """Parse a JSON file; InputError when it is missing or malformed."""
    return _parse(path, _text(path), line=None)


def walk_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the byte at which each line begins and the JSON object it holds; InputError names a line that holds none.

    A file as large as memory can be walked.
    """
    start = 0
    try:
        with path.open("rb") as file:
            for line, data in enumerate(file, start=1):
                if not data.isspace():
                    record = _parse(path, data.decode("utf-8"), line)
                    if not isinstance(record, dict):
                        raise InputError(f"line {line} of {path} is no JSON object")
                    yield start, record
                start += len(data)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Parse a file of one JSON object a line; InputError names the line that is none."""
    return [record for _, record in walk_json_lines(path)]


def check_finite(content: Any, what: str) -> None:
    """Raise InputError where a NaN or infinity would make a JSON file that others cannot read."""
    try:
        json.dumps(content, allow_nan=False)
    except ValueError as error:
        raise InputError(f"{what} hold a NaN or infinity: measure them again, or mend the rows") from error


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file for people to read."""
    path.write_text(json.dumps(content, indent=4, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def write_json_lines(path: Path, records: Iterable[Any]) -> None:
    """Write one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            add_json_line(file, record)


def add_json_line(file: TextIO, record: Any) -> None:
    """Write a JSON object as the next line of a file."""
    file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _parse(path: Path, text: str, line: int | None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is malformed JSON at line {line or error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        raise InputError(f"{path} is malformed JSON at line {line or 1}: {error}") from error
