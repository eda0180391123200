"""Policies for closed-loop evaluation: noise that pairs episodes, and planning ahead while the last chunk is played."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from wamlab.data.normalize import Normalizers
from wamlab.data.views import canvas_of
from wamlab.recipes.build import Workbench
from wamlab.recipes.imagine import decode_block
from wamlab.recipes.policy import WamPolicy
from wamlab.recipes.session import begin, draw_noise, observe, plan_from
from wamlab.train import step_generator
from wamlab.types import Observation

SEEDS_APART = 2**20  # between sessions


class PairedPolicy(WamPolicy):
    """Plans like ``WamPolicy``; the noise of call ``n`` of session ``s`` is drawn from ``(seed, s, n)``.

    So the episodes of two policies with the same sessions are pairs, however many play side by side. Calls are counted
    for each session since ``forget``.
    """

    def __init__(self, bench: Workbench, normalizers: Normalizers, *, seed: int = 0) -> None:
        super().__init__(bench, normalizers, seed=seed)
        self.num_calls_of: dict[int, int] = {}

    def __call__(self, observation: Observation) -> np.ndarray:
        """Return robot actions [b a j] for every parallel session."""
        return self.plan_blocks(observation, 1)

    def forget(self) -> None:
        """Count calls from 0 again, before the same sessions are played anew."""
        self.num_calls_of = {}

    @torch.no_grad()
    def plan_blocks(self, observation: Observation, num_blocks: int) -> Float[np.ndarray, "b a j"]:
        """Return the actions of several blocks from now, those after the first planned from predicted frames.

        No state is predicted: later blocks have the newest state, with relative dimensions where the last action of the
        block before commands them to be.
        """
        bench, robot = self.bench, self.bench.recipe.robot
        canvas = torch.from_numpy(canvas_of(observation.frames, robot)).to(bench.device)
        session = begin(bench, canvas, [robot.instruct(task) for task in observation.instructions])
        state, dims, chunks = observation.state, list(self.normalizers.relative_dims), []
        generators = self._generators(observation)
        for block in range(num_blocks):
            noise = self._draw(canvas, generators)
            model_state = torch.from_numpy(self.normalizers.state_to_model(state))
            latents, actions = plan_from(bench, session, model_state, noise)
            chunks.append(self.normalizers.actions_to_robot(actions.float().cpu().numpy(), state))
            if block + 1 < num_blocks:
                session = observe(bench, session, decode_block(bench, session, latents))
                if dims:
                    state = state.copy()
                    state[:, dims] = chunks[-1][:, -1, dims]
        return np.concatenate(chunks, axis=1)

    def _generators(self, observation: Observation) -> list[torch.Generator]:
        generators = []
        for number in observation.session.tolist():
            call = self.num_calls_of.get(number, 0)
            self.num_calls_of[number] = call + 1
            generators.append(step_generator(self.seed + number * SEEDS_APART, call, self.bench.device))
        return generators

    def _draw(self, canvas: UInt8[Tensor, "b h w 3"], generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
        drawn = [draw_noise(self.bench, canvas[:1], generator) for generator in generators]
        latents, actions = zip(*drawn, strict=True)
        return torch.cat(latents), torch.cat(actions)


class LookAhead:
    """Plans the chunk after the one that plays, from what was seen as that one began.

    The window begins with that real frame in place of what was predicted for it; the frames until the next chunk are
    the network's own. Where ``2 num_executed`` ticks fit one block, no frame is predicted: its later actions serve.
    """

    def __init__(self, policy: PairedPolicy, num_executed: int | None = None) -> None:
        self.policy = policy
        block = policy.bench.recipe.window.actions_per_block
        self.num_executed = num_executed or block
        self.num_blocks = -(-2 * self.num_executed // block)

    def __call__(self, observation: Observation) -> Float[np.ndarray, "b a j"]:
        """Return ``num_executed`` robot actions [b a j] of the next chunk."""
        actions = self.policy.plan_blocks(observation, self.num_blocks)
        return actions[:, self.num_executed : 2 * self.num_executed]
