"""How long a training step takes under any recompute plan: a sum over blocks, like its memory.

``measure_times`` runs a few micro-batches through a few blocks of a network, once a policy, and times every stretch of
every pass; blocks between the first and the last take alike. ``recipes/tune_roofline.py`` gives the same structure
from counts of operations, without a device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from wamlab.errors import InputError
from wamlab.speed.passes import marked_passes
from wamlab.speed.recompute import with_recompute
from wamlab.speed.recompute_plan import POLICIES, RecomputePlan
from wamlab.speed.tree import flat, rebuilt

MIXED = "mixed"
MEASURED = 4  # blocks of the network that is timed: two between the first and the last


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block in one micro-batch under one policy."""

    forward_s: int | float
    recompute_s: int | float  # computing again or fetching, before what "keep" needs as well
    backward_s: int | float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.recompute_s + self.backward_s


@dataclass(frozen=True)
class MicroBatchTime:
    """What one size of micro-batch takes on one device, in seconds."""

    micro_batch: int
    num_blocks: int
    rest_s: int | float  # everything of a micro-batch that is no block
    update_s: int | float  # everything of a step that is no micro-batch
    blocks: Mapping[str, BlockTime]  # a block that is not the last one, by policy
    lasts: Mapping[str, BlockTime]

    def block(self, policy: str) -> float:
        return self.blocks[policy].total_s

    def last(self, policy: str) -> float:
        return self.lasts[policy].total_s

    def step_s(self, plan: RecomputePlan, *, num_micro_batches: int = 1) -> float:
        """Return the seconds of a step."""
        if len(plan) != self.num_blocks:
            raise InputError(f"the plan is for {len(plan)} blocks, but {self.num_blocks} were timed")
        *others, last = plan.policies
        one = self.rest_s + sum(self.block(policy) for policy in others) + self.last(last)
        return self.update_s + num_micro_batches * one


def between(low: MicroBatchTime, high: MicroBatchTime, size: int) -> MicroBatchTime:
    """Return the times of another size on the line through two."""
    share = (size - low.micro_batch) / (high.micro_batch - low.micro_batch)

    def mixed(a: int | float, b: int | float) -> float:
        return max(a + share * (b - a), 0.0)

    def both(a: Mapping[str, BlockTime], b: Mapping[str, BlockTime]) -> dict[str, BlockTime]:
        return {
            p: BlockTime(*(mixed(getattr(a[p], n), getattr(b[p], n)) for n in BlockTime.__dataclass_fields__))
            for p in a
            if p in b
        }

    return MicroBatchTime(
        size, low.num_blocks, mixed(low.rest_s, high.rest_s), low.update_s,
        both(low.blocks, high.blocks), both(low.lasts, high.lasts),
    )  # fmt: skip


def times_at(known: Sequence[MicroBatchTime], sizes: Iterable[int]) -> dict[int, MicroBatchTime]:
    """Return the times of all sizes, on lines between those known; one alone is taken to be in proportion."""
    known = sorted(known, key=lambda one: one.micro_batch)
    found = {}
    for size in sizes:
        if len(known) == 1:
            empty = MicroBatchTime(
                0, known[0].num_blocks, 0.0, known[0].update_s,
                *({p: BlockTime(0.0, 0.0, 0.0) for p in known[0].blocks} for _ in range(2)),
            )  # fmt: skip
            pair = (empty, known[0])
        else:
            pairs = list(pairwise(known))
            pair = next((p for p in pairs if size <= p[1].micro_batch), pairs[-1])
        found[size] = between(*pair, size)
    return found


@dataclass(frozen=True)
class MeasuredTimes:
    """Times of some sizes, and by how much they miss what was measured of a mixed plan that they were not read from."""

    times: tuple[MicroBatchTime, ...]
    error: int | float  # the largest over sizes, of forward and backward together


def measure_times(
    make_net: Callable[[int], nn.Module],
    loss: Callable[[Any, Any], Tensor],
    example: Any,
    *,
    num_blocks: int,
    sizes: Sequence[int],
    policies: Iterable[str] = POLICIES,
    num_rounds: int = 3,
    num_measured: int = MEASURED,
    update_s: int | float = 0.0,
    device: torch.device | str = "cpu",
) -> MeasuredTimes:
    """Time forward and backward passes of ``num_measured`` blocks for every size and policy, in turn.

    ``make_net``, ``loss`` and ``example`` (of one sample, on the device) are those of ``trace_step_memory``. A size for
    which memory does not suffice is left out with all larger ones; if none is left torch's error is raised. On a CPU
    seconds are the process's CPU time, on CUDA those between events.
    """
    policies = tuple(policies)
    number = min(num_blocks, max(num_measured, 3))
    net = make_net(number)
    samples: dict[tuple[int, str], list[dict[str, float]]] = {}
    left = sorted(sizes)
    mixed = RecomputePlan(tuple(policies[place % len(policies)] for place in range(number)))
    plans = {policy: RecomputePlan.uniform(policy, number) for policy in policies} | {MIXED: mixed}
    for index in range(num_rounds + 1):  # the first one warms up
        for size in tuple(left):
            for policy, plan in plans.items():
                with_recompute(net, plan)
                try:
                    stretches = _timed_pass(net, loss, as_large(example, size), torch.device(device))
                except torch.OutOfMemoryError:
                    left = [other for other in left if other < size]
                    if not left:
                        raise
                    break
                if index:
                    samples.setdefault((size, policy), []).append(stretches)
            if size not in left:
                break
    found, errors = [], []
    for size in left:
        time_of = _read(size, number, policies, samples)
        passes = [sum(one.values()) for one in samples[size, MIXED]]
        errors.append(abs(time_of.step_s(mixed) / statistics.median(passes) - 1))
        found.append(replace(time_of, num_blocks=num_blocks, update_s=update_s))
    return MeasuredTimes(tuple(found), max(errors))


def as_large(example: Any, size: int) -> Any:
    """Return an example of so many samples, the first one repeated."""
    tensors: list[Tensor] = []
    tree = flat(example, tensors)
    return rebuilt(tree, iter([tensor[:1].expand(size, *tensor.shape[1:]).contiguous() for tensor in tensors]))


def _timed_pass(net: nn.Module, loss: Callable[[Any, Any], Tensor], example: Any, device: torch.device) -> dict:
    """Return the seconds of each stretch of one pass; gradients stay where they are, as they do after the first."""
    marks: list[tuple[str, Any]] = []
    if device.type == "cuda":

        def now() -> Any:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            return event
    else:
        now = time.process_time
    marks.append(("stem", now()))
    with marked_passes(net, lambda stretch: marks.append((f"{stretch[0]} {stretch[1]}", now()))):
        loss(net, example).backward()
    marks.append(("end", now()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return {name: a.elapsed_time(b) / 1000 for (name, a), (_, b) in pairwise(marks)}
    return {name: b - a for (name, a), (_, b) in pairwise(marks)}


def _read(
    size: int, number: int, policies: tuple[str, ...], samples: Mapping[tuple[int, str], list[dict[str, float]]]
) -> MicroBatchTime:  # fmt: skip
    def middle(policy: str, names: Sequence[str]) -> float:
        return statistics.median(one[name] for one in samples[size, policy] for name in names)

    def rest(one: Mapping[str, float]) -> float:
        return sum(seconds for name, seconds in one.items() if name in ("stem", "head 0", "stem 0"))

    def times(places: Sequence[int]) -> dict[str, BlockTime]:
        forward, backward = ([f"{way} {place}" for place in places] for way in ("forward", "backward"))
        least = "keep" if "keep" in policies else min(policies, key=lambda policy: middle(policy, backward))
        base = middle(least, backward)
        return {p: BlockTime(middle(p, forward), middle(p, backward) - base, base) for p in policies}

    return MicroBatchTime(
        size, number, statistics.median(rest(one) for p in policies for one in samples[size, p]), 0.0,
        times(range(number - 1)), times([number - 1]),
    )  # fmt: skip
