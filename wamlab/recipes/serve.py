"""A run's policy as the server wants it: noise of its own for each session, whoever else is served beside it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from wamlab.data.normalize import Normalizers
from wamlab.data.robot import short_name
from wamlab.lab.run import Run
from wamlab.recipes.build import Workbench
from wamlab.recipes.policy import WamPolicy, load_policy
from wamlab.recipes.session import draw_noise
from wamlab.serve.protocol import Contract
from wamlab.train import step_generator
from wamlab.types import Observation

BYTES_A_SESSION = 100  # its number and its count of calls: chunks are planned from the newest frame alone
SEEDS_APART = 2**20  # between sessions


class SessionPolicy(WamPolicy):
    """Plans like ``WamPolicy``; the noise of call ``n`` of session ``s`` is drawn from ``(seed, s, n)``.

    So what a session gets depends on its own calls alone: to the bit if it is planned alone, to rounding in a batch.
    Session 0 gets the actions of a ``WamPolicy`` with the same seed.
    """

    def __init__(self, bench: Workbench, normalizers: Normalizers, *, seed: int = 0) -> None:
        super().__init__(bench, normalizers, seed=seed)
        self.num_calls_of: dict[int, int] = {}

    def __call__(self, observation: Observation) -> np.ndarray:
        """Return robot actions [b a j] for every parallel session."""
        actions = super().__call__(observation)
        for number in observation.session.tolist():  # only now: a call that failed is made again with the same noise
            self.num_calls_of[number] = self.num_calls_of.get(number, 0) + 1
        return actions

    def draw_noise(self, observation: Observation, canvas: UInt8[Tensor, "b h w 3"]) -> tuple[Tensor, Tensor]:
        """Draw each session's noise apart."""
        drawn = []
        for number in observation.session.tolist():
            seed = self.seed + number * SEEDS_APART
            generator = step_generator(seed, self.num_calls_of.get(number, 0), self.bench.device)
            drawn.append(draw_noise(self.bench, canvas[:1], generator))
        latents, actions = zip(*drawn, strict=True)
        return torch.cat(latents), torch.cat(actions)

    def forget(self, session: int) -> None:
        """Drop what is kept of a session."""
        self.num_calls_of.pop(session, None)

    def session_bytes(self) -> Mapping[int, int]:
        """Return the memory that each session takes."""
        return dict.fromkeys(self.num_calls_of, BYTES_A_SESSION)

    @property
    def contract(self) -> Contract:
        """Return what clients must send and will get."""
        robot = self.bench.recipe.robot
        return Contract(
            cameras=tuple(short_name(camera) for camera in robot.cameras),
            num_states=self.normalizers.num_states,
            num_actions=self.normalizers.num_actions,
            view_px=(robot.view_height_px, robot.view_width_px),
        )


def load_session_policy(run: Run, *, seed: int = 0, num_sampler_steps: int | None = None) -> SessionPolicy:
    """Build a run's policy for serving from its newest checkpoint, averaged weights first.

    Do it in the thread that will serve it, if there is a choice: ``PolicyServer`` says why.
    """
    loaded = load_policy(run, num_sampler_steps=num_sampler_steps)
    return SessionPolicy(loaded.bench, loaded.normalizers, seed=seed)


def warm_up(policy: SessionPolicy, session: int = -1) -> None:
    """Plan once for a session that nobody has, so that the first client does not wait for what is made lazily."""
    contract, robot = policy.contract, policy.bench.recipe.robot
    frame = np.zeros((1, robot.view_height_px, robot.view_width_px, 3), np.uint8)
    state = np.zeros((1, contract.num_states), np.float32)
    policy(Observation(dict.fromkeys(contract.cameras, frame), state, [""], np.array([session])))
    policy.forget(session)
