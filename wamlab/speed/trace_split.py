"""What a trace says that a clock on the host cannot: copies to the device, and collectives beside what computes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wamlab.errors import InputError

Spans = list[tuple[float, float]]  # start and end in microseconds, in order, apart from each other


def split_of_trace(path: Path | str) -> dict[str, float]:
    """Return seconds of one traced step by what the device did: where things overlap, each counts in full.

    "compute" (on a CPU: operations of the busiest thread), "h2d", "communication" and the part of it that nothing
    computed beside, "exposed_communication". Raises InputError where the file is no trace.
    """
    try:
        told: list[dict[str, Any]] = json.loads(Path(path).read_text("utf-8"))["traceEvents"]
        events = [event for event in told if event.get("ph") == "X" and "dur" in event]
        if odd := [event for event in events if not _is_whole(event)]:
            raise ValueError(f"an event says {str(odd[0])[:60]}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is no trace of a step ({error}): write one with traced(...)") from error
    communication = _joined(_span(event) for event in events if _is_collective(event))
    compute = _joined(_span(event) for event in _computing(events))
    copies = _joined(_span(e) for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"])
    found = {
        "compute": compute,
        "h2d": copies,
        "communication": communication,
        "exposed_communication": _without(communication, compute),
    }
    return {name: sum(end - start for start, end in spans) / 1e6 for name, spans in found.items()}


def _is_whole(event: dict[str, Any]) -> bool:
    times = [event.get("ts"), event["dur"]]
    return (
        isinstance(event.get("name"), str)
        and isinstance(event.get("tid", 0), int | str)
        and all(type(time) in (int, float) and abs(time) < 1e300 for time in times)  # pyright: ignore[reportArgumentType]
        and event["dur"] >= 0
    )


def _is_collective(event: dict[str, Any]) -> bool:
    name, kind = event["name"], event.get("cat")
    return name.startswith("gloo:") or (kind == "kernel" and name.startswith("nccl"))


def _computing(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kernels = [event for event in events if event.get("cat") == "kernel" and not _is_collective(event)]
    if kernels:
        return kernels
    own = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("aten::")]
    if not own:
        return []
    by_thread: dict[Any, float] = {}
    for event in own:
        by_thread[event.get("tid")] = by_thread.get(event.get("tid"), 0.0) + event["dur"]
    busiest = max(by_thread, key=lambda thread: by_thread[thread])
    return [event for event in own if event.get("tid") == busiest]


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _joined(spans: Iterable[tuple[float, float]]) -> Spans:
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _without(spans: Spans, others: Spans) -> Spans:
    """Return the parts of spans that lie in none of the others."""
    found: Spans = []
    for start, end in spans:
        for other_start, other_end in others:
            if other_end <= start:
                continue
            if other_start >= end:
                break
            if other_start > start:
                found.append((start, other_start))
            start = max(start, other_end)
        if start < end:
            found.append((start, end))
    return found
