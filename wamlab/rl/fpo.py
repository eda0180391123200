"""Flow policy optimisation: clipped ratios of flow losses in place of likelihoods (arXiv 2510.09976; F12)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from wamlab.errors import InputError, check_range
from wamlab.flow import NoiseConfig, with_noise
from wamlab.rl.chain import NoisedSteps, velocities
from wamlab.rl.objectives import ClipConfig, clipped_loss
from wamlab.types import Batch, LossTerms, Net, Samples


@dataclass(frozen=True)
class FpoConfig:
    """How losses become ratios."""

    clip: ClipConfig = field(default_factory=lambda: ClipConfig(low=0.05, high=0.05))
    entries: str = "mean"  # of squared errors over executed entries: "mean" or "sum"
    is_per_draw: bool = False  # one ratio a draw of noise, not one of the mean over draws
    temperature: float = 1.0  # differences of losses are multiplied by it

    def __post_init__(self) -> None:
        check_range("fpo", self, 1e-9, math.inf, "temperature")
        if self.entries not in ("mean", "sum"):
            raise InputError(f'fpo.entries is "{self.entries}": give mean or sum')


@dataclass(frozen=True)
class FpoExample(Samples):
    """Played chunks with several draws of noise each; the old and the new loss are of the same draws."""

    batch: Batch
    seen: NoisedSteps
    target_actions: Float[Tensor, "b draws a j"]
    is_executed: Bool[Tensor, "b a j"]
    old_loss: Float[Tensor, "b draws"]  # from ``flow_errors`` with the policy that played
    advantage: Float[Tensor, " b"]
    weight: Float[Tensor, " b"]  # in the mean over samples


@dataclass(frozen=True)
class FpoTerms(LossTerms):
    """The loss and what to look at beside it."""

    clipped: Float[Tensor, ""]  # share of ratios whose gradient the clip stopped
    ratio_error: Float[Tensor, ""]  # largest |ratio - 1|: rounding alone before the first update


def draw_steps(
    batch: Batch, num_draws: int, generator: Generator, config: NoiseConfig | None = None
) -> tuple[NoisedSteps, Float[Tensor, "b draws a j"]]:
    """Noise every chunk ``num_draws`` times; return what the network will see and the actions' velocities."""
    example = with_noise(batch._map(lambda tensor: tensor.repeat_interleave(num_draws, dim=0)), generator, config)
    size = (len(batch), num_draws)
    seen = NoisedSteps(**{f.name: getattr(example.seen, f.name).unflatten(0, size) for f in fields(NoisedSteps)})
    return seen, example.target.actions.unflatten(0, size)


def flow_errors(
    net: Net,
    batch: Batch,
    seen: NoisedSteps,
    target_actions: Float[Tensor, "b draws a j"],
    is_executed: Bool[Tensor, "b a j"],
    entries: str = "mean",
) -> Float[Tensor, "b draws"]:
    """Return the actions' flow loss of every draw, over executed entries."""
    _, found = velocities(net, batch, seen)
    mask = is_executed[:, None]
    error = torch.where(mask, (found - target_actions).square(), 0).sum(dim=(-2, -1))
    return error / mask.sum(dim=(-2, -1)).clamp(min=1) if entries == "mean" else error


def fpo_loss(net: Net, example: FpoExample, config: FpoConfig | None = None) -> FpoTerms:
    """Return the clipped loss of the ratios ``exp(old loss - new loss)``, a weighted mean over chunks."""
    config = config or FpoConfig()
    found = flow_errors(net, example.batch, example.seen, example.target_actions, example.is_executed, config.entries)
    log_ratio = config.temperature * (example.old_loss - found)
    if not config.is_per_draw:
        log_ratio = log_ratio.mean(dim=1, keepdim=True)
    each, is_stopped = clipped_loss(log_ratio, example.advantage[:, None].to(found.dtype), config.clip)
    total = (example.weight.to(found.dtype) * each.mean(dim=1)).mean()
    clipped = is_stopped.to(found.dtype).mean()
    return FpoTerms(total, total.new_zeros(()), total.detach(), clipped, log_ratio.detach().expm1().abs().max())
