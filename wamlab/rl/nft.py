"""DiffusionNFT: raise good and lower bad samples by noising them anew, without chains or likelihoods.

``nft_loss(net, old, example)`` fits the seam of ``flow_loss``: whatever sampler played the chunks, only their clean
actions, their noise and their reward are needed (arXiv 2509.16117; F11).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from wamlab.errors import InputError, check_range
from wamlab.types import FlowExample, LossTerms, Net, Samples, Velocity

FORMS = ("velocity", "clean", "preference")
LEAST_ERROR = 1e-5  # of what the adaptive weight divides by, as released


@dataclass(frozen=True)
class NftConfig:
    """How strongly and in which space good and bad chunks pull."""

    form: str = "velocity"  # errors of velocities, of "clean" predictions (as released), or a "preference" of the two
    beta: float = 1.0  # how far the two imagined policies stand from the old one; 0.1 where updates are to be larger
    most_advantage: float = 5.0  # advantages are cut off there
    has_adaptive_weight: bool = True  # of the clean form: divide by the mean absolute error, without gradient
    sharpness: float = 1.0  # of the preference form
    reference_weight: float = 1e-4  # of the squared distance of velocities, where a reference is given
    video_weight: float = 0.0  # of the same loss on the video; 0: the video is conditioning only

    def __post_init__(self) -> None:
        check_range("nft", self, 1e-6, math.inf, "beta", "most_advantage", "sharpness")
        check_range("nft", self, 0, math.inf, "reference_weight", "video_weight")
        if self.form not in FORMS:
            raise InputError(f'nft.form is "{self.form}": give one of {", ".join(FORMS)}')


@dataclass(frozen=True)
class NftExample(Samples):
    """Played chunks with fresh noise and how good each was."""

    flow: FlowExample
    optimality: Float[Tensor, " b"]  # 0 (bad) to 1 (good), see ``optimality``; success may stand for it
    is_executed: Bool[Tensor, "b a j"]
    weight: Float[Tensor, " b"]  # in the mean over samples


@dataclass(frozen=True)
class NftTerms(LossTerms):
    """The loss and what to look at beside it."""

    change: Float[Tensor, ""]  # mean squared distance of the actions' velocities from the old policy's
    reference: Float[Tensor, ""]  # the same from the reference's


def optimality(advantage: Tensor, most_advantage: float) -> Tensor:
    """Turn advantages into a share of goodness: 0.5 is average, cut off at ``most_advantage`` either way."""
    return 0.5 + 0.5 * (advantage / most_advantage).clamp(-1, 1)


def branches(velocity: Tensor, old_velocity: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the velocities of the imagined good and bad policies on either side of the old one."""
    change = beta * (velocity - old_velocity)
    return old_velocity + change, old_velocity - change


def nft_loss(
    net: Net, old: Net, example: NftExample, config: NftConfig | None = None, *, reference: Net | None = None
) -> NftTerms:
    """Return the loss whose gradient raises what is better than the old policy, a weighted mean over chunks.

    ``old`` is the policy that played, or a slow average of it (``follow``); it and ``reference`` give no gradient.
    """
    config, flow = config or NftConfig(), example.flow
    found = net(flow.batch, flow.seen)
    with torch.no_grad():
        before = old(flow.batch, flow.seen)
        first = reference(flow.batch, flow.seen) if reference is not None else None
    mask, seen, target = example.is_executed, flow.seen, flow.target
    weight = example.weight.to(found.actions.dtype)

    def mean(per_chunk: Tensor) -> Tensor:
        return (weight * per_chunk).mean()

    error = _error(
        found.actions, before.actions, target.actions, seen.actions, seen.action_noise_level, mask, example, config
    )
    action = mean(error)
    video = action.new_zeros(())
    total = action
    if config.video_weight:
        video = mean(_video_error(found, before, example, config))
        total = total + config.video_weight * video
    change = mean(_entry_mean((found.actions - before.actions).square(), mask)).detach()
    distance = action.new_zeros(())
    if first is not None:
        distance = mean(_entry_mean((found.actions - first.actions).square(), mask))
        total = total + config.reference_weight * distance
    return NftTerms(total, video.detach(), action.detach(), change, distance.detach())


def _video_error(found: Velocity, before: Velocity, example: NftExample, config: NftConfig) -> Tensor:
    """Return the loss of each chunk's video, cropped to the frames and rows that the network predicts."""
    num_frames, _, height, width = found.video.shape[1:]
    target, noised = (
        whole[:, -num_frames:, :, :height, :width] for whole in (example.flow.target.video, example.flow.seen.latents)
    )
    level = example.flow.seen.video_noise_level[:, -num_frames:]
    everything = torch.ones_like(found.video, dtype=torch.bool)
    return _error(found.video, before.video, target, noised, level, everything, example, config)


def _error(
    velocity: Tensor,
    old: Tensor,
    target: Tensor,
    noised: Tensor,
    level: Tensor,
    mask: Tensor,
    example: NftExample,
    config: NftConfig,
) -> Tensor:
    good, bad = branches(velocity, old, config.beta)
    share = example.optimality.to(velocity.dtype)
    if config.form == "clean":
        level = level.reshape(level.shape + (1,) * (noised.ndim - level.ndim)).to(noised.dtype)
        target = noised - level * target
        errors = [_clean_error(noised - level * branch - target, mask, config) for branch in (good, bad)]
        return config.most_advantage / config.beta * (share * errors[0] + (1 - share) * errors[1])
    better, worse = (_entry_mean((branch - target).square(), mask) for branch in (good, bad))
    if config.form == "preference":
        return nn.functional.softplus(0.5 * config.sharpness * (2 * share - 1) * (better - worse))
    return share * better + (1 - share) * worse


def _clean_error(difference: Tensor, mask: Tensor, config: NftConfig) -> Tensor:
    square = _entry_mean(difference.square(), mask)
    if not config.has_adaptive_weight:
        return square
    return square / _entry_mean(difference.detach().abs(), mask).clamp(min=LEAST_ERROR)


def _entry_mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0).flatten(1).sum(dim=1) / mask.flatten(1).sum(dim=1).clamp(min=1)


@torch.no_grad()
def follow(old: nn.Module, net: nn.Module, keep: float) -> None:
    """Move the old policy towards the trained one in place: ``keep * old + (1 - keep) * net``."""
    for slow, fast in zip(old.parameters(), net.parameters(), strict=True):
        slow.lerp_(fast.to(slow.dtype), 1 - keep)


def keep_of(step: int, schedule: str = "early") -> float:
    """Return how much of the old policy stays after an iteration, counted from 0 (arXiv 2509.16117, released code).

    "early": ``min(0.001 step, 0.5)``; "late": 0 up to step 75, then ``min(0.0075 (step - 75), 0.999)``; "none": 0,
    the old policy is always the one that just played.
    """
    schedules = {
        "early": min(0.001 * step, 0.5),
        "late": min(0.0075 * max(0, step - 75), 0.999),
        "none": 0.0,
    }
    if schedule not in schedules:
        raise InputError(f'there is no schedule "{schedule}" of the old policy: give one of {", ".join(schedules)}')
    return schedules[schedule]
