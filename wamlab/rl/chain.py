"""What a rollout keeps of an action chunk's denoising, so that a trainer can ask how probable it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from wamlab.errors import InputError
from wamlab.flow import Gaussian, euler_step, gaussian_log_prob
from wamlab.types import Batch, Net, Noised, Samples, Velocity

Denoise = Callable[[Tensor, Tensor, float, float], Velocity]  # noised latents, actions and their levels to velocity
# Says where a denoising step may end: state, noised, velocity, level, next level; levels lead like what is noised.
StepPolicy = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Gaussian]


@dataclass(frozen=True)
class NoisedSteps(Samples):
    """Several noised states of each sample: what the network saw at some denoising steps, or noise drawn anew."""

    latents: Float[Tensor, "b steps t c h w"]
    actions: Float[Tensor, "b steps a j"]
    video_noise_level: Float64[Tensor, "b steps t"]
    action_noise_level: Float64[Tensor, "b steps a"]


@dataclass(frozen=True)
class Chain(Samples):
    """The stochastic denoising steps of action chunks as the rollout took them: all, or one of each chunk.

    The conditioning must be bit for bit what the rollout saw, else ratios differ from 1 before the first update.
    """

    batch: Batch  # its last block is the chunk; of that block the network sees ``seen`` alone
    seen: NoisedSteps
    next_actions: Float[Tensor, "b steps a j"]
    next_action_level: Float64[Tensor, "b steps a"]
    action_log_prob: Float[Tensor, "b steps a j"]  # of every entry when it was drawn
    next_latents: Float[Tensor, "b steps t c h w"] | None = None  # only where the video's steps are stochastic too
    next_video_level: Float64[Tensor, "b steps t"] | None = None


@dataclass(frozen=True)
class SampledChunk(Samples):
    """A denoised block, and those of its steps that were stochastic."""

    latents: Float[Tensor, "b t c h w"]  # the end of the video's schedule
    actions: Float[Tensor, "b a j"]
    seen_latents: Float[Tensor, "b steps t c h w"]
    seen_actions: Float[Tensor, "b steps a j"]
    next_actions: Float[Tensor, "b steps a j"]
    action_log_prob: Float[Tensor, "b steps a j"]
    action_levels: Float64[Tensor, "b steps 2"]  # before and after each step
    video_levels: Float64[Tensor, "b steps 2"]
    next_latents: Float[Tensor, "b steps t c h w"] | None = None


def sample_chunk(
    denoise: Denoise,
    state: Float[Tensor, "b s k"],
    noise: tuple[Float[Tensor, "b t c h w"], Float[Tensor, "b a j"]],
    policy: StepPolicy,
    levels: Sequence[float],
    draw: Callable[[int], Float[Tensor, "b a j"]],
    *,
    steps: Sequence[int] | None = None,
    video_levels: Sequence[float] | None = None,
    video_policy: StepPolicy | None = None,
    draw_video: Callable[[int], Tensor] | None = None,
) -> SampledChunk:
    """Denoise a block from ``noise`` over ``levels``; at ``steps`` (default: all) the actions' step is stochastic.

    ``draw`` returns the unit noise of a step by its index, so that it can be counted rather than remembered. One
    index in ``steps`` is the one-step decision process of RLinf, all of them the one of ReinFlow (arXiv 2505.22094);
    the video follows its ODE unless it has a policy of its own.
    """
    num_steps, video_levels = len(levels) - 1, video_levels or levels
    wanted = range(num_steps) if steps is None else steps
    if not wanted or not all(0 <= step < num_steps for step in wanted):
        raise InputError(f"stochastic steps are {list(wanted)}: give some of 0 to {num_steps - 1}")
    if (video_policy is None) != (draw_video is None):
        raise InputError("a stochastic video needs both video_policy and draw_video")
    latents, actions = noise
    kept: dict[str, list[Tensor]] = {f.name: [] for f in fields(SampledChunk)[2:]}
    for index in range(num_steps):
        level, following = levels[index : index + 2]
        video_level, video_following = video_levels[index : index + 2]
        velocity = denoise(latents, actions, video_level, level)
        next_latents = euler_step(latents, velocity.video, video_level, video_following)
        if index in wanted:
            before = {"seen_latents": latents, "seen_actions": actions}
            pair = (level, following)
            actions, before["action_log_prob"] = _drawn(policy, state, actions, velocity.actions, pair, draw(index))
            if video_policy is not None and draw_video is not None:
                pair = (video_level, video_following)
                next_latents, _ = _drawn(video_policy, state, latents, velocity.video, pair, draw_video(index))
                before["next_latents"] = next_latents
            pairs = {
                "action_levels": _rows((level, following), state),
                "video_levels": _rows((video_level, video_following), state),
            }
            for name, value in {**before, **pairs, "next_actions": actions}.items():
                kept[name].append(value)
        else:
            actions = euler_step(actions, velocity.actions, level, following)
        latents = next_latents
    stacked = {name: torch.stack(values, dim=1) for name, values in kept.items() if values}
    return SampledChunk(latents=latents, actions=actions, **stacked)


def chain_of(batch: Batch, sampled: SampledChunk) -> Chain:
    """Put the steps of a sampled block behind what the network was conditioned on.

    ``batch`` ends with that block (its own latents and actions are not seen); what comes before it is the history,
    which is clean and has no probability of its own.
    """
    num_steps = sampled.seen_actions.shape[1]
    past_frames = batch.latents.shape[1] - sampled.latents.shape[1]
    past_ticks = batch.actions.shape[1] - sampled.actions.shape[1]

    def behind(clean: Tensor, own: Tensor, num_past: int) -> Tensor:
        return torch.cat([clean[:, None, :num_past].expand(-1, num_steps, *clean[:, :num_past].shape[1:]), own], dim=2)

    def per_row(level: Tensor, num_past: int, num_own: int) -> Tensor:
        own = level[..., None].expand(-1, -1, num_own)
        return torch.cat([own.new_zeros(*own.shape[:2], num_past), own], dim=2)

    frames, ticks = (past_frames, sampled.latents.shape[1]), (past_ticks, sampled.actions.shape[1])
    chain = Chain(
        batch=batch,
        seen=NoisedSteps(
            latents=behind(batch.latents, sampled.seen_latents, past_frames),
            actions=behind(batch.actions, sampled.seen_actions, past_ticks),
            video_noise_level=per_row(sampled.video_levels[..., 0], *frames),
            action_noise_level=per_row(sampled.action_levels[..., 0], *ticks),
        ),
        next_actions=behind(batch.actions, sampled.next_actions, past_ticks),
        next_action_level=per_row(sampled.action_levels[..., 1], *ticks),
        action_log_prob=behind(torch.zeros_like(batch.actions), sampled.action_log_prob, past_ticks),
    )
    if sampled.next_latents is None:
        return chain
    return replace(
        chain,
        next_latents=behind(batch.latents, sampled.next_latents, past_frames),
        next_video_level=per_row(sampled.video_levels[..., 1], *frames),
    )


def velocities(net: Net, batch: Batch, seen: NoisedSteps) -> tuple[Tensor, Tensor]:
    """Ask the network once about all noised states: velocities (b steps t c h w) and (b steps a j)."""
    size, num_steps = seen.actions.shape[:2]
    rows = batch if num_steps == 1 else batch._map(lambda tensor: tensor.repeat_interleave(num_steps, dim=0))
    flat = Noised(*(getattr(seen, f.name).flatten(0, 1) for f in fields(Noised)))
    found = net(rows, flat)
    return found.video.unflatten(0, (size, num_steps)), found.actions.unflatten(0, (size, num_steps))


def _rows(pair: tuple[float, float], state: Tensor) -> Tensor:
    return torch.tensor(pair, dtype=torch.float64, device=state.device).expand(len(state), 2)


def _drawn(
    policy: StepPolicy, state: Tensor, noised: Tensor, velocity: Tensor, pair: tuple[float, float], noise: Tensor
) -> tuple[Tensor, Tensor]:
    level, following = (
        torch.full(noised.shape[:2], value, dtype=torch.float64, device=noised.device)[:, None] for value in pair
    )
    step = policy(state, noised[:, None], velocity[:, None], level, following)
    drawn = (step.mean + step.std * noise[:, None]).to(noised.dtype)
    return drawn[:, 0], gaussian_log_prob(drawn, step)[:, 0]
