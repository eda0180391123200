"""Predict the peak memory of a training step for any recompute plan, from a few blocks run without memory.

Three blocks of a network pass forward and backward under fake tensors, once for each policy; how the bytes alive change
and how high they rise in each stretch is noted. Blocks between the first and the last do alike, so the curve of a
deeper network with any mixture of policies is these stretches one after another: a sum and a maximum, no further run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from wamlab.errors import InputError
from wamlab.speed.live_memory import LiveMemory, tensors_of
from wamlab.speed.passes import marked_passes
from wamlab.speed.recompute import with_recompute
from wamlab.speed.recompute_plan import POLICIES, RecomputePlan
from wamlab.speed.tree import flat, rebuilt

TRACED = 3  # blocks: the first, one between, the last


@dataclass(frozen=True)
class Stretch:
    """Bytes of one part of a step, relative to those alive when it begins."""

    peak: int
    change: int  # when it ends

    def then(self, other: Stretch) -> Stretch:
        """Return both, one after the other."""
        return Stretch(max(self.peak, self.change + other.peak), self.change + other.change)


@dataclass(frozen=True)
class PassMemory:
    """One micro-batch forward and backward, in the order of its parts; all but the stem by policy."""

    stem: Stretch  # up to the first block
    forward: Mapping[str, Stretch]  # each block but the last
    tail: Mapping[str, Stretch]  # the last block, the head and the loss, forward and backward
    dropped: Mapping[str, int]  # bytes an earlier block gives back in the tail, e.g. autocast's copies of weights
    last: Mapping[str, Stretch]  # the last block's backward pass
    backward: Mapping[str, Stretch]  # each block between
    root: Mapping[str, Stretch]  # the first block and what lies before it


@dataclass(frozen=True)
class StepMemory:
    """What one size of micro-batch takes on one device, in bytes."""

    micro_batch: int
    num_blocks: int
    parameters: int
    optimizer: int  # its state
    example: int  # one micro-batch as the loss gets it
    gradients: int
    update_peak: int  # what clipping and the optimiser's step take for a while
    first: PassMemory  # of a step: gradients come into being
    later: PassMemory  # gradients are added to those that are there

    def peak(self, plan: RecomputePlan, *, num_micro_batches: int = 1) -> int:
        """Return the most bytes alive in a step once the optimiser has its state."""
        return max(peak for _, peak in self.curve(plan, num_micro_batches=num_micro_batches))

    def curve(self, plan: RecomputePlan, *, num_micro_batches: int = 1) -> list[tuple[str, int]]:
        """Return the peak of every stretch of a step, in order."""
        if len(plan) != self.num_blocks:
            raise InputError(f"the plan is for {len(plan)} blocks, but memory was traced for {self.num_blocks}")
        level = self.parameters + self.optimizer + num_micro_batches * self.example
        found: list[tuple[str, int]] = []
        for one in (self.first, self.later)[: min(num_micro_batches, 2)]:
            for name, stretch in stretches(one, plan):
                found.append((name, level + stretch.peak))
                level += stretch.change
        return [*found, ("update", level + self.update_peak)]


def stretches(one: PassMemory, plan: RecomputePlan) -> list[tuple[str, Stretch]]:
    """Return the named parts of a pass in order."""
    *others, last = plan.policies
    found = [("stem", one.stem)]
    found += [(f"forward {index}", one.forward[policy]) for index, policy in enumerate(others)]
    tail = one.tail[last]
    dropped = sum(one.dropped[policy] for policy in others)
    found.append((f"forward {len(others)} and head", Stretch(tail.peak, tail.change - dropped)))
    found.append((f"backward {len(others)}", one.last[last]))
    backward = [(f"backward {index}", one.backward[policy]) for index, policy in enumerate(others)][1:]
    return [*found, *reversed(backward), ("backward 0 and stem", one.root[others[0]])]


def trace_step_memory(
    make_net: Callable[[int], nn.Module],
    loss: Callable[[Any, Any], Tensor],
    example: Any,
    *,
    num_blocks: int,
    micro_batch: int,
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    update: Callable[[nn.Module, Optimizer], object] | None = None,
    policies: Iterable[str] = POLICIES,
    caches: Iterable[Any] = (),
) -> StepMemory:
    """Trace a step of a network of any size in seconds and without its memory.

    ``make_net`` builds it with a number of blocks; ``loss`` takes it and an example as large as a micro-batch and
    returns a scalar, autocast inside it; ``example`` is a tree of real tensors that all lead with the batch axis.
    ``update`` clips and steps; None steps alone, and without ``make_optimizer`` there is neither state nor update.
    ``caches`` are functions with ``cache_clear`` that keep tensors: they are emptied, or fake ones would stay in them.
    Constants that the loss reads from tensors (``.item()``) must have been read once before.
    """
    if num_blocks < 2:
        raise InputError(f"a network of {num_blocks} block has nothing to plan: give at least 2")
    kept = list(caches)
    traced = {
        policy: tuple(_trace(make_net, loss, example, micro_batch, policy, kept, number) for number in (2, TRACED))
        for policy in policies
    }
    sizes = [_trace_update(make_net, loss, example, make_optimizer, update, number, kept) for number in (2, TRACED)]
    parameters, gradients, optimizer, update_peak = (
        large + (num_blocks - TRACED) * (large - small) for small, large in zip(*sizes, strict=True)
    )
    tensors: list[Tensor] = []
    flat(example, tensors)
    example_bytes = sum(tensor[:1].numel() * tensor.element_size() for tensor in tensors) * micro_batch
    first, later = (
        _pass_memory({policy: (few[number], more[number]) for policy, (few, more) in traced.items()})
        for number in (0, 1)
    )
    return StepMemory(
        micro_batch, num_blocks, parameters, optimizer, example_bytes, gradients, update_peak, first, later
    )


Rows = list[tuple[str, int, int]]  # name of a stretch, bytes alive when it begins, peak of the one before


def _trace(
    make_net: Callable[[int], nn.Module], loss: Callable[[Any, Any], Tensor], example: Any, size: int, policy: str,
    caches: list[Any], num_blocks: int,
) -> list[Rows]:  # fmt: skip
    """Return the stretches of a first and of a second micro-batch."""
    with _WithoutMemory(caches):
        net = with_recompute(make_net(num_blocks), RecomputePlan.uniform(policy, num_blocks))
        given = _as_large(example, size)
        found: list[Rows] = []
        with LiveMemory(tensors_of(net, given)) as memory:
            for _ in range(2):
                rows: Rows = []
                memory.take_peak()
                rows.append(("stem", memory.live_bytes, 0))
                with marked_passes(
                    net, lambda s, rows=rows: rows.append((f"{s[0]} {s[1]}", memory.live_bytes, memory.take_peak()))
                ):
                    loss(net, given).backward()
                rows.append(("end", memory.live_bytes, memory.take_peak()))
                found.append(rows)
        return found


def _pass_memory(rows: Mapping[str, tuple[Rows, Rows]]) -> PassMemory:
    """Read the parts from uniform plans of two and of three blocks."""
    few, more = ({policy: _between(pair[number]) for policy, pair in rows.items()} for number in (0, 1))
    last = TRACED - 1
    dropped = {policy: few[policy]["head 0"].change - more[policy]["head 0"].change for policy in rows}
    tail = {policy: of[f"forward {last}"].then(of["head 0"]) for policy, of in more.items()}
    ends = {policy: of[f"backward {last}"] for policy, of in more.items()}
    # What a block leaves behind goes in the stretch after it, whatever policy that one has: it is counted there.
    sums = {p: tail[p].change + last * dropped[p] + one.change for p, one in ends.items()}
    left = {policy: number - min(sums.values()) for policy, number in sums.items()}
    root = {policy: of["backward 0"].then(of["stem 0"]) for policy, of in more.items()}
    return PassMemory(
        stem=next(iter(more.values()))["stem"],
        forward={policy: of["forward 1"] for policy, of in more.items()},
        tail={policy: Stretch(one.peak, one.change + last * dropped[policy]) for policy, one in tail.items()},
        dropped=dropped,
        last={policy: Stretch(one.peak, one.change - left[policy]) for policy, one in ends.items()},
        backward={
            policy: Stretch(of["backward 1"].peak + left[policy], of["backward 1"].change)
            for policy, of in more.items()
        },
        root={p: Stretch(one.peak + left[p], one.change + left[p]) for p, one in root.items()},
    )


def _between(rows: Rows) -> dict[str, Stretch]:
    pairs = pairwise(rows)
    return {name: Stretch(peak - live, after - live) for (name, live, _), (_, after, peak) in pairs}


def _trace_update(
    make_net: Callable[[int], nn.Module], loss: Callable[[Any, Any], Tensor], example: Any,
    make_optimizer: Callable[[nn.Module], Optimizer] | None, update: Callable[[nn.Module, Optimizer], object] | None,
    num_blocks: int, caches: list[Any],
) -> tuple[int, int, int, int]:  # fmt: skip
    """Return bytes of parameters, gradients and the optimiser's state, and what an update takes for a while."""
    with _WithoutMemory(caches):
        net = make_net(num_blocks)
        parameters = LiveMemory(tensors_of(net)).live_bytes
        loss(net, _as_large(example, 1)).backward()
        gradients = LiveMemory(tensors_of(net)).live_bytes - parameters
        if make_optimizer is None:
            return parameters, gradients, 0, 0
        optimizer = make_optimizer(net)
        optimizer.step()  # makes its state
        state = LiveMemory(tensors_of(optimizer)).live_bytes
        with LiveMemory(tensors_of(net, optimizer)) as memory:
            start = memory.live_bytes
            if update is None:
                optimizer.step()
            else:
                update(net, optimizer)
            return parameters, gradients, state, memory.peak_bytes - start


class _WithoutMemory:
    """Fake tensors inside a ``with`` statement; none of them stays in a cache."""

    def __init__(self, caches: list[Any]) -> None:
        self.caches, self.mode = caches, FakeTensorMode()

    def __enter__(self) -> None:
        self._clear()
        self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)
        self._clear()

    def _clear(self) -> None:
        for cache in self.caches:
            cache.cache_clear()


def _as_large(example: Any, size: int) -> Any:
    """Return an example of so many samples, without values."""
    tensors: list[Tensor] = []
    tree = flat(example, tensors)
    return rebuilt(tree, iter([torch.empty((size, *t.shape[1:]), dtype=t.dtype) for t in tensors]))
