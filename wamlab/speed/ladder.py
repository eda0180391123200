"""Which choice a step of a shape runs with: down where memory failed, up again where there is room, never to and fro.

The rungs of a ladder are choices from the fastest to the leanest. Each shape of examples has a place of its own on it.
A rung that failed is tried again after ``2 * patience`` steps without a failure, then after twice as many, and no more
after ``max_failures``: so a shape makes at most ``2 * max_failures + 1`` moves a rung, whatever memory does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from wamlab.errors import InputError
from wamlab.speed.choice import StepChoice
from wamlab.speed.recompute_plan import RecomputePlan
from wamlab.speed.tree import flat

PATIENCE = 20  # steps without a failure before a faster rung is tried
MAX_FAILURES = 3  # of a rung with one shape
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """What decides the memory of an example: examples of one shape share a place on the ladder."""

    sizes: tuple[tuple[int, ...], ...]
    num_bytes: int

    @classmethod
    def of(cls, example: Any) -> Shape:
        """Return the shape of a tree of tensors."""
        tensors: list[Tensor] = []
        flat(example, tensors)
        return cls(tuple(tuple(t.shape) for t in tensors), sum(t.numel() * t.element_size() for t in tensors))

    def __str__(self) -> str:
        if not self.sizes:
            return f"{self.num_bytes} bytes"
        return ", ".join("x".join(map(str, size)) for size in dict.fromkeys(self.sizes))


@dataclass(frozen=True)
class Move:
    """A decision about the choice that steps of a shape run with; a line of ``memory.jsonl`` in the run folder."""

    step: int  # in which it was made
    shape: str
    before: str | None  # None where the shape is new
    after: str
    reason: str
    peak_bytes: int | None  # the most that was alive in the step, up to the failure if it failed
    budget_bytes: int | None

    def record(self) -> dict[str, Any]:
        """Return the line as plain values."""
        return {
            "step": self.step, "shape": self.shape, "from": self.before, "to": self.after, "reason": self.reason,
            "peak_bytes": self.peak_bytes, "budget_bytes": self.budget_bytes,
        }  # fmt: skip


@dataclass
class _Place:
    """Where a shape stands and what it has met."""

    rung: int
    num_clean: int = 0  # steps since the last move
    failures: dict[int, int] = field(default_factory=dict)  # by rung
    peaks: dict[int, int] = field(default_factory=dict)  # bytes measured, by rung


class Ladder:
    """The places of all shapes on one ladder."""

    def __init__(
        self,
        rungs: Sequence[StepChoice],
        *,
        budget_bytes: int | None = None,
        patience: int = PATIENCE,
        max_failures: int = MAX_FAILURES,
        begin: Mapping[str, str] | None = None,
    ) -> None:
        """Take choices, each of less memory than the one before; ``begin`` says in words where shapes stood once."""
        if not rungs:
            raise InputError("a ladder of step choices has no rung: give at least one choice")
        self.rungs = tuple(rungs)
        self.budget_bytes, self.patience, self.max_failures = budget_bytes, patience, max_failures
        self._begin = dict(begin or {})
        self._places: dict[Shape, _Place] = {}

    def rung(self, shape: Shape) -> int:
        """Return where a step of this shape runs: a new shape begins where smaller ones stand, or predictions say."""
        return self._place(shape).rung

    def is_new(self, shape: Shape) -> bool:
        """Say whether no step of this shape has been placed yet."""
        return shape not in self._places

    def fail(self, shape: Shape, rung: int) -> int | None:
        """Go one rung down from one that took too much; return the new place, None where there is none."""
        place = self._place(shape)
        place.failures[rung] = place.failures.get(rung, 0) + 1
        place.num_clean = 0
        if rung + 1 >= len(self.rungs):
            return None
        place.rung = max(place.rung, rung + 1)
        return place.rung

    def fit(self, shape: Shape, rung: int, peak_bytes: int) -> int:
        """Note a step that fitted; return where the next one of its shape runs: there, or one rung up."""
        place = self._place(shape)
        place.peaks[rung] = max(peak_bytes, place.peaks.get(rung, 0))
        place.num_clean += 1
        above = place.rung - 1
        if rung == place.rung and above >= 0 and self._has_room(place, above):
            place.rung, place.num_clean = above, 0
        return place.rung

    def _place(self, shape: Shape) -> _Place:
        if shape not in self._places:
            numbers = {told(rung): number for number, rung in enumerate(self.rungs)}
            smaller = [place.rung for known, place in self._places.items() if known.num_bytes <= shape.num_bytes]
            start = max(smaller, default=self.first)
            self._places[shape] = _Place(numbers.get(self._begin.get(str(shape), ""), start))
        return self._places[shape]

    @property
    def first(self) -> int:
        """Return the fastest rung that is predicted to fit, the last if none is."""
        if self.budget_bytes is None:
            return 0
        fitting = (number for number, rung in enumerate(self.rungs) if rung.peak_bytes <= self.budget_bytes)
        return next(fitting, len(self.rungs) - 1)

    def _has_room(self, place: _Place, above: int) -> bool:
        """Say whether the next faster rung may be tried: patience, failures, and the peak to be expected there."""
        failures = place.failures.get(above, 0)
        if failures >= self.max_failures or place.num_clean < self.patience * 2**failures:
            return False
        rise = max(0, self.rungs[above].peak_bytes - self.rungs[place.rung].peak_bytes)
        expected = place.peaks.get(above, place.peaks[place.rung] + rise)
        return self.budget_bytes is None or expected <= self.budget_bytes


def plain_rungs(batch_size: int, num_blocks: int, micro_batch: int | None = None) -> tuple[StepChoice, ...]:
    """Return a ladder that needs no measurement: every block alike, then ever smaller micro-batches, down to 1.

    ``peak_bytes`` are 0: nothing is predicted, so the fastest rung is tried first.
    """
    size = micro_batch or batch_size
    found = [(size, policy) for policy in ("keep", "matmuls", "attention", "full")]
    while size > 1:
        size = -(-size // 2)
        found.append((size, "full"))
    return tuple(
        StepChoice(size, -(-batch_size // size), RecomputePlan.uniform(policy, num_blocks), 0, float(order))
        for order, (size, policy) in enumerate(found, 1)
    )


def thinned(
    choices: Iterable[StepChoice], *, kept: StepChoice | None = None, least_saving: float = 0.05
) -> tuple[StepChoice, ...]:
    """Return choices from the fastest to the leanest, each of which saves so much of the peak of the one before.

    The leanest stays whatever it saves, and so does ``kept``.
    """
    found: list[StepChoice] = []
    ordered = sorted(choices, key=lambda choice: (choice.step_s, choice.peak_bytes))
    leanest = min(choice.peak_bytes for choice in ordered)
    for choice in ordered:
        most = found[-1].peak_bytes if found else math.inf
        must = choice == kept or choice.peak_bytes == leanest
        if choice.peak_bytes < (most if must else most * (1 - least_saving)):
            found.append(choice)
    return tuple(found)


def told(choice: StepChoice) -> str:
    """Return a choice in words."""
    return f"{choice.micro_batch} samples at a time, {choice.plan}"


def gib(num_bytes: int | None) -> str:
    """Return bytes in words."""
    return "unknown" if num_bytes is None else f"{num_bytes / GIB:.3g} GiB"
