"""Every recompute plan and micro-batch at once: the least memory and the least time, found exactly.

Under the models of memory and time the blocks between the first and the last are alike, so a plan is its first block,
its last one, how many blocks between follow each policy, and their order. All numbers are enumerated. The order decides
the peak alone, a maximum over four walks (forward and backward, as gradients come into being and as they are added to):
each walk alone is highest where the blocks that give memory back do not come first, by their peaks, and the others not
after these, by what they take for a while. Where one order serves all walks it is proved best; where none does, a
dynamic programme over the blocks placed so far finds the best one, for the plans that could still matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wamlab.errors import InputError
from wamlab.speed.activation_memory import PassMemory, StepMemory
from wamlab.speed.recompute_plan import POLICIES, RecomputePlan
from wamlab.speed.step_time import MicroBatchTime

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
LOW = -(2**60)  # below every number of bytes


class Walk(NamedTuple):
    """How the blocks between are passed: per policy what one adds, and how high it rises meanwhile."""

    change: Ints
    peak: Ints
    is_backward: bool

    def best_order(self) -> tuple[int, ...]:
        """Return policies from the first block on so that no other order of blocks has a lower peak."""
        change, peak = self.change.tolist(), self.peak.tolist()
        places = range(len(change))
        giving = sorted((p for p in places if change[p] < 0), key=lambda p: (peak[p], p))
        taking = sorted((p for p in places if change[p] >= 0), key=lambda p: (change[p] - peak[p], p))
        order = (*giving, *taking)
        return order[::-1] if self.is_backward else order

    def highest(self, counts: Ints, order: Sequence[int]) -> Ints:
        """Return the peak above where the walk begins, for rows of counts with blocks of one policy side by side."""
        level = np.zeros(len(counts), np.int64)
        found = np.full(len(counts), LOW)
        for policy in reversed(order) if self.is_backward else order:
            number = counts[:, policy]
            top = level + (number - 1) * max(self.change[policy], 0) + self.peak[policy]
            np.maximum(found, np.where(number > 0, top, LOW), out=found)
            level += number * self.change[policy]
        return found


class Rows(NamedTuple):
    """Plans of one micro-batch with one first and one last policy, a row each."""

    peak: Ints  # of the best order tried
    order: Ints  # its place in the list of orders
    bound: Ints  # no order has a lower peak


@dataclass(frozen=True)
class Sized:
    """The enumeration for one size of micro-batch."""

    memory: StepMemory
    time: MicroBatchTime
    num_micro_batches: int
    policies: tuple[str, ...]
    counts: Ints  # (plans, policies) of the blocks between

    @property
    def passes(self) -> tuple[PassMemory, ...]:
        return (self.memory.first, self.memory.later)[: min(self.num_micro_batches, 2)]

    def walks(self) -> list[Walk]:
        found = []
        for one in self.passes:
            for parts, is_backward in ((one.forward, False), (one.backward, True)):
                change, peak = ([getattr(parts[p], name) for p in self.policies] for name in ("change", "peak"))
                found.append(Walk(np.array(change, np.int64), np.array(peak, np.int64), is_backward))
        return found

    def orders(self) -> list[tuple[int, ...]]:
        """Return the best order of each walk; the first one alone if it is best for all, whatever the numbers."""
        walks = self.walks()
        found = list(dict.fromkeys(walk.best_order() for walk in walks))
        best = [walk.highest(self.counts, walk.best_order()) for walk in walks]
        for order in found:
            pairs = zip(walks, best, strict=True)
            if all(np.array_equal(walk.highest(self.counts, order), least) for walk, least in pairs):
                return [order]
        return found

    @cached_property
    def sums(self) -> list[tuple[Ints, Ints, Ints]]:
        """Return what all blocks between add forward, give back in the tail and add backward, for each pass."""

        def sum_of(values: Mapping[str, int]) -> Ints:
            return self.counts @ np.array([values[p] for p in self.policies], np.int64)

        return [
            (
                sum_of({p: s.change for p, s in one.forward.items()}),
                sum_of(one.dropped),
                sum_of({p: s.change for p, s in one.backward.items()}),
            )
            for one in self.passes
        ]

    def starts(self, first: str, last: str) -> tuple[list[Ints], Ints]:
        """Return where each walk begins, and the peak of everything outside of the walks."""
        memory = self.memory
        level = np.full(len(self.counts), memory.parameters + memory.optimizer, np.int64)
        level += self.num_micro_batches * memory.example
        starts, other = [], np.full(len(self.counts), LOW)

        def pass_by(peak: int, change: int) -> None:
            nonlocal level
            np.maximum(other, level + peak, out=other)
            level = level + change

        for one, (forward, dropped, backward) in zip(self.passes, self.sums, strict=True):
            pass_by(one.stem.peak, one.stem.change)
            pass_by(one.forward[first].peak, one.forward[first].change)
            starts.append(level)
            level = level + forward
            pass_by(one.tail[last].peak, one.tail[last].change)
            level = level - one.dropped[first] - dropped
            pass_by(one.last[last].peak, one.last[last].change)
            starts.append(level)
            level = level + backward
            pass_by(one.root[first].peak, one.root[first].change)
        pass_by(memory.update_peak, 0)
        return starts, other

    @cached_property
    def between_s(self) -> Floats:
        seconds = np.array([self.time.block(p) for p in self.policies], np.float64)
        return self.num_micro_batches * (self.counts @ seconds)

    def times(self, first: str, last: str) -> Floats:
        """Return the seconds of a step."""
        time = self.time
        other = time.update_s + self.num_micro_batches * (time.rest_s + time.block(first) + time.last(last))
        return self.between_s + other

    def plan(self, first: int, last: int, row: int, order: Sequence[int]) -> RecomputePlan:
        """Return a plan with the blocks between in an order, those of one policy side by side."""
        middle = [self.policies[p] for p in order for _ in range(self.counts[row, p])]
        return RecomputePlan((self.policies[first], *middle, self.policies[last]))


@cache
def compositions(total: int, parts: int) -> Ints:
    """Return every way to write a number as an ordered sum of so many numbers from 0, a row each."""
    if parts == 1:
        return np.array([[total]], np.int64)
    rows = []
    for own in range(total + 1):
        rest = compositions(total - own, parts - 1)
        rows.append(np.hstack([np.full((len(rest), 1), own, np.int64), rest]))
    return np.vstack(rows)


def sized(
    memory: StepMemory, time: MicroBatchTime, num_micro_batches: int, policies: Sequence[str] = POLICIES
) -> Sized:
    """Prepare the enumeration for one micro-batch; policies that were not traced or timed raise InputError."""
    for policy in policies:
        if policy not in memory.first.forward or policy not in time.blocks:
            raise InputError(f'the policy "{policy}" has no memory or time: trace and time it')
    if memory.num_blocks != time.num_blocks:
        raise InputError(f"memory is of {memory.num_blocks} blocks, times of {time.num_blocks}: give the same network")
    return Sized(memory, time, num_micro_batches, tuple(policies), compositions(memory.num_blocks - 2, len(policies)))


def peaks(given: Sized, first: str, last: str, heights: Sequence[tuple[Sequence[Ints], tuple[int, ...]]]) -> Rows:
    """Return the lowest peak over the orders tried for every row, and a bound for all orders."""
    starts, other = given.starts(first, last)
    found, chosen = None, np.zeros(len(other), np.int64)
    for place, (tops, _) in enumerate(heights):
        peak = other
        for start, top in zip(starts, tops, strict=True):
            peak = np.maximum(peak, start + top)
        if found is None:
            found = peak
        else:
            is_lower = peak < found
            chosen[is_lower] = place
            found = np.minimum(found, peak)
    assert found is not None
    if len(heights) == 1:
        return Rows(found, chosen, found)
    bound = other
    for walk, start in enumerate(starts):
        bound = np.maximum(bound, start + np.minimum.reduce([tops[walk] for tops, _ in heights]))
    return Rows(found, chosen, bound)


def heights_of(given: Sized) -> list[tuple[list[Ints], tuple[int, ...]]]:
    """Return, for each order worth trying, every walk's peak above its start."""
    walks = given.walks()
    return [([walk.highest(given.counts, order) for walk in walks], order) for order in given.orders()]


def best_order(given: Sized, first: str, last: str, row: int) -> tuple[int, RecomputePlan]:
    """Return the lowest peak of one row over all orders of its blocks, and a plan that has it.

    A dynamic programme over how many blocks of each policy stand before a place: nothing else matters for what follows.
    """
    starts, other = given.starts(first, last)
    walks, counts = given.walks(), tuple(int(number) for number in given.counts[row])
    begin = [int(start[row]) for start in starts]
    best: dict[tuple[int, ...], tuple[int, int]] = {(0,) * len(counts): (LOW, -1)}
    for placed in _prefixes(counts):
        if not any(placed):
            continue
        options = []
        for policy, number in enumerate(placed):
            if not number:
                continue
            before = tuple(n - (p == policy) for p, n in enumerate(placed))
            top = best[before][0]
            for walk, start in zip(walks, begin, strict=True):
                passed = before if not walk.is_backward else [c - n for c, n in zip(counts, placed, strict=True)]
                level = start + sum(n * int(c) for n, c in zip(passed, walk.change, strict=True))
                top = max(top, level + int(walk.peak[policy]))
            options.append((top, policy))
        best[placed] = min(options)
    placed, names = counts, []
    while any(placed):
        policy = best[placed][1]
        names.append(given.policies[policy])
        placed = tuple(n - (p == policy) for p, n in enumerate(placed))
    return max(int(other[row]), best[counts][0]), RecomputePlan((first, *reversed(names), last))


def simplest_order(given: Sized, first: int, last: int, row: int, most_bytes: int) -> RecomputePlan:
    """Return the simplest plan of a row that stays within a peak, blocks of one policy side by side."""
    used = [p for p in range(len(given.policies)) if given.counts[row, p]]
    plans = {given.plan(first, last, row, order) for order in permutations(used)}
    for plan in sorted(plans, key=lambda plan: (plan.complexity, plan.policies)):
        if given.memory.peak(plan, num_micro_batches=given.num_micro_batches) <= most_bytes:
            return plan
    raise AssertionError("no order of the blocks has the peak that was found")


def _prefixes(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all tuples below counts, each after those it contains."""
    for place in np.ndindex(*(number + 1 for number in counts)):
        yield tuple(int(number) for number in place)
