"""Playing episodes with history: the tabletop's frames between two plans are kept and shown to the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from wamlab.data.robot import short_name
from wamlab.recipes.history import HistoryPolicy
from wamlab.score.success import SuccessRate, measure_success
from wamlab.sim.vector import TabletopVector
from wamlab.types import Policy


class Filmed:
    """A tabletop that remembers what it showed since the last observation; an ``Env``."""

    def __init__(self, env: TabletopVector) -> None:
        self._env = env
        self.num_envs = env.num_envs
        self.films: list[dict[str, np.ndarray]] = []

    @property
    def instructions(self) -> Sequence[str]:
        return self._env.instructions

    @property
    def is_done(self) -> np.ndarray:
        return self._env.is_done

    @property
    def is_success(self) -> np.ndarray:
        return self._env.is_success

    def reset(self, *, seed: Any = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Begin episodes, of which nothing is remembered yet."""
        self.films = []
        return self._env.reset(seed=seed)

    def chunk_step(self, actions: Float[np.ndarray, "b a j"], /) -> tuple[Any, ...]:
        """Execute chunks and keep a frame a tick."""
        result = self._env.chunk_step(actions, draw="all")
        pixels = result[-1]["pixels"]
        self.films = [{camera: film[row] for camera, film in pixels.items()} for row in range(self.num_envs)]
        return result

    def shown_to(self, policy: Policy) -> Policy:
        """Return the policy, which then sees the films beside each observation."""
        return lambda observation: policy(replace(observation, films=self.films))


def play_with_history(policy: HistoryPolicy, family: str, seeds: Sequence[int], *, num_envs: int = 50) -> SuccessRate:
    """Play one tabletop episode a seed in closed loop, each going on from its own real frames."""
    robot = policy.bench.recipe.robot
    env = TabletopVector(
        min(num_envs, len(seeds)),
        family,
        size=(robot.view_height_px, robot.view_width_px),
        cameras=tuple(short_name(camera) for camera in robot.cameras),
    )
    film = Filmed(env)
    return measure_success(film, film.shown_to(policy), seeds)
