"""An iteration's groups as one example of the training loop, which learns from each while others are still played.

The backward pass of a group runs when the loop takes it: between the rounds of workers of this process, beside those of
other processes. What the sum over all groups is divided by, with DAPO the number of chunks, is known when the last one
has come, so gradients add up undivided, and the loop's ``scale`` divides them once, before the optimiser steps. Up to
rounding the update is that of all groups at once, in whatever order they finish.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from wamlab.errors import InputError
from wamlab.rl.update import FinishedGroup, check_version


def in_number_order(groups: Iterable[FinishedGroup]) -> Iterator[FinishedGroup]:
    """Yield groups from number 0 on, each as soon as those before it are there: sums then have the same bits."""
    waiting: dict[int, FinishedGroup] = {}
    following = 0
    for group in groups:
        waiting[group.number] = group
        while following in waiting:
            yield waiting.pop(following)
            following += 1
    if waiting:
        raise RuntimeError(f"group {following} never came, but groups {sorted(waiting)} did")


class StreamedGroups:
    """Finished groups for ``train``: give it ``batch_size = num_micro_batches = len(stream)`` and ``scale``."""

    def __init__(
        self, groups: Iterable[FinishedGroup], num_groups: int, policy_version: int, *, parts_a_group: int = 1
    ) -> None:
        """Take ``num_groups`` groups, played by ``policy_version``, each in so many forward and backward passes."""
        if num_groups * parts_a_group < 2:
            raise InputError("a stream of one part is no stream: give at least 2 groups, or use joined")
        self._groups, self.num_groups, self._version = iter(groups), num_groups, policy_version
        self._parts_a_group = parts_a_group
        self._rest: list[Any] = []  # parts of the newest group that are still to come
        self._seen: set[int] = set()
        self._num_given = 0
        self.divisor, self.num_samples, self.num_flat = 0.0, 0, 0

    def __len__(self) -> int:
        return self.num_groups * self._parts_a_group

    def __getitem__(self, wanted: slice) -> Any:
        """Return the next part; raises InputError out of turn, RuntimeError for a group of another policy."""
        if (wanted.start, wanted.stop) != (self._num_given, self._num_given + 1):
            raise InputError(
                f"parts of a stream come one at a time: give train.num_micro_batches = train.batch_size = {len(self)}"
            )
        if not self._rest:
            self._take()
        self._num_given += 1
        return self._rest.pop(0)

    def factor(self) -> float:
        """Return by what the loop's sum is multiplied; raises InputError where no group had anything to say."""
        if self._num_given < len(self):
            raise RuntimeError(f"the step took {self._num_given} of {len(self)} parts of its stream")
        if next(self._groups, None) is not None:
            raise RuntimeError(f"more than {self.num_groups} groups have come in one iteration")
        if not self.divisor:
            raise InputError("no group was kept: widen group.keep_from and keep_to, or play easier tasks")
        return len(self) / self.divisor

    def _take(self) -> None:
        group = next(self._groups, None)
        if group is None:
            raise RuntimeError(f"the iteration ended after {len(self._seen)} of {self.num_groups} groups")
        if group.number in self._seen:
            raise RuntimeError(f"group {group.number} has come twice in one iteration")
        check_version(group, self._version)
        self._seen.add(group.number)
        self.divisor += group.divisor
        self.num_samples += len(group.example)
        self.num_flat += group.is_flat
        size = math.ceil(len(group.example) / self._parts_a_group)
        cuts = [slice(size * part, size * (part + 1)) for part in range(self._parts_a_group)]
        if not group.divisor:  # weights of 0: one chunk of it costs less than all
            cuts = [slice(0, 1)] * self._parts_a_group
        self._rest = [_cut(group.example, cut) for cut in cuts]


def _cut(example: Any, cut: slice) -> Any:
    """Return some chunks, whose sum the loop takes part by part; of none, one without any weight."""
    part = example[cut]
    return part if len(part) else replace(example[:1], weight=0 * example.weight[:1])
