"""A trained network as a policy: frames, state and instruction in, a chunk of robot actions out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from wamlab.checkpoint import load_weights, newest_checkpoint
from wamlab.data.normalize import Normalizers, normalizers_from_dict
from wamlab.data.robot import short_name
from wamlab.data.views import canvas_of
from wamlab.lab.records import read_json
from wamlab.lab.run import Run
from wamlab.model.sampler import draw_block_noise, sample_block
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import recipe_from_dict
from wamlab.recipes.fit import NORMALIZERS
from wamlab.score.success import SuccessRate, measure_success
from wamlab.sim.vector import TabletopVector
from wamlab.train import autocast, step_generator
from wamlab.types import Observation


class WamPolicy:
    """Plans each chunk of actions from the newest frame, the state and the instruction.

    The sampling noise of call ``n`` is drawn from ``(seed, n)``, so a policy with the same seed repeats itself.
    """

    def __init__(
        self, bench: Workbench, normalizers: Normalizers, *, seed: int = 0, num_sampler_steps: int | None = None
    ) -> None:
        self.bench, self.normalizers = bench, normalizers
        self.seed = seed
        default = bench.recipe.evaluation.num_sampler_steps
        self.num_sampler_steps = default if num_sampler_steps is None else num_sampler_steps
        self.num_calls = 0
        robot = bench.recipe.robot
        _, *self._latent_shape = bench.encoder.video.latent_shape(1, robot.canvas_height_px, robot.canvas_width_px)

    @torch.no_grad()
    def __call__(self, observation: Observation) -> np.ndarray:
        """Return robot actions [b a j] for every parallel session."""
        bench, recipe = self.bench, self.bench.recipe
        canvas = torch.from_numpy(canvas_of(observation.frames, recipe.robot)).to(bench.device)
        instructions = [recipe.robot.instruct(task) for task in observation.instructions]
        state = self.normalizers.state_to_model(observation.state)
        generator = step_generator(self.seed, self.num_calls, bench.device)
        self.num_calls += 1
        noise = draw_block_noise(
            len(canvas),
            (recipe.model.latents_per_block, *self._latent_shape),
            (recipe.model.actions_per_block, recipe.model.max_action_dim),
            generator,
        )
        num_frames = 1 + recipe.window.frames_per_block
        latents, condition = bench.encoder.encode_first(canvas, num_frames)
        with autocast(bench.device, has_bf16=recipe.train.has_bf16):
            history = bench.net.start(bench.encoder.encode_text(instructions))
            history = bench.net.observe(history, latents, None if condition is None else condition[:, :1])
            _, actions = sample_block(
                bench.net,
                history,
                torch.from_numpy(state)[:, None].to(bench.device),
                noise,
                num_steps=self.num_sampler_steps,
                solver=recipe.evaluation.solver,
                shift=recipe.noise.shift,
                condition=None if condition is None else condition[:, 1:],
            )
        actions = actions.float().cpu().numpy()
        return self.normalizers.actions_to_robot(actions, observation.state)


def load_policy(run: Run, *, seed: int = 0, num_sampler_steps: int | None = None) -> WamPolicy:
    """Build the policy of a run from its newest checkpoint, averaged weights first; needs no dataset."""
    bench = Workbench(recipe_from_dict(run.config))
    load_weights(newest_checkpoint(run.checkpoints), bench.net, is_ema=True)
    bench.net.eval()
    normalizers = normalizers_from_dict(read_json(run.folder / NORMALIZERS))
    return WamPolicy(bench, normalizers, seed=seed, num_sampler_steps=num_sampler_steps)


def play_tabletop(policy: WamPolicy, family: str, seeds: Sequence[int], *, num_envs: int = 50) -> SuccessRate:
    """Play one tabletop episode a seed in closed loop."""
    robot = policy.bench.recipe.robot
    env = TabletopVector(
        min(num_envs, len(seeds)),
        family,
        size=(robot.view_height_px, robot.view_width_px),
        cameras=tuple(short_name(camera) for camera in robot.cameras),
    )
    return measure_success(env, policy, seeds)
