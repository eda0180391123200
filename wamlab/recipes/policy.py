"""A trained network as a policy: frames, state and instruction in, a chunk of robot actions out."""

from __future__ import annotations

import numpy as np
import torch

from wamlab.data.views import canvas_of
from wamlab.model.sampler import sample_block
from wamlab.recipes.build import Workbench
from wamlab.train import autocast, step_generator
from wamlab.types import Observation


class WamPolicy:
    """Plans each chunk of actions from the newest frame, the state and the instruction.

    The sampling noise of call ``n`` is drawn from ``(seed, n)``, so a policy with the same seed repeats itself.
    """

    def __init__(self, bench: Workbench, *, seed: int = 0, num_sampler_steps: int | None = None) -> None:
        self.bench = bench
        self.seed = seed
        self.num_sampler_steps = num_sampler_steps or bench.recipe.evaluation.num_sampler_steps
        self.num_calls = 0

    @torch.no_grad()
    def __call__(self, observation: Observation) -> np.ndarray:
        """Return robot actions [b a j] for every parallel session."""
        bench, recipe = self.bench, self.bench.recipe
        normalizers = bench.readers[0].normalizers
        canvas = torch.from_numpy(canvas_of(observation.frames, recipe.robot)).to(bench.device)
        state = normalizers.state_to_model(observation.state)
        generator = step_generator(self.seed, self.num_calls, bench.device)
        self.num_calls += 1
        with autocast(bench.device, has_bf16=recipe.train.has_bf16):
            latents, condition, image = bench.encoder.encode_first(canvas)
            text = bench.encoder.encode_text(list(observation.instructions))
            history = bench.net.observe(bench.net.start(text, image), latents, condition)
            _, actions = sample_block(
                bench.net,
                history,
                torch.from_numpy(state)[:, None].to(bench.device),
                latent_shape=tuple(latents.shape[2:]),
                actions_per_block=recipe.model.actions_per_block,
                max_action_dim=recipe.model.max_action_dim,
                num_steps=self.num_sampler_steps,
                generator=generator,
                solver=recipe.evaluation.solver,
                shift=recipe.noise.shift,
            )
        return normalizers.actions_to_robot(actions.float().cpu().numpy(), observation.state)
