"""A trained network as a policy: frames, state and instruction in, a chunk of robot actions out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from wamlab.checkpoint import load_weights
from wamlab.checkpoint_folder import newest_checkpoint
from wamlab.data.normalize import Normalizers, normalizers_from_dict
from wamlab.data.views import canvas_of
from wamlab.errors import InputError
from wamlab.lab.records import read_json
from wamlab.lab.run import Run
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import recipe_from_dict
from wamlab.recipes.fit import normalizers_name
from wamlab.recipes.session import begin, draw_noise, plan_from
from wamlab.speed.config import SpeedConfig
from wamlab.train import step_generator
from wamlab.types import Observation


class WamPolicy:
    """Plans each chunk of actions from the newest frame, the state and the instruction.

    The sampling noise of call ``n`` is drawn from ``(seed, n)``, so a policy with the same seed repeats itself.
    ``has_history`` says whether a policy goes on with episodes, and so wants films of them.
    """

    has_history = False

    def __init__(self, bench: Workbench, normalizers: Normalizers, *, seed: int = 0) -> None:
        self.bench, self.normalizers = bench, normalizers
        self.seed = seed
        self.num_calls = 0

    @torch.no_grad()
    def __call__(self, observation: Observation) -> np.ndarray:
        """Return robot actions [b a j] for every parallel session."""
        bench, robot = self.bench, self.bench.recipe.robot
        canvas = torch.from_numpy(canvas_of(observation.frames, robot)).to(bench.device)
        session = begin(bench, canvas, [robot.instruct(task) for task in observation.instructions])
        noise = self.draw_noise(observation, canvas)
        self.num_calls += 1
        state = torch.from_numpy(self.normalizers.state_to_model(observation.state))
        _, actions = plan_from(bench, session, state, noise)
        return self.normalizers.actions_to_robot(actions.float().cpu().numpy(), observation.state)

    def draw_noise(self, observation: Observation, canvas: UInt8[Tensor, "b h w 3"]) -> tuple[Tensor, Tensor]:
        """Draw what this call's chunks are sampled from."""
        generator = step_generator(self.seed, self.num_calls, self.bench.device)
        return draw_noise(self.bench, canvas, generator)


def load_policy(
    run: Run,
    *,
    seed: int = 0,
    num_sampler_steps: int | None = None,
    part: int = 0,
    checkpoint: Path | None = None,
) -> WamPolicy:
    """Build the policy of a run from a checkpoint, the newest for None, averaged weights first; needs no dataset.

    Of a run on several datasets it acts for the robot of the one that ``part`` counts, from 0.
    """
    recipe = recipe_from_dict(run.config)
    if not 0 <= part < max(1, len(recipe.data.roots)):
        raise InputError(f"{run.name} was trained on {max(1, len(recipe.data.roots))} datasets: give part from 0 on")
    if recipe.data.robots:
        recipe = replace(recipe, robot=recipe.data.robots[part])
    if num_sampler_steps is not None:
        recipe = replace(recipe, sampler=replace(recipe.sampler, num_steps=num_sampler_steps, num_evaluations=0))
    recipe = replace(recipe, speed=SpeedConfig())  # how it was trained does not matter to one who plays
    if recipe.train.lora is None:
        recipe = replace(recipe, start=None)  # the checkpoint holds every weight
    bench = Workbench(recipe)
    load_weights(checkpoint or newest_checkpoint(run.checkpoints), bench.net, is_ema=True)
    bench.net.eval()
    path = run.folder / normalizers_name(part)
    normalizers = normalizers_from_dict(read_json(path), where=str(path))
    return WamPolicy(bench, normalizers, seed=seed)
