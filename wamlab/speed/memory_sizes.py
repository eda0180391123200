"""The memory of every size of micro-batch from two that were traced, and traces as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import pairwise
from typing import Any

from wamlab.errors import InputError
from wamlab.speed.activation_memory import PassMemory, StepMemory, Stretch


def memories_at(traced: Sequence[StepMemory], sizes: Iterable[int]) -> dict[int, StepMemory]:
    """Return the memory of sizes on lines between those traced.

    What stays alive grows by the same bytes with every sample. A peak is the highest of many moments that each grow so,
    hence never above a line between two sizes; beyond the largest one traced it could be, which raises InputError.
    """
    known = {one.micro_batch: one for one in sorted(traced, key=lambda one: one.micro_batch)}
    found = {}
    for size in sizes:
        if size in known:
            found[size] = known[size]
            continue
        pair = next((p for p in pairwise(known) if p[0] < size < p[1]), None)
        if pair is None:
            raise InputError(f"memory was traced for micro-batches of {list(known)}, {size} lies outside: trace it")
        found[size] = _between(known[pair[0]], known[pair[1]], size)
    return found


def with_held(
    memory: StepMemory, num_bytes: int | float, *, encode_bytes: int | float = 0, at_update_bytes: int | float = 0
) -> StepMemory:
    """Return the memory of a step beside which other things lie on the device.

    ``encode_bytes`` are alive for a while before the first micro-batch, ``at_update_bytes`` at the update.
    """
    stem = memory.first.stem
    first = replace(memory.first, stem=Stretch(max(stem.peak, round(encode_bytes)), stem.change))
    return replace(
        memory,
        parameters=memory.parameters + round(num_bytes),
        update_peak=max(memory.update_peak, round(at_update_bytes)),
        first=first,
    )


def memory_to_dict(memory: StepMemory) -> dict[str, Any]:
    """Return plain values for JSON."""
    return asdict(memory)


def memory_from_dict(values: Mapping[str, Any]) -> StepMemory:
    """Return the memory that ``memory_to_dict`` gave."""
    return StepMemory(**{**values, "first": _pass(values["first"]), "later": _pass(values["later"])})


def _pass(values: Mapping[str, Any]) -> PassMemory:
    def made(value: Mapping[str, Any]) -> Any:
        if value.keys() == {"peak", "change"}:
            return Stretch(**value)
        return {policy: Stretch(**one) if isinstance(one, Mapping) else one for policy, one in value.items()}

    return PassMemory(**{name: made(value) for name, value in values.items()})


def _between(low: StepMemory, high: StepMemory, size: int) -> StepMemory:
    step = high.micro_batch - low.micro_batch

    def mixed(a: Any, b: Any) -> Any:
        if isinstance(a, int):
            return a + -(-(b - a) * (size - low.micro_batch) // step)  # up to a whole byte
        if isinstance(a, Mapping):
            return {key: mixed(a[key], b[key]) for key in a}
        return type(a)(**{f.name: mixed(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)})

    return mixed(low, high)
