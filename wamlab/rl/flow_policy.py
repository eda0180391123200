"""A flow sampler as a stochastic policy: where a denoising step may end, and how probable a chain of them was."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from wamlab.errors import InputError, check_range
from wamlab.flow import Gaussian, gaussian_log_prob, sde_transition
from wamlab.rl.chain import Chain, StepPolicy, velocities
from wamlab.types import Net


@dataclass(frozen=True)
class FlowSde:
    """Steps of the SDE with the ODE's marginals (Flow-GRPO, arXiv 2505.05470; pi-RL, arXiv 2510.25889)."""

    level_cap: float  # second level of the sampler's grid: noise is no stronger above it
    noise_scale: float = 0.5  # 0.7 in Flow-GRPO, 0.5 in RLinf's pi0

    def __post_init__(self) -> None:
        check_range("flow_sde", self, 0, 0.99999, "level_cap")
        check_range("flow_sde", self, 0, 10, "noise_scale")

    def __call__(self, state: Tensor, noised: Tensor, velocity: Tensor, level: Tensor, next_level: Tensor) -> Gaussian:
        """Return where the step ends; the state plays no part."""
        return sde_transition(
            noised, velocity, level, next_level, noise_scale=self.noise_scale, level_cap=self.level_cap
        )


class FlowNoise(nn.Module):
    """Steps of the ODE with noise of a learned strength for every entry (ReinFlow, arXiv 2505.22094).

    Its parameters belong into the optimiser beside the network's, e.g. as another group.
    """

    def __init__(
        self, state_dim: int, action_dim: int, *, least_std: float = 0.05, most_std: float = 0.3, width: int = 64
    ) -> None:
        super().__init__()
        if not 0 < least_std < most_std:
            raise InputError(f"flow noise from {least_std} to {most_std}: give 0 < least_std < most_std")
        self.least, self.most = 2 * math.log(least_std), 2 * math.log(most_std)  # log-variances
        self.body = nn.Sequential(nn.Linear(state_dim + action_dim + 1, width), nn.SiLU(), nn.Linear(width, action_dim))
        nn.init.zeros_(self.body[-1].weight)  # pyright: ignore[reportArgumentType]
        nn.init.zeros_(self.body[-1].bias)  # pyright: ignore[reportArgumentType]

    def forward(self, state: Tensor, noised: Tensor, velocity: Tensor, level: Tensor, next_level: Tensor) -> Gaussian:
        """Return where the step ends; ``state`` (b s k) has a row for each block, of which the newest is heard."""
        dtype = next(self.body.parameters()).dtype
        newest = state[:, -1, None, None].expand(*noised.shape[:-1], -1)
        found = self.body(torch.cat([newest, noised, level[..., None]], dim=-1).to(dtype)).to(noised.dtype)
        log_variance = self.least + (self.most - self.least) * (found.tanh() + 1) / 2
        step = (next_level - level)[..., None]
        std = torch.where(step == 0, 0, (0.5 * log_variance).exp())  # ticks of the past do not move
        return Gaussian(noised + step.to(noised.dtype) * velocity, std)


@dataclass(frozen=True)
class LogProbConfig:
    """Over what a log-probability is summed; sum and mean differ by a power of the ratio."""

    entries: str = "sum"  # over executed action dimensions: "sum" (RLinf, ReinFlow) or "mean" (Flow-GRPO's code)
    per: str = "chunk"  # one ratio a "chunk", or one a "tick"
    steps: str = "sum"  # over denoising steps: "sum" (joint), "mean" (RLinf's joint mode) or "each": a ratio a step
    has_start: bool = False  # add that of the noise the chain started from; it cancels in ratios

    def __post_init__(self) -> None:
        for name, known in {
            "entries": ("sum", "mean"),
            "per": ("chunk", "tick"),
            "steps": ("sum", "mean", "each"),
        }.items():
            if getattr(self, name) not in known:
                raise InputError(f'log_prob.{name} is "{getattr(self, name)}": give one of {", ".join(known)}')
        if self.has_start and self.steps == "each":
            raise InputError("log_prob.has_start belongs to the whole chain: give steps sum or mean")


@dataclass(frozen=True)
class ChainSteps:
    """Where each step of a chain could have ended under a policy."""

    actions: Gaussian
    video: Gaussian | None = None  # None where the video is deterministic


def chain_steps(net: Net, policy: StepPolicy, chain: Chain, video_policy: StepPolicy | None = None) -> ChainSteps:
    """Ask the network about every step of a chain, in one call."""
    video, actions = velocities(net, chain.batch, chain.seen)
    seen, state = chain.seen, chain.batch.state
    own = policy(state, seen.actions, actions, seen.action_noise_level, chain.next_action_level)
    if video_policy is None:
        return ChainSteps(own)
    if chain.next_latents is None or chain.next_video_level is None:
        raise InputError("this chain's video was deterministic: sample it with a video_policy, or score it without")
    _, _, num_frames, _, height, width = video.shape  # a network may leave out frame 0 and a last row
    latents = seen.latents[:, :, -num_frames:, :, :height, :width]
    levels = (level[:, :, -num_frames:] for level in (seen.video_noise_level, chain.next_video_level))
    return ChainSteps(own, video_policy(state, latents, video, *levels))


def log_prob(
    chain: Chain,
    steps: ChainSteps,
    is_executed: Bool[Tensor, "b a j"],
    config: LogProbConfig | None = None,
) -> Float[Tensor, " b ..."]:
    """Return how probable the chain's steps were, over executed ticks and real dimensions (F3, F4).

    Shape: b, then a denoising-steps axis if ``steps`` is "each", then a tick axis if ``per`` is "tick". Deterministic
    entries count 0, so a chain without noise has ratio 1 whatever the network says.
    """
    config = config or LogProbConfig()
    entries = gaussian_log_prob(chain.next_actions, steps.actions)
    video = None
    if steps.video is not None:
        if config.per == "tick":
            raise InputError("a stochastic video has no ticks: give log_prob.per chunk")
        assert chain.next_latents is not None
        shape = steps.video.mean.shape
        drawn = chain.next_latents[:, :, -shape[2] :, :, : shape[4], : shape[5]]
        video = gaussian_log_prob(drawn, steps.video).flatten(2)
        video = video.sum(dim=-1) if config.entries == "sum" else video.mean(dim=-1)
    return _reduced(chain, entries, is_executed, config, video)


def played_log_prob(
    chain: Chain, is_executed: Bool[Tensor, "b a j"], config: LogProbConfig | None = None
) -> Float[Tensor, " b ..."]:
    """Return how probable the chain's action steps were when they were drawn, as the rollout's own network said."""
    return _reduced(chain, chain.action_log_prob, is_executed, config or LogProbConfig())


def _reduced(
    chain: Chain, entries: Tensor, is_executed: Tensor, config: LogProbConfig, video: Tensor | None = None
) -> Tensor:
    mask = is_executed[:, None]
    axes = (-2, -1) if config.per == "chunk" else (-1,)
    count = mask.sum(dim=axes).clamp(min=1) if config.entries == "mean" else 1
    found = torch.where(mask, entries, 0).sum(dim=axes) / count
    found = found if video is None else found + video
    if config.has_start:
        start = gaussian_log_prob(
            chain.seen.actions[:, :1], Gaussian(torch.zeros_like(entries[:, :1]), entries.new_ones(()))
        )
        found = torch.cat([torch.where(mask, start, 0).sum(dim=axes) / count, found], dim=1)
    if config.steps == "each":
        return found
    return found.sum(dim=1) if config.steps == "sum" else found.mean(dim=1)


def entropy(steps: ChainSteps, is_executed: Bool[Tensor, "b a j"]) -> Float[Tensor, " b"]:
    """Return the mean entropy of a chunk's stochastic action entries, in nats; 0 if there are none."""
    std = steps.actions.std.expand_as(steps.actions.mean)
    mask = is_executed[:, None] & (std > 0)
    each = 0.5 * math.log(2 * math.pi * math.e) + torch.where(mask, std, 1).log()
    return torch.where(mask, each, 0).sum(dim=(1, 2, 3)) / mask.sum(dim=(1, 2, 3)).clamp(min=1)


def degenerate_share(steps: ChainSteps, is_executed: Bool[Tensor, "b a j"]) -> Float[Tensor, ""]:
    """Return which share of the executed entries was deterministic; at 1 nothing can be learned from ratios."""
    is_random = (steps.actions.std > 0).expand_as(steps.actions.mean)
    mask = is_executed[:, None].expand_as(is_random)
    return (mask & ~is_random).sum() / mask.sum().clamp(min=1)
