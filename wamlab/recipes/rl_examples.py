"""Played episodes to what objectives learn from: chunks with the advantage of their episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from wamlab.data.normalize import Normalizers
from wamlab.errors import InputError, check_range
from wamlab.flow import FlowExample, NoiseConfig, with_noise, with_noise_at
from wamlab.recipes.rl_policy import acting_dims, chain_from
from wamlab.rl.advantage import GroupConfig, chunk_advantages, episode_weights
from wamlab.rl.chain import Chain
from wamlab.rl.flow_policy import LogProbConfig, played_log_prob
from wamlab.rl.nft import NftConfig, NftExample, optimality
from wamlab.rl.objectives import PolicyExample
from wamlab.rl.play import PlayedGroup
from wamlab.rl.segments import Segment
from wamlab.rl.update import FinishedGroup, finish_group
from wamlab.types import Samples

REWARDS = ("success", "progress")


@dataclass(frozen=True)
class RewardConfig:
    """What an episode is rewarded for."""

    kind: str = "success"  # 1 for success, to all its chunks; or "progress": to each chunk how much nearer it came
    discount: float = 0.7  # of later chunks' progress
    success_bonus: float = 0.5  # beside progress

    def __post_init__(self) -> None:
        check_range("reward", self, 0, 1, "discount")
        check_range("reward", self, 0, 1e6, "success_bonus")
        if self.kind not in REWARDS:
            raise InputError(f'reward.kind is "{self.kind}": give one of {", ".join(REWARDS)}')


Build = Callable[[Chain, Tensor, Tensor, Tensor], Samples]  # chain, executed entries, advantages, weights


def reward_of(segment: Segment) -> float:
    """Return an episode's reward: 1 for success."""
    return float(segment.is_success)


def progress_rewards(segment: Segment, success_bonus: float) -> Float[Tensor, " b"]:
    """Return the progress that each chunk of an episode made, and a bonus for the chunk that succeeded.

    The environment's rewards must be the progress 0..1 after each tick. That of the start is left in the first
    chunk's: all members of a group share it.
    """
    last = segment.chunks["num_ticks"] - 1
    progress = torch.from_numpy(segment.chunks["rewards"][np.arange(len(last)), last]).double()
    gained = progress.diff(prepend=progress.new_zeros(1))
    gained[-1] += success_bonus * segment.is_success
    return gained


def finished(
    played: PlayedGroup,
    version: int,
    build: Build,
    normalizers: Normalizers,
    device: torch.device,
    *,
    reward: RewardConfig,
    config: GroupConfig,
) -> FinishedGroup:
    """Turn a played group into its part of an update; every executed chunk is a sample."""
    segments = played.segments
    chunks = {name: np.concatenate([segment.chunks[name] for segment in segments]) for name in segments[0].chunks}
    lengths = torch.tensor([segment.num_chunks for segment in segments])
    episode = torch.arange(len(segments)).repeat_interleave(lengths)
    is_executed = np.arange(chunks["planned"].shape[1])[:, None] < chunks["num_ticks"][:, None, None]
    mask = torch.from_numpy(is_executed & acting_dims(normalizers)).to(device)

    def example(advantage: Tensor, weight: Tensor) -> Samples:
        return build(chain_from(chunks, device), mask, advantage.float().to(device), weight.float().to(device))

    number, cap = played.group.number, played.group.cap
    if reward.kind == "success":
        rewards = torch.tensor([reward_of(segment) for segment in segments])
        return finish_group(number, version, rewards, episode, example, cap=cap, config=config)
    gained = torch.cat([progress_rewards(segment, reward.success_bonus) for segment in segments])
    advantage = chunk_advantages(gained, episode, discount=reward.discount, config=config)
    weights, parts = episode_weights(lengths, cap, config.length_weighting)
    is_flat = not bool(advantage.any())
    divisor = 0.0 if is_flat else parts.sum().item()
    return FinishedGroup(number, version, example(advantage, weights[episode] * (not is_flat)), divisor, is_flat)


def policy_example(
    chain: Chain, is_executed: Tensor, advantage: Tensor, weight: Tensor, *, log_prob: LogProbConfig
) -> PolicyExample:
    """Return what ``policy_loss`` needs of played chunks."""
    old = played_log_prob(chain, is_executed, log_prob)
    return PolicyExample(chain, is_executed, old, advantage, weight)


def nft_example(
    chain: Chain,
    is_executed: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    config: NftConfig,
    noise: NoiseConfig,
    generator: torch.Generator,
    levels: Float[Tensor, " k"] | None = None,
    num_draws: int = 1,
) -> NftExample:
    """Noise the played chunks anew, ``num_draws`` times; at one of ``levels`` each, or as training draws them."""
    batch = chain.batch._map(lambda tensor: tensor.repeat_interleave(num_draws, dim=0))
    if levels is None:
        flow: FlowExample = with_noise(batch, generator, noise)
    else:
        drawn = levels[torch.randint(len(levels), (len(batch),), generator=generator, device=levels.device)]
        video = drawn[:, None].expand(-1, batch.latents.shape[1])
        flow = with_noise_at(batch, video, drawn[:, None].expand(-1, batch.actions.shape[1]), generator)
    good = optimality(advantage, config.most_advantage)
    good, mask, weight = (value.repeat_interleave(num_draws, dim=0) for value in (good, is_executed, weight))
    return NftExample(flow, good, mask, weight / num_draws)
