"""From finished groups to one update: gradients add up in any order, and the optimiser steps once an iteration.

RL is the same training loop with another source and another loss::

    source = iterations(play, num_groups, known_divisor(num_groups, num_members, cap, DR_GRPO))
    config = TrainConfig(num_steps=100, batch_size=num_groups, num_micro_batches=num_groups)
    for record in train(partial(policy_loss, net, policy), source, optimizer, config): ...

``play(version)`` yields groups as they finish. The backward pass of a group runs when the loop takes it, while others
may still be playing elsewhere; weights change after the last one only, so every episode is on-policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wamlab.errors import InputError
from wamlab.rl.advantage import GRPO, GroupConfig, episode_weights, group_advantages
from wamlab.rl.objectives import PolicyTerms
from wamlab.types import Loss, LossTerms, Samples

S = TypeVar("S", bound=Samples)
Play = Callable[[int], Iterable["FinishedGroup"]]  # policy version to groups in the order in which they finish


@dataclass(frozen=True)
class FinishedGroup:
    """The executed chunks of a group all of whose episodes have ended, and its part in the mean."""

    number: int  # of the group in its iteration
    policy_version: int  # number of updates before it was played
    example: Any  # Samples with a ``weight``: the loss of a chunk is multiplied by it, then all are added up
    divisor: float  # what the group adds to the number by which the sum over all groups is divided
    is_flat: bool  # all episodes had the same reward, or the group was dropped: its advantages are 0


def finish_group(
    number: int,
    policy_version: int,
    rewards: Float[Tensor, " members"],
    episode: Int[Tensor, " b"],
    build: Callable[[Tensor, Tensor], Samples],
    *,
    cap: int,
    config: GroupConfig = GRPO,
) -> FinishedGroup:
    """Give each chunk its episode's advantage and its weight; ``build`` makes the objective's example of both.

    ``episode`` says to which member each executed chunk belongs; ``cap`` is the most chunks of an episode. A group
    that the config's bounds drop has weight and divisor 0. Raises InputError if advantages need other groups.
    """
    if not config.is_order_free:
        raise InputError('advantages with scale "all" wait for every group: give group.scale "group" or "none"')
    found = group_advantages(rewards[None].double(), config)
    num_chunks = torch.bincount(episode, minlength=len(rewards))
    weights, parts = episode_weights(num_chunks, cap, config.length_weighting)
    is_kept = bool(found.is_kept[0])
    example = build(found.advantage[0][episode], weights[episode] * is_kept)
    divisor = parts.sum().item() * is_kept
    return FinishedGroup(number, policy_version, example, divisor, bool(found.is_flat[0]) or not is_kept)


def check_version(group: FinishedGroup, policy_version: int) -> None:
    """Raise RuntimeError unless the group was played by exactly the weights that learn from it."""
    if group.policy_version != policy_version:
        raise RuntimeError(
            f"group {group.number} was played by policy {group.policy_version}, but policy {policy_version} is to "
            "learn from it: staleness must be 0"
        )


def check_ratios(terms: PolicyTerms, tolerance: float = 0.01) -> None:
    """Raise RuntimeError if ratios differ from 1 before the first update: then rollout and trainer disagree."""
    error, clipped = terms.ratio_error.item(), terms.clipped.item()
    if not error <= tolerance or clipped:
        raise RuntimeError(
            f"before the first update a ratio is off by {error:.2g} and {clipped:.0%} are clipped: the trainer's "
            "conditioning, precision or sampler is not the rollout's"
        )


def known_divisor(num_groups: int, num_members: int, cap: int, config: GroupConfig = GRPO) -> float:
    """Return the divisor of an iteration before it is played; raises InputError where it depends on what is played."""
    if config.length_weighting == "chunk" or config.keep_from > -math.inf or config.keep_to < math.inf:
        raise InputError(
            "the number of chunks or of kept groups is known at the end only: use GradientSum or joined, "
            'or length_weighting "episode" or "constant" without bounds'
        )
    return float(num_groups * num_members * (cap if config.length_weighting == "constant" else 1))


class GroupStream:
    """An iteration's groups as one example of the training loop, which takes them one by one as they finish."""

    def __init__(self, groups: Iterable[FinishedGroup], num_groups: int, divisor: float, policy_version: int) -> None:
        self._groups, self._num_groups = iter(groups), num_groups
        self._divisor, self._version = divisor, policy_version
        self._seen: set[int] = set()

    def __len__(self) -> int:
        return self._num_groups

    def __getitem__(self, wanted: slice) -> Any:
        """Return the next group, weighed so that the loop's shares add up to the sum over the divisor."""
        if (wanted.start, wanted.stop) != (len(self._seen), len(self._seen) + 1):
            raise InputError("groups come one at a time: give train.num_micro_batches = train.batch_size = num_groups")
        group = next(self._groups, None)
        if group is None:
            raise RuntimeError(f"the iteration ended after {len(self._seen)} of {self._num_groups} groups")
        if group.number in self._seen:
            raise RuntimeError(f"group {group.number} has come twice in one iteration")
        check_version(group, self._version)
        self._seen.add(group.number)
        # the loop multiplies a micro-batch's mean by its number of chunks over the number of groups
        return _scaled(group.example, self._num_groups / self._divisor)


def iterations(play: Play, num_groups: int, divisor: float, *, first_step: int = 0) -> Iterator[GroupStream]:
    """Yield one stream a step, played by the weights as they are then; ``first_step`` counts finished steps.

    Needs at least 2 groups, else the loop does not cut the stream. The stream's divisor is ``known_divisor``'s.
    """
    if num_groups < 2:
        raise InputError(f"an iteration of {num_groups} group: give at least 2, or use joined")
    for version in count(first_step):
        yield GroupStream(play(version), num_groups, divisor, version)


def joined(groups: Sequence[FinishedGroup], policy_version: int) -> Any:
    """Return all groups as one plain example for the loop: bit for bit the same whatever the order of arrival."""
    for group in groups:
        check_version(group, policy_version)
    ordered = sorted(groups, key=lambda group: group.number)
    divisor = sum(group.divisor for group in ordered)
    if not divisor:
        raise InputError("no group was kept: widen group.keep_from and keep_to, or play easier tasks")
    whole = _concatenated([group.example for group in ordered if group.divisor])
    return _scaled(whole, len(whole) / divisor)


class GradientSum:
    """The gradient of an iteration, added up as groups finish and divided once by what they were worth together.

    For divisors that are known at the end only. Weights must not change in between: step after ``finish``.
    """

    def __init__(self, loss: Loss, policy_version: int) -> None:
        self.loss, self.policy_version = loss, policy_version
        self.divisor = 0.0
        self.num_groups = self.num_flat = 0
        self._is_finished = False

    def add(self, group: FinishedGroup, *, chunks_per_call: int | None = None) -> list[LossTerms]:
        """Add a group's gradient, in parts of ``chunks_per_call``; a dropped group costs nothing."""
        if self._is_finished:
            raise RuntimeError("this iteration's gradient is finished: begin another GradientSum")
        check_version(group, self.policy_version)
        self.num_groups, self.num_flat = self.num_groups + 1, self.num_flat + group.is_flat
        self.divisor += group.divisor
        found = []
        size = chunks_per_call or len(group.example)
        for start in range(0, len(group.example) if group.divisor else 0, size):
            part = group.example[start : start + size]
            terms = self.loss(part)
            (terms.total * len(part)).backward()
            found.append(terms)
        return found

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients; then clip them and step the optimiser once."""
        if not self.divisor:
            raise InputError("no group was kept: widen group.keep_from and keep_to, or play easier tasks")
        self._is_finished = True
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.divisor)


def _scaled(example: Any, factor: float) -> Any:
    return replace(example, weight=example.weight * factor)


def _concatenated(examples: Sequence[S]) -> S:
    first, changed = examples[0], {}
    for f in fields(first):  # pyright: ignore[reportArgumentType]
        values = [getattr(example, f.name) for example in examples]
        if isinstance(values[0], Samples):
            changed[f.name] = _concatenated(values)
        elif values[0] is not None:
            changed[f.name] = torch.cat(values)
    return replace(first, **changed)  # pyright: ignore[reportArgumentType]
