"""The tabletop as a Gymnasium environment; importing this module registers its ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from wamlab.errors import InputError
from wamlab.sim.render import CAMERAS
from wamlab.sim.scene import FAMILIES, Scene, check_names, draw_scene
from wamlab.sim.table import FPS, NUM_ACTIONS, TableConfig, Tables, checked_actions

ENV_IDS = {
    "reach": "wamlab/TabletopReach-v0",
    "push": "wamlab/TabletopPush-v0",
    "pick_place": "wamlab/TabletopPickPlace-v0",
    "stack": "wamlab/TabletopStack-v0",
}


def observation_space(config: TableConfig) -> spaces.Space[dict[str, Any]]:
    """Return the space of one table's observation: pixels, and agent_pos x, y, sin, cos, closing."""
    low, high = np.array([0, 0, -1, -1, 0], np.float32), np.ones(5, np.float32)
    parts: dict[str, spaces.Space] = {"agent_pos": spaces.Box(low, high, dtype=np.float32)}
    if config.cameras:
        picture = spaces.Box(0, 255, (*config.shape, 3), np.uint8)
        parts["pixels"] = spaces.Dict(dict.fromkeys(config.cameras, picture))
    return spaces.Dict(parts)


def action_space() -> spaces.Box:
    """Return the space of dx, dy, dtheta (full speed at 1) and gripper (-1 open, 1 closed)."""
    return spaces.Box(-1.0, 1.0, (NUM_ACTIONS,), np.float32)


def new_scene(family: str, split: str, generator: np.random.Generator, options: Mapping[str, Any] | None) -> Scene:
    """Draw the scene of the next episode, or take the one in ``options``.

    Both ways draw once from the generator, so that a stored scene with its seed meets the same noise later.
    """
    if unknown := set(options or {}) - {"scene", "split"}:
        raise InputError(f"reset does not know the options {sorted(unknown)}; use 'scene' or 'split'")
    scene_seed = int(generator.integers(2**63))
    scene = (options or {}).get("scene")
    if scene is None:
        return draw_scene(family, (options or {}).get("split", split), np.random.default_rng(scene_seed))
    return scene if isinstance(scene, Scene) else Scene.from_dict(scene)


class TabletopEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """One table: terminated at success (or a reach to a wrong object), truncated at the time limit.

    Reset with a seed draws a scene of the split; ``options={"scene": ...}`` places a given one (a Scene or
    its dict), ``options={"split": ...}`` changes the split for one episode. Stepping on after success is
    allowed: physics goes on and success stays, which recordings use to show the rest.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": int(FPS)}  # noqa: RUF012

    def __init__(
        self,
        family: str = "reach",
        split: str = "seen",
        *,
        render_mode: str | None = None,
        render_size: tuple[int, int] = (256, 256),
        size: int | tuple[int, int] = 96,
        cameras: tuple[str, ...] = ("top", "wrist"),
        control: str = "delta",
        action_noise: float = 0.0,
        latency_ticks: int = 0,
        reward: str = "sparse",
        supersample: int = 2,
    ):
        check_names(family, split)
        if render_mode not in (None, "rgb_array"):
            raise InputError(f"render_mode must be None or 'rgb_array', got {render_mode!r}")
        self.family, self.split = family, split
        self.config = TableConfig(size, tuple(cameras), control, action_noise, latency_ticks, reward, supersample)
        self.render_mode, self.render_size = render_mode, render_size
        self.observation_space = observation_space(self.config)
        self.action_space = action_space()
        self.tables: Tables | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; return what is seen and measured before the first action."""
        super().reset(seed=seed)
        scene = new_scene(self.family, self.split, self.np_random, options)
        self.tables = Tables([scene], [self.np_random], self.config)
        return self.observe(), self.measure()

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute one action for a tenth of a second."""
        tables = self._placed()
        tables.run(checked_actions(action, (NUM_ACTIONS,))[None])
        return (
            self.observe(),
            float(tables.rewards()[0]),
            bool(tables.is_terminated[0]),
            bool(tables.is_truncated[0]),
            self.measure(),
        )

    def observe(self) -> dict[str, Any]:
        """Return the observation of this moment; changes nothing."""
        tables = self._placed()
        seen: dict[str, Any] = {"agent_pos": tables.agent_pos()[0]}
        if self.config.cameras:
            seen["pixels"] = {camera: tables.paint(0, camera) for camera in self.config.cameras}
        return seen

    def measure(self) -> dict[str, Any]:
        """Return is_success, is_failure, progress, stage (goals met in a row) and reached (object or -1)."""
        return {name: values[0].item() for name, values in self._placed().measure().items()}

    def render(self) -> np.ndarray | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Draw the table from above at the render size; changes nothing."""
        return None if self.render_mode is None else self._placed().paint(0, CAMERAS[0], self.render_size)

    def snapshot(self) -> dict[str, Any]:
        """Return all that the future depends on, as plain JSON values."""
        return self._placed().snapshot(0)

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, bit for bit."""
        if self.tables is None:
            self.reset()
        tables = self._placed()
        tables.restore(0, snapshot)
        self.np_random = tables.generators[0]

    @property
    def scene(self) -> Scene:
        """What lies on the table and what is asked for."""
        return self._placed().scenes[0]

    @property
    def task(self) -> str:
        """The task family."""
        return self.family

    @property
    def task_description(self) -> str:
        """The instruction of this episode; empty before the first reset."""
        return self.tables.scenes[0].instruction if self.tables else ""

    @property
    def _max_episode_steps(self) -> int:
        return self.tables.scenes[0].max_ticks if self.tables else _longest(self.family, self.split)

    def _placed(self) -> Tables:
        if self.tables is None:
            raise InputError("the tabletop has no episode yet; call reset() first")
        return self.tables


def _longest(family: str, split: str) -> int:
    return draw_scene(family, split, np.random.default_rng(0)).max_ticks


def register_envs() -> None:
    """Make the ids of all task families known to ``gymnasium.make``; calling it again changes nothing."""
    for family in FAMILIES:
        if ENV_IDS[family] not in gymnasium.registry:
            gymnasium.register(
                id=ENV_IDS[family],
                entry_point=f"{__name__}:TabletopEnv",
                kwargs={"family": family},
            )


register_envs()
