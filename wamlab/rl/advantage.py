"""How much better than expected: advantages within a group, over time, and what weight each chunk has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wamlab.errors import InputError, check_range

SCALES = ("group", "all", "none")
LENGTH_WEIGHTINGS = ("chunk", "episode", "constant")


@dataclass(frozen=True)
class GroupConfig:
    """How rewards of the episodes of a group become advantages; the constants below name published choices."""

    scale: str = "group"  # divide by the spread of the "group", of "all" rewards of the iteration, or by "none"
    ddof: int = 1  # 1: sample spread (RLinf, SimpleVLA-RL); 0: population spread (Flow-GRPO, DiffusionNFT)
    epsilon: float = 1e-6  # added to the spread
    keep_from: float = -math.inf  # drop groups whose mean reward is below this,
    keep_to: float = math.inf  # or above this; those without any spread have advantage 0 in any case
    length_weighting: str = "episode"  # in the loss: every "chunk" alike, every "episode", or by a "constant" cap

    def __post_init__(self) -> None:
        check_range("group", self, 0, 1, "ddof")
        check_range("group", self, 0, math.inf, "epsilon")
        check_range("group", self, -math.inf, math.inf, "keep_from", "keep_to")
        if self.keep_from > self.keep_to:
            raise InputError(f"group.keep_from {self.keep_from} is above keep_to {self.keep_to}: exchange them")
        if self.scale not in SCALES:
            raise InputError(f'group.scale is "{self.scale}": give one of {", ".join(SCALES)}')
        if self.length_weighting not in LENGTH_WEIGHTINGS:
            raise InputError(
                f'group.length_weighting is "{self.length_weighting}": give one of {", ".join(LENGTH_WEIGHTINGS)}'
            )

    @property
    def is_order_free(self) -> bool:
        """Say whether a group's advantages are known before the other groups have finished."""
        return self.scale != "all"


GRPO = GroupConfig()  # arXiv 2402.03300
DR_GRPO = GroupConfig(scale="none", length_weighting="constant")  # arXiv 2503.20783: no spread, constant length
DAPO = GroupConfig(length_weighting="chunk")  # arXiv 2503.14476, with PolicyConfig(clip_low=0.2, clip_high=0.28)
FLOW_GRPO = GroupConfig(scale="all", ddof=0, epsilon=1e-4)  # arXiv 2505.05470, released code
SIMPLE_VLA = GroupConfig(keep_from=0.1, keep_to=0.9, length_weighting="chunk")  # arXiv 2509.09674


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of the episodes of some groups, and which of those groups say anything."""

    advantage: Float[Tensor, "groups members"]  # 0 in groups that are not kept
    is_kept: Bool[Tensor, " groups"]  # its mean reward lies between the config's bounds
    is_flat: Bool[Tensor, " groups"]  # all members got the same reward: nothing to learn from


def group_advantages(rewards: Float[Tensor, "groups members"], config: GroupConfig = GRPO) -> GroupAdvantages:
    """Compare each episode with its siblings: reward minus the group's mean, over a spread (arXiv 2402.03300).

    Raises InputError for groups too small for the spread's ``ddof``.
    """
    num_members = rewards.shape[1]
    if num_members <= (config.ddof if config.scale != "none" else 0):
        raise InputError(f"a group of {num_members} has no spread with ddof {config.ddof}: play at least 2 a group")
    mean = rewards.mean(dim=1, keepdim=True)
    is_flat = (rewards == rewards[:, :1]).all(dim=1)
    is_kept = (mean[:, 0] >= config.keep_from) & (mean[:, 0] <= config.keep_to)
    centred = torch.where((is_kept & ~is_flat)[:, None], rewards - mean, 0)
    if config.scale == "group":
        centred = centred / (rewards.std(dim=1, keepdim=True, correction=config.ddof) + config.epsilon)
    elif config.scale == "all":
        centred = centred / (rewards.std(correction=config.ddof) + config.epsilon)
    return GroupAdvantages(centred, is_kept, is_flat)


def chunk_advantages(
    rewards: Float[Tensor, " b"],
    episode: Int[Tensor, " b"],
    *,
    discount: float = 0.7,
    config: GroupConfig = GRPO,
) -> Float[Tensor, " b"]:
    """Compare each chunk of a group with its siblings' chunks of the same number: reward still to come minus the mean.

    Chunks come in order, episode after episode. A member who alone has lived so long has advantage 0 there. Unlike
    GRPO's process supervision (arXiv 2402.03300, 4.1.3) what is yet to come is discounted, and the mean is of one
    chunk number, so that long episodes are not compared with the beginnings of short ones. Scaled by the spread of all
    chunks of the group unless the config says "none".
    """
    number, returns = torch.zeros_like(episode), rewards.double().clone()
    for row in range(1, len(episode)):
        if episode[row] == episode[row - 1]:
            number[row] = number[row - 1] + 1
    for row in reversed(range(len(episode) - 1)):
        if episode[row] == episode[row + 1]:
            returns[row] += discount * returns[row + 1]
    counts = torch.bincount(number)
    means = torch.zeros(len(counts), dtype=returns.dtype).index_add(0, number, returns) / counts
    centred = torch.where(counts[number] > 1, returns - means[number], 0)
    if config.scale == "none" or len(centred) <= config.ddof:
        return centred
    return centred / (centred.std(correction=config.ddof) + config.epsilon)


def episode_weights(
    num_chunks: Int[Tensor, " episodes"], cap: int, length_weighting: str
) -> tuple[Float[Tensor, " episodes"], Float[Tensor, " episodes"]]:
    """Return the weight of each chunk of an episode in the loss, and the episode's part of the divisor.

    The loss is the weighted sum over all chunks over the sum of these parts, so that it does not depend on the order in
    which episodes arrive. "chunk": mean over chunks, long episodes count more; "episode": mean over episodes of
    the mean over their chunks; "constant": sum over chunks over episodes times ``cap``, the most chunks there can be.
    """
    if length_weighting not in LENGTH_WEIGHTINGS:
        raise InputError(f'length_weighting is "{length_weighting}": give one of {", ".join(LENGTH_WEIGHTINGS)}')
    if not bool(((num_chunks >= 1) & (num_chunks <= cap)).all()):
        raise InputError(f"episodes have 1 to {cap} chunks, not {num_chunks.min()} to {num_chunks.max()}")
    lengths = num_chunks.to(torch.float64)
    ones = torch.ones_like(lengths)
    return {
        "chunk": (ones, lengths),
        "episode": (1 / lengths, ones),
        "constant": (ones, cap * ones),
    }[length_weighting]


def generalized_advantages(
    rewards: Float[Tensor, "b chunks"],
    values: Float[Tensor, "b chunks_1"],
    is_done: Bool[Tensor, "b chunks"],
    *,
    discount: float = 0.99,
    trace: float = 0.95,
) -> tuple[Float[Tensor, "b chunks"], Float[Tensor, "b chunks"]]:
    """Return GAE advantages and value targets of chunks (arXiv 1506.02438, eq. 16).

    ``rewards`` sum the ticks of a chunk; ``values`` have one more column, of what follows the last chunk;
    ``is_done`` is True where the episode ended with that chunk: no value is taken from beyond it. What lies after it
    in the same row belongs to another episode, or is masked by the caller.
    """
    if values.shape[1] != rewards.shape[1] + 1:
        raise InputError(f"{rewards.shape[1]} chunks need {rewards.shape[1] + 1} values, not {values.shape[1]}")
    goes_on = (~is_done).to(values.dtype)
    surprise = rewards + discount * values[:, 1:] * goes_on - values[:, :-1]
    advantage, columns = torch.zeros_like(values[:, 0]), []
    for chunk in reversed(range(rewards.shape[1])):
        advantage = surprise[:, chunk] + discount * trace * goes_on[:, chunk] * advantage
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, advantages + values[:, :-1]
