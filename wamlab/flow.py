"""Flow matching: noise, velocity, loss weights and solver steps as pure functions.

Convention: ``noised = (1 - noise_level) * clean + noise_level * noise`` and ``velocity = noise - clean``.
The network's time input is ``1000 * noise_level``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Float64
from torch import Generator, Tensor

from wamlab.errors import InputError, check_range
from wamlab.types import Batch, FlowExample, LossTerms, Net, Noised, Velocity

NUM_LEVELS = 1000  # entries of the training table
WEIGHTINGS = ("bell", "flat")


@dataclass(frozen=True)
class NoiseConfig:
    """How training draws noise levels and weighs them in the loss."""

    shift: float = 5.0  # moves levels towards noise: u -> shift*u / (1 + (shift-1)*u)
    is_decoupled: bool = False  # draw video from Beta(video_beta, 1) and actions uniformly, apart from each other
    video_beta: float = 3.0  # only when decoupled; 7 in DreamZero-Flash
    weighting: str = "bell"  # of levels in the loss: "bell" around 0.5 as published, or "flat"
    action_weight: float = 1.0  # of the action term in the total; 1 as published

    def __post_init__(self) -> None:
        check_range("noise", self, 1e-3, 1e3, "shift", "video_beta")
        check_range("noise", self, 0, 1e3, "action_weight")
        if self.weighting not in WEIGHTINGS:
            raise InputError(f'noise.weighting is "{self.weighting}": give one of {", ".join(WEIGHTINGS)}')


def shifted(level: Tensor, shift: float) -> Tensor:
    """Move uniform noise levels towards 1 (resolution shift of flow transformers)."""
    return shift * level / (1 + (shift - 1) * level)


@lru_cache(maxsize=8)
def noise_table(shift: float = 5.0) -> Float64[Tensor, " levels"]:
    """Return the training noise levels: entry 0 is pure noise, entry 999 nearly clean."""
    return shifted(1 - torch.arange(NUM_LEVELS, dtype=torch.float64) / NUM_LEVELS, shift)


@lru_cache(maxsize=8)
def _weight_constants(shift: float) -> tuple[float, float]:
    bell = torch.exp(-2 * (noise_table(shift) - 0.5).square())
    floor = bell.min()
    return floor.item(), (NUM_LEVELS / (bell - floor).sum()).item()


def loss_weight(noise_level: Tensor, shift: float = 5.0) -> Tensor:
    """Weigh each level by a bell around 0.5 that is zero at pure noise and averages 1 over the table."""
    floor, scale = _weight_constants(shift)
    return scale * (torch.exp(-2 * (noise_level - 0.5).square()) - floor)


def level_weight(noise_level: Tensor, config: NoiseConfig) -> Tensor:
    """Return the weight of each level in the loss, in float32."""
    if config.weighting == "flat":
        return torch.ones_like(noise_level, dtype=torch.float32)
    return loss_weight(noise_level, config.shift).float()


def add_noise(clean: Tensor, noise: Tensor, noise_level: Tensor) -> Tensor:
    """Mix clean data with noise; ``noise_level`` has the leading axes of ``clean``."""
    level = _beside(clean, noise_level)
    return (1 - level) * clean + level * noise


def draw_noise_levels(
    num_samples: int,
    num_frames: int,
    num_blocks: int,
    actions_per_block: int,
    generator: Generator,
    config: NoiseConfig,
) -> tuple[Float64[Tensor, "b t"], Float64[Tensor, "b a"]]:
    """Draw one level for frame 0, one per block of latents, and one per block of actions.

    Coupled (default): a block's actions share its video level. Decoupled: video levels come from
    Beta(video_beta, 1) before the shift and action levels are uniform, one draw a block.
    """
    device = generator.device
    table = noise_table(config.shift).to(device)
    uniform = torch.rand((num_samples, 1 + 2 * num_blocks), generator=generator, device=device, dtype=torch.float64)
    video, action = uniform[:, : 1 + num_blocks], uniform[:, 1 + num_blocks :]
    if config.is_decoupled:
        video = 1 - video ** (1 / config.video_beta)  # 1 - Beta(beta, 1); index 0 is pure noise
    else:
        action = video[:, 1:]
    video_level, action_level = (table[(u * NUM_LEVELS).long().clamp(max=NUM_LEVELS - 1)] for u in (video, action))
    frames_per_block = (num_frames - 1) // num_blocks if num_blocks else 0
    blocks = video_level[:, 1:].repeat_interleave(frames_per_block, dim=1)
    return torch.cat([video_level[:, :1], blocks], dim=1), action_level.repeat_interleave(actions_per_block, dim=1)


def with_noise(
    batch: Batch, generator: Generator, config: NoiseConfig | None = None, *, part: int = 0, num_parts: int = 1
) -> FlowExample:
    """Draw noise levels and noise for a batch, on the generator's device; if it is a part of a larger one, its own."""
    config = config or NoiseConfig()
    num_blocks = batch.state.shape[1]
    video_level, action_level = draw_noise_levels(
        len(batch) * num_parts,
        batch.latents.shape[1],
        num_blocks,
        batch.actions.shape[1] // num_blocks,
        generator,
        config,
    )
    own = slice(part * len(batch), (part + 1) * len(batch))
    return with_noise_at(batch, video_level[own], action_level[own], generator, part=part, num_parts=num_parts)


def with_noise_at(
    batch: Batch,
    video_level: Float[Tensor, "b t"],
    action_level: Float[Tensor, "b a"],
    generator: Generator,
    *,
    part: int = 0,
    num_parts: int = 1,
) -> FlowExample:
    """Add fresh noise to a batch at the given levels; say what the network sees and what it shall predict."""
    size = len(batch)
    video_noise, action_noise = (
        torch.randn(
            (size * num_parts, *clean.shape[1:]), generator=generator, device=generator.device, dtype=torch.float32
        )[part * size : (part + 1) * size]
        for clean in (batch.latents, batch.actions)
    )
    seen = Noised(
        latents=add_noise(batch.latents, video_noise, video_level),
        actions=add_noise(batch.actions, action_noise, action_level),
        video_noise_level=video_level,
        action_noise_level=action_level,
    )
    return FlowExample(batch, seen, Velocity(video=video_noise - batch.latents, actions=action_noise - batch.actions))


def video_error(
    predicted: Velocity, target: Velocity, video_level: Float[Tensor, "b t"], config: NoiseConfig | None = None
) -> Float[Tensor, "b predicted"]:
    """Return the weighted squared error of every predicted latent frame, in float32.

    It is cropped to what the network predicts: an odd latent height loses its last row, and a network that
    ``drops_noisy_first`` leaves out frame 0.
    """
    num_frames, _, height, width = predicted.video.shape[1:]
    video_target, video_level = target.video[:, -num_frames:, :, :height, :width], video_level[:, -num_frames:]
    error = (predicted.video.float() - video_target.float()).square().mean(dim=(2, 3, 4))
    return level_weight(video_level, config or NoiseConfig()) * error


def velocity_loss(
    predicted: Velocity,
    target: Velocity,
    video_level: Float[Tensor, "b t"],
    action_level: Float[Tensor, "b a"],
    action_mask: Bool[Tensor, "b a j"],
    config: NoiseConfig | None = None,
) -> LossTerms:
    """Weighted squared error in float32 (spec: mean over frames; actions over *all* dimensions)."""
    config = config or NoiseConfig()
    video = video_error(predicted, target, video_level, config).mean()
    error = (predicted.actions.float() - target.actions.float()).square() * action_mask
    action = (level_weight(action_level, config) * error.mean(dim=-1)).mean() if error.numel() else video * 0
    return LossTerms(total=video + config.action_weight * action, video=video.detach(), action=action.detach())


def flow_loss(net: Net, example: FlowExample, config: NoiseConfig | None = None) -> LossTerms:
    """Teacher-forced flow-matching loss: predict the velocity of every noised block, weigh, average."""
    seen = example.seen
    return velocity_loss(
        net(example.batch, seen),
        example.target,
        seen.video_noise_level,
        seen.action_noise_level,
        example.batch.action_mask,
        config,
    )


def solver_levels(num_steps: int, shift: float = 5.0) -> Float64[Tensor, " levels"]:
    """Return the ``num_steps + 1`` noise levels a sampler visits, from nearly 1 down to 0 (spec 6.2)."""
    start = torch.linspace(0.999, 0, num_steps + 1, dtype=torch.float64)[:-1]
    return torch.cat([shifted(start, shift), torch.zeros(1, dtype=torch.float64)])


def euler_step(noised: Tensor, velocity: Tensor, level: float, next_level: float) -> Tensor:
    """Move along the probability-flow ODE by one first-order step."""
    return noised + (next_level - level) * velocity


@dataclass(frozen=True)
class Gaussian:
    """The distribution of where a stochastic solver step ends: independent in every entry."""

    mean: Float[Tensor, "*shape"]
    std: Float[Tensor, " ..."]  # broadcasts against the mean; 0 where the step is deterministic


def sde_transition(
    noised: Tensor, velocity: Tensor, level: Tensor, next_level: Tensor, *, noise_scale: float, level_cap: float
) -> Gaussian:
    """Return where a step of the reverse SDE ends that has the ODE's marginals (Flow-GRPO, arXiv 2505.05470, eq. 9).

    Diffusion is ``noise_scale * sqrt(level / (1 - level))``; above ``level_cap``, the second level of the grid, the
    denominator stays at ``1 - level_cap``. Levels have the leading axes of ``noised``; ``noise_scale`` 0 is the ODE.
    """
    level, next_level = _beside(noised, level), _beside(noised, next_level)
    step = level - next_level
    diffusion = noise_scale**2 / (1 - level.clamp(max=level_cap))  # its square over the level: no division by 0
    clean, noise = noised - level * velocity, noised + (1 - level) * velocity
    mean = (1 - next_level) * clean + (next_level - 0.5 * diffusion * step) * noise
    return Gaussian(mean, (diffusion * level * step).sqrt())


def cps_transition(
    noised: Tensor, velocity: Tensor, level: Tensor, next_level: Tensor, *, noise_share: float
) -> Gaussian:
    """Return where a coefficient-preserving step ends: a ``noise_share`` (0 to 1) of the noise is drawn anew.

    The squares of what noise remains and what is drawn add up to that of the next level, so the last step is noiseless.
    """
    level, next_level = _beside(noised, level), _beside(noised, next_level)
    clean, noise = noised - level * velocity, noised + (1 - level) * velocity
    angle = 0.5 * math.pi * noise_share
    return Gaussian((1 - next_level) * clean + next_level * math.cos(angle) * noise, next_level * math.sin(angle))


def gaussian_log_prob(value: Tensor, gaussian: Gaussian) -> Tensor:
    """Return the log-density of every entry, in float32 at least; 0 where the standard deviation is 0."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    mean, std = gaussian.mean.to(dtype), gaussian.std.to(dtype)
    is_random = std > 0
    safe = torch.where(is_random, std, 1)  # keeps gradients finite where the density is not used
    density = -0.5 * ((value.to(dtype) - mean) / safe).square() - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(is_random, density, 0)


def _beside(noised: Tensor, level: Tensor) -> Tensor:
    return level.reshape(level.shape + (1,) * (noised.ndim - level.ndim)).to(noised.dtype)
