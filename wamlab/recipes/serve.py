"""A run's policy as the server wants it: what each session gets depends on nobody who is served beside it."""

from __future__ import annotations

import numpy as np

from wamlab.data.robot import short_name
from wamlab.lab.run import Run
from wamlab.recipes.history import HistoryPolicy
from wamlab.recipes.policy import load_policy
from wamlab.serve.protocol import Contract
from wamlab.types import Observation


class SessionPolicy(HistoryPolicy):
    """A ``HistoryPolicy`` with the contract of what it reads and writes; session 0 of one without history gets the
    actions of a ``WamPolicy`` with the same seed.
    """

    @property
    def contract(self) -> Contract:
        """Return what clients must send and will get."""
        robot = self.bench.recipe.robot
        return Contract(
            cameras=tuple(short_name(camera) for camera in robot.cameras),
            num_states=self.normalizers.num_states,
            num_actions=self.normalizers.num_actions,
            view_px=(robot.view_height_px, robot.view_width_px),
            film_frames=self.bench.recipe.window.frames_per_block if self.has_history else 1,
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
    policy.plan(Observation(dict.fromkeys(contract.cameras, frame), state, [""], np.array([session])), [None])
