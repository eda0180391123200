"""A world action model that plays and keeps what learning needs: each chunk's denoising chain and its conditioning.

Every chunk is planned from the newest frame alone, as ``WamPolicy`` plans it, and its noise is counted: it depends on
the seed, the iteration, the group, the member and the chunk, not on who is played beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from wamlab.data.normalize import Normalizers
from wamlab.errors import InputError
from wamlab.flow import solver_levels
from wamlab.recipes.build import Workbench
from wamlab.recipes.rl_prefix import Conditioning, Prefixes
from wamlab.rl.chain import Chain, SampledChunk, StepPolicy, chain_of, sample_chunk
from wamlab.rl.segments import Asked, Planned, noise_generator
from wamlab.train import autocast
from wamlab.types import Batch, Velocity

START, FIRST_STEP = 0, 1  # words of the noise counter: what a chunk begins with, then one for each denoising step
CHAIN = tuple(f.name for f in fields(SampledChunk) if f.name not in ("latents", "actions", "next_latents"))


class ChainPolicy:
    """The policy as ``rl.play`` asks it: it plans with stochastic denoising steps, and keeps them."""

    def __init__(
        self,
        bench: Workbench,
        normalizers: Normalizers,
        policy: StepPolicy,
        *,
        steps: Sequence[int] | None = None,
        is_prefix_shared: bool = True,
    ) -> None:
        """Take the steps of ``policy`` at some denoising steps (default: all); raises InputError for other samplers.

        ``is_prefix_shared`` computes once what siblings have seen alike; ``prefixes.counts`` tells what that saved.
        """
        sampler = bench.recipe.sampler
        if sampler.guidance_scale != 1 or sampler.solver != "euler" or sampler.has_integer_time:
            raise InputError(
                "a chain has plain Euler steps: give sampler.solver euler, guidance_scale 1 and no integer time"
            )
        if sampler.num_evaluations or sampler.has_dynamic_skips:
            raise InputError("every step of a chain is evaluated: give sampler.num_evaluations 0 and no dynamic skips")
        self.bench, self.normalizers = bench, normalizers
        self.policy, self.steps = policy, steps
        self.prefixes = Prefixes(bench, normalizers, is_shared=is_prefix_shared)
        self.levels = solver_levels(sampler.num_steps, bench.recipe.noise.shift).tolist()

    @property
    def sampler(self) -> str:
        """Name what decides where chunks end, beside the weights."""
        return f"levels {self.levels}, {self.policy}, steps {'all' if self.steps is None else list(self.steps)}"

    @torch.no_grad()
    def __call__(self, asked: Asked) -> Planned:
        """Return robot actions [b a j], and for each chunk all that ``chain_from`` reads."""
        bench, observation = self.bench, asked.observation
        end = bench.recipe.sampler.video_end_level
        given, history = self.prefixes(asked)
        rest = None if given.condition is None else given.condition[:, 1:]
        with autocast(bench.device, has_bf16=bench.recipe.train.has_bf16):

            def denoise(latents: Tensor, actions: Tensor, video_level: float, level: float) -> Velocity:
                video, action = (
                    torch.full((len(actions),), value, dtype=torch.float64, device=bench.device)
                    for value in (video_level, level)
                )
                return bench.net.denoise(history, latents, actions, given.state, video, action, rest)

            sampled = sample_chunk(
                denoise,
                given.state,
                self._start_noise(asked.keys, given),
                self.policy,
                self.levels,
                lambda step: self._drawn(asked.keys, FIRST_STEP + step, self._action_shape),
                steps=self.steps,
                video_levels=[end + (1 - end) * level for level in self.levels],
            )
        actions = self.normalizers.actions_to_robot(sampled.actions.float().cpu().numpy(), observation.state)
        kept = {"planned": sampled.actions, "predicted": sampled.latents}
        kept |= {name: getattr(sampled, name) for name in CHAIN}
        kept |= {f"seen.{f.name}": getattr(given, f.name) for f in fields(Conditioning)}
        return Planned(actions, {name: value.cpu().numpy() for name, value in kept.items() if value is not None})

    @property
    def _action_shape(self) -> tuple[int, int]:
        return self.bench.recipe.model.actions_per_block, self.bench.recipe.model.max_action_dim

    def _start_noise(self, keys: np.ndarray, given: Conditioning) -> tuple[Tensor, Tensor]:
        video = (self.bench.recipe.model.latents_per_block, *given.latents.shape[2:])
        num_actions = int(np.prod(self._action_shape))
        both = self._drawn(keys, START, (num_actions + int(np.prod(video)),))
        actions, latents = both.split([num_actions, both.shape[1] - num_actions], dim=1)
        return latents.unflatten(1, video), actions.unflatten(1, self._action_shape)

    def _drawn(self, keys: np.ndarray, word: int, shape: Sequence[int]) -> Tensor:
        rows = [noise_generator(key, word).standard_normal(shape, dtype=np.float32) for key in keys]
        return torch.from_numpy(np.stack(rows)).to(self.bench.device)


def chain_from(kept: Mapping[str, np.ndarray], device: torch.device) -> Chain:
    """Rebuild the chains of some chunks from what ``ChainPolicy`` kept of them, a row a chunk."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)).to(device) for name, value in kept.items()}
    given = {f.name: tensors.get(f"seen.{f.name}") for f in fields(Conditioning)}
    sampled = SampledChunk(
        latents=tensors["predicted"], actions=tensors["planned"], **{name: tensors[name] for name in CHAIN}
    )
    frames = torch.cat([given.pop("latents"), sampled.latents], dim=1)  # pyright: ignore[reportArgumentType, reportCallIssue]
    mask = torch.ones_like(sampled.actions, dtype=torch.bool)
    return chain_of(Batch(latents=frames, actions=sampled.actions, action_mask=mask, **given), sampled)  # pyright: ignore[reportArgumentType]


def acting_dims(normalizers: Normalizers) -> Bool[np.ndarray, " j"]:
    """Say which of the network's action dimensions reach the robot: not pads, nor those that never changed in data.

    The others' noise would only blur ratios.
    """
    size = normalizers.max_action_dim
    state = np.zeros((2, normalizers.num_states), np.float32)
    low, high = normalizers.actions_to_robot(np.stack([-0.5 * np.ones((1, size)), 0.5 * np.ones((1, size))]), state)
    found = np.zeros(size, dtype=bool)
    found[: normalizers.num_actions] = (low != high)[0]
    return found
