"""Choose how a step is computed: micro-batch and recompute plan, the fastest that fits, the simplest of the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wamlab.errors import InputError
from wamlab.speed.activation_memory import StepMemory
from wamlab.speed.choice import StepChoice
from wamlab.speed.recompute_plan import POLICIES, RecomputePlan
from wamlab.speed.step_time import MicroBatchTime
from wamlab.speed.tune_search import (
    Floats,
    Ints,
    Rows,
    Sized,
    best_order,
    heights_of,
    peaks,
    simplest_order,
    sized,
)

# Kinds of policies and runs of equal blocks a plan may have, from simple to any.
LEVELS = ((1, 1), (2, 2), (2, 3), (3, 3), (99, 10**6))
TOLERANCE = 0.003  # of a step's time: below what the models know, so the simpler plan is taken


class Points(NamedTuple):
    """Plans none of which is both slower and larger than another, from the smallest peak on."""

    peak: Ints
    time: Floats
    key: Ints  # (points, 5): place of the size, first and last policy, row, order

    def better(self, peak: Ints, time: Floats) -> np.ndarray:
        """Say which of other plans are faster than every one of these within their peak."""
        if not len(self.peak):
            return np.ones(len(peak), bool)
        place = np.searchsorted(self.peak, peak, side="right") - 1
        return (place < 0) | (time < self.time[np.maximum(place, 0)])

    def joined(self, peak: Ints, time: Floats, key: Ints) -> Points:
        peak, time = np.concatenate([self.peak, peak]), np.concatenate([self.time, time])
        key = np.concatenate([self.key, key])
        order = np.lexsort((time, peak))
        peak, time, key = peak[order], time[order], key[order]
        least = np.minimum.accumulate(time)
        is_kept = np.ones(len(time), bool)
        is_kept[1:] = time[1:] < least[:-1]
        return Points(peak[is_kept], time[is_kept], key[is_kept])


EMPTY = Points(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, 5), np.int64))


@dataclass(frozen=True)
class StepSearch:
    """The result of looking at every plan: fronts of memory against time by how simple plans are."""

    sizes: tuple[Sized, ...]
    orders: tuple[tuple[tuple[int, ...], ...], ...]  # those tried, of each size
    levels: tuple[Points, ...]  # as ``LEVELS``; the last one is of all plans
    solved: Mapping[tuple[int, int, int, int], RecomputePlan]  # plans whose order a dynamic programme found

    @property
    def least_bytes(self) -> int:
        """Return the smallest peak of any plan."""
        return int(self.levels[-1].peak[0])

    def fastest(self, budget_bytes: int | float | None = None, *, tolerance: int | float = TOLERANCE) -> StepChoice:
        """Return the fastest plan within a budget, or the simplest of those that take ``tolerance`` longer at most.

        Raises InputError where nothing fits.
        """
        budget = float("inf") if budget_bytes is None else budget_bytes
        if budget < self.least_bytes:
            raise InputError(
                f"no plan fits {budget / 2**30:.2f} GiB: the smallest takes {self.least_bytes / 2**30:.2f} GiB; give "
                "more memory, more devices or a smaller batch"
            )
        best = _within(self.levels[-1], budget)
        assert best is not None
        most = best[0] * (1 + tolerance)
        for points in self.levels:
            found = _within(points, budget)
            if found is not None and found[0] <= most:
                return self._choice(points, found[1])
        raise AssertionError("the last level has every plan")

    def front(self, *, tolerance: int | float = TOLERANCE) -> list[StepChoice]:
        """Return choices from the least memory to the fastest, each at least ``tolerance`` faster than the one before.

        With a tolerance of 0 it is the whole front.
        """
        found: list[StepChoice] = []
        points = self.levels[-1]
        place = 0
        while place < len(points.peak):
            limit = points.time[place] * (1 - tolerance) if tolerance else points.time[place]
            choice = self.fastest(int(points.peak[place]), tolerance=tolerance)
            if not found or choice.step_s < found[-1].step_s:
                found.append(choice)
            later = np.flatnonzero(points.time < limit)
            if not len(later):
                break
            place = int(later[0])
        return found

    def _choice(self, points: Points, place: int) -> StepChoice:
        index, first, last, row, order = (int(value) for value in points.key[place])
        given = self.sizes[index]
        plan = self.solved.get((index, first, last, row))
        if plan is None or order >= 0:
            plan = simplest_order(given, first, last, row, int(points.peak[place]))
        peak = given.memory.peak(plan, num_micro_batches=given.num_micro_batches)
        step_s = given.time.step_s(plan, num_micro_batches=given.num_micro_batches)
        return StepChoice(given.memory.micro_batch, given.num_micro_batches, plan, peak, step_s)


def search(
    memories: Mapping[int, StepMemory],
    times: Mapping[int, MicroBatchTime],
    batch_size: int,
    policies: Sequence[str] = POLICIES,
) -> StepSearch:
    """Look at every plan of every micro-batch that has a memory and a time and divides the batch of a device."""
    chosen = [size for size in sorted(memories) if size in times and batch_size % size == 0]
    if not chosen:
        raise InputError(f"no micro-batch of {sorted(memories)} divides a batch of {batch_size}: give a divisor")
    sizes = tuple(sized(memories[s], times[s], batch_size // s, policies) for s in chosen)
    levels = [EMPTY] * len(LEVELS)
    unsure: list[tuple[Ints, Floats, Ints]] = []
    orders = []
    for index, given in enumerate(sizes):
        heights = heights_of(given)
        orders.append(tuple(order for _, order in heights))
        shapes = [_shapes(given, order) for _, order in heights]
        simple = np.flatnonzero(np.bitwise_count(shapes[0].bits) <= LEVELS[-2][0])
        for first, first_policy in enumerate(given.policies):
            for last, last_policy in enumerate(given.policies):
                rows = peaks(given, first_policy, last_policy, heights)
                time = given.times(first_policy, last_policy)
                kinds, runs = _count(shapes, rows.order[simple], first, last, simple)
                for level, (most_kinds, most_runs) in enumerate(LEVELS[:-1]):
                    own = simple[(kinds <= most_kinds) & (runs <= most_runs)]
                    levels[level] = _joined(levels[level], rows, time, own, (index, first, last))
                levels[-1] = _joined(levels[-1], rows, time, None, (index, first, last))
                if len(heights) > 1:
                    places = np.flatnonzero((rows.bound < rows.peak) & levels[-1].better(rows.bound, time))
                    minus = np.full(len(places), -1)
                    unsure.append((rows.bound[places], time[places], _keys(index, first, last, places, minus)))
    levels[-1], solved = _solve(sizes, levels[-1], unsure)
    return StepSearch(sizes, tuple(orders), tuple(levels), solved)


def _joined(points: Points, rows: Rows, time: Floats, own: Ints | None, place: tuple[int, int, int]) -> Points:
    """Add those of some rows (None: all) that belong on the front."""
    peak, order = (rows.peak, rows.order) if own is None else (rows.peak[own], rows.order[own])
    seconds = time if own is None else time[own]
    better = np.flatnonzero(points.better(peak, seconds))
    if not len(better):
        return points
    numbers = better if own is None else own[better]
    return points.joined(peak[better], seconds[better], _keys(*place, numbers, order[better]))


def _solve(
    sizes: Sequence[Sized], points: Points, unsure: Sequence[tuple[Ints, Floats, Ints]]
) -> tuple[Points, dict[tuple[int, int, int, int], RecomputePlan]]:
    """Find the best order of every plan that could be on the front if its order were better than those tried."""
    solved: dict[tuple[int, int, int, int], RecomputePlan] = {}
    for bounds, times, keys in unsure:
        for bound, time, key in zip(bounds, times, keys, strict=True):
            if points.better(bound[None], time[None])[0]:
                index, first, last, row, _ = (int(value) for value in key)
                given = sizes[index]
                peak, plan = best_order(given, given.policies[first], given.policies[last], row)
                if points.better(np.array([peak]), time[None])[0]:
                    points = points.joined(np.array([peak]), time[None], key[None])
                    solved[index, first, last, row] = plan
    return points, solved


class _Shape(NamedTuple):
    """Of every row with its blocks in one order: which policies it has, as bits, and those at its ends."""

    bits: Ints
    begin: Ints  # -1 where there is no block between
    end: Ints


def _shapes(given: Sized, order: tuple[int, ...]) -> _Shape:
    has = given.counts > 0
    bits = has @ (1 << np.arange(len(given.policies), dtype=np.int64))
    ordered = has[:, order]
    begin = np.array(order)[ordered.argmax(axis=1)]
    end = np.array(order[::-1])[ordered[:, ::-1].argmax(axis=1)]
    is_empty = bits == 0
    return _Shape(bits, np.where(is_empty, -1, begin), np.where(is_empty, -1, end))


def _count(shapes: Sequence[_Shape], order: Ints, first: int, last: int, rows: Ints) -> tuple[Ints, Ints]:
    """Return how many kinds of policies each of some rows has, and how many runs of equal blocks."""
    begin, end = (np.choose(order, [getattr(shape, name)[rows] for shape in shapes]) for name in ("begin", "end"))
    bits = shapes[0].bits[rows]
    inside = np.bitwise_count(bits).astype(np.int64)
    kinds = np.bitwise_count(bits | (1 << first) | (1 << last)).astype(np.int64)
    runs = inside + (begin != first) + (end != last)
    return kinds, np.where(inside == 0, 1 + (first != last), runs)


def _keys(index: int, first: int, last: int, rows: np.ndarray, orders: np.ndarray) -> Ints:
    key = np.empty((len(rows), 5), np.int64)
    key[:, 0], key[:, 1], key[:, 2], key[:, 3], key[:, 4] = index, first, last, rows, orders
    return key


def _within(points: Points, budget: int | float) -> tuple[float, int] | None:
    place = int(np.searchsorted(points.peak, budget, side="right")) - 1
    return None if place < 0 else (float(points.time[place]), place)
