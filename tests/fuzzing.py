"""Valid things, damaged: what the fuzz tests of every reader share.

``WAMLAB_FUZZ=1000 pytest tests/test_fuzz_*.py`` draws as many cases of each and others every time; the default is a few
and always the same. A case is a call on damaged input; it may give an answer or one InputError of one sentence, within
``LIMIT_S`` of CPU time and ``LIMIT_MIB`` of memory.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from wamlab.errors import InputError

NUM_CASES = int(os.environ.get("WAMLAB_FUZZ", "0"))
LIMIT_S, LIMIT_MIB = 10.0, 400.0
NEST = "[" * 50_000  # deeper than a reader may go

FUZZ = settings(
    max_examples=NUM_CASES or 40,
    deadline=None,
    database=None,
    derandomize=not NUM_CASES,
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    print_blob=True,
)

ODD_NUMBERS = (
    0, -1, 1, 3, 7, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, 0.5, -0.5, 1e-300, 1e308, float("inf"), float("-inf"),
    float("nan"),
)  # fmt: skip
ODD_TEXTS = (
    "", " ", "..", "../../../etc/passwd", "/etc/passwd", "a\0b", "a\nb", "é☃\u202e", "nan", "1", "x" * 4000, "None",
    "<img src=x onerror=alert(1)>", "{video_key.__class__}", "{episode_index:0999999999d}", "%n%s", "\ud800",
)  # fmt: skip
ODD_THINGS = (None, True, False, [], {}, [[]], [None], {"": {}}, [1, "a"], {"a": 1}, [1, [2]], [0] * 300, ["", ""])
ODD = st.one_of(st.sampled_from(ODD_NUMBERS), st.sampled_from(ODD_TEXTS), st.sampled_from(ODD_THINGS))


def places_of(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a document, its own first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, item in inner for found in places_of(item, (*place, key)))]


def value_at(document: Any, place: Sequence[Any]) -> Any:
    """Return the value at a path."""
    for key in place:
        document = document[key]
    return document


@st.composite
def damaged(draw: st.DrawFn, document: Any) -> Any:
    """Return a document of JSON kinds after one to three changes: values of another kind, keys gone, added, moved."""
    whole = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = places_of(whole)
        place = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(("replace", "replace", "replace", "delete", "add", "rename", "copy", "repeat")))
        value = (
            copy.deepcopy(value_at(whole, draw(st.sampled_from(places))))
            if kind == "copy"
            else copy.deepcopy(draw(ODD))
        )
        if kind == "add":
            holder = value_at(whole, place)
            if isinstance(holder, dict):
                holder[draw(st.sampled_from(ODD_TEXTS))] = value
            elif isinstance(holder, list):
                holder.insert(draw(st.integers(0, len(holder))), value)
            continue
        if not place:
            if kind in ("replace", "copy"):
                whole = value
            continue
        holder, key = value_at(whole, place[:-1]), place[-1]
        if kind == "delete":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from(ODD_TEXTS))] = holder.pop(key)
        elif kind == "repeat" and isinstance(holder[key], list):
            holder[key] = holder[key] * draw(st.integers(0, 3))
        else:
            holder[key] = value
    return whole


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Return bytes after one to three changes: bits flipped, cut off, zeroed, put in, said twice."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        size = len(found)
        start = draw(st.integers(0, max(0, size - 1)))
        length = min(size - start, draw(st.sampled_from((1, 2, 8, 64, 1024))))
        kind = draw(st.sampled_from(("flip", "flip", "cut", "zero", "insert", "twice")))
        if kind == "flip" and size:
            found[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del found[start:]
        elif kind == "zero":
            found[start : start + length] = bytes(length)
        elif kind == "insert":
            found[start:start] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "twice":
            found[start:start] = found[start : start + length]
    return bytes(found)


def as_text(document: Any) -> bytes:
    """Return a document as JSON, with what strict JSON has no words for."""
    return json.dumps(document).encode("utf-8", "surrogatepass")


@st.composite
def damaged_json(draw: st.DrawFn, document: Any) -> bytes:
    """Return a JSON file after changes to what it says, or to its bytes."""
    if draw(st.integers(0, 4)):
        return as_text(draw(damaged(document)))
    odd = (b"", b"[]", b"null", NEST.encode(), b'{"a": 1' + b"0" * 5000 + b"}", b"\xff\xfe{}")
    return draw(st.one_of(damaged_bytes(as_text(document)), st.sampled_from(odd)))


@st.composite
def damaged_lines(draw: st.DrawFn, records: Sequence[Any]) -> bytes:
    """Return a file of one JSON record a line after changes to one record, or to the bytes."""
    lines = [as_text(record) for record in records]
    place = draw(st.integers(0, len(lines) - 1))
    lines[place] = draw(damaged_json(records[place]))
    whole = b"\n".join(lines) + b"\n"
    return whole if draw(st.integers(0, 3)) else draw(damaged_bytes(whole))


def answer(call: Callable[[], Any]) -> Any:
    """Return what a call on damaged input gives, or the InputError it raises; anything else is a fault."""
    start_s, start_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = call()
    except InputError as error:
        found = error
        said = str(error)
        assert said.strip() and len(said.splitlines()) == 1, f"not one line: {said!r}"
        assert "Traceback" not in said
    spent_s = time.process_time() - start_s
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kib) / 1024
    assert spent_s < LIMIT_S, f"took {spent_s:.1f} s"
    assert grown_mib < LIMIT_MIB, f"took {grown_mib:.0f} MiB"
    return found


class Replaced:
    """A file that holds something else for a while."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data = path, data
        self.before = path.read_bytes() if path.exists() else None

    def __enter__(self) -> Path:
        self.path.write_bytes(self.data)
        return self.path

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            self.path.unlink()
        else:
            self.path.write_bytes(self.before)
