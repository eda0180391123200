"""Many tabletops as one Gymnasium vector environment that runs action chunks and draws only what is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from jaxtyping import UInt8

from wamlab.errors import InputError
from wamlab.sim.scene import Scene, check_names
from wamlab.sim.table import FPS, NUM_ACTIONS, TableConfig, Tables, checked_actions
from wamlab.sim.tabletop import action_space, new_scene, observation_space
from wamlab.types import Observation

DRAW = ("last", "all", "none")


class TabletopVector(gymnasium.vector.VectorEnv[dict[str, Any], np.ndarray, np.ndarray]):
    """N tables that step together; each gives the same numbers as a ``TabletopEnv`` with its seed.

    A finished table is frozen and costs nothing until it is reset: by ``reset`` (autoreset DISABLED, the
    default), at the end of the same call (SAME_STEP; the last observation is in ``infos["final_obs"]``), or
    by the next call, whose action it ignores (NEXT_STEP).
    """

    num_actions, control_hz = NUM_ACTIONS, FPS

    def __init__(
        self,
        num_envs: int,
        family: str | Sequence[str] = "reach",
        split: str | Sequence[str] = "seen",
        *,
        autoreset_mode: AutoresetMode = AutoresetMode.DISABLED,
        size: int | tuple[int, int] = 96,
        cameras: tuple[str, ...] = ("top", "wrist"),
        control: str = "delta",
        action_noise: float = 0.0,
        latency_ticks: int = 0,
        reward: str = "sparse",
        supersample: int = 2,
        has_films: bool = False,
    ):
        if num_envs < 1:
            raise InputError(f"a vector needs at least one environment, got num_envs={num_envs}")
        self.num_envs = num_envs
        self.families = _one_each(family, num_envs, "family")
        self.splits = _one_each(split, num_envs, "split")
        for names in zip(self.families, self.splits, strict=True):
            check_names(*names)
        self.config = TableConfig(size, tuple(cameras), control, action_noise, latency_ticks, reward, supersample)
        self.has_films = has_films
        self.autoreset_mode = autoreset_mode
        self.metadata = {
            "render_modes": ["rgb_array"], "render_fps": int(FPS), "autoreset_mode": autoreset_mode
        }  # fmt: skip
        self.render_mode = "rgb_array"
        self.single_observation_space = observation_space(self.config)
        self.single_action_space = action_space()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.session = np.full(num_envs, -1)  # grows with every episode of any table
        self._generators = [seeding.np_random(None)[0] for _ in range(num_envs)]
        self.tables: Tables | None = None

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode on every table, or where ``options["reset_mask"]`` [N] is True.

        An int seed gives table i the seed + i. ``options["scenes"]`` holds a scene (or its dict) for each
        table; ``options["split"]`` one split for all.
        """
        options = dict(options or {})
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        seeds = _one_each(seeds, self.num_envs, "seed")
        scenes = _one_each(options.pop("scenes", None), self.num_envs, "scenes")
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, bool)))
        if mask.shape != (self.num_envs,) or mask.dtype != bool or (self.tables is None and not mask.all()):
            raise InputError(f"reset_mask must hold {self.num_envs} booleans, all True for the first reset, got {mask}")
        placed: dict[int, Scene] = {}
        for row in np.flatnonzero(mask).tolist():
            if seeds[row] is not None:
                self._generators[row] = seeding.np_random(int(seeds[row]))[0]
            row_options = options if scenes[row] is None else {**options, "scene": scenes[row]}
            placed[row] = self._draw(row, row_options)
        if self.tables is None:
            self.tables = Tables(list(placed.values()), self._generators, self.config)
            self.session = np.arange(self.num_envs)
        else:
            for row, scene in placed.items():
                self._place(row, scene)
        return self.observe(), self._infos()

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Execute one action [N, 4] on every table that is not finished."""
        actions = checked_actions(actions, (self.num_envs, NUM_ACTIONS))
        seen, rewards, terminated, truncated, infos = self.chunk_step(actions[:, None])
        return seen, rewards[:, 0], terminated, truncated, infos

    def chunk_step(
        self, actions: np.ndarray, *, draw: str = "last"
    ) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Execute chunks of K actions [N, K, 4]; a table that finishes stops there.

        Returns the last observation, rewards [N, K] (0 after the end), terminated [N], truncated [N] and
        infos, with ``num_ticks`` [N] executed. ``draw="none"`` leaves the pictures out of the observation
        (not out of final_obs); ``"all"`` adds ``infos["pixels"]``, camera to [N, K, h, w, 3]. A vector with
        ``has_films`` draws every executed tick: ``infos["films"]`` has for each table camera to [t, h, w, 3].
        """
        tables = self._placed()
        if draw not in DRAW:
            raise InputError(f"draw must be one of {', '.join(DRAW)}, got {draw!r}")
        num_ticks = np.shape(actions)[1] if np.ndim(actions) == 3 else 0
        if num_ticks < 1:
            raise InputError(f"an action chunk must have shape [N, K, 4] with K >= 1, got {np.shape(actions)}")
        actions = checked_actions(actions, (self.num_envs, num_ticks, NUM_ACTIONS))
        was_done = self.is_done
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            self._renew(np.flatnonzero(was_done))
        rewards, executed = np.zeros((self.num_envs, num_ticks)), np.zeros(self.num_envs, dtype=np.int64)
        drawn: list[dict[str, np.ndarray]] = []
        films: list[list[dict[str, np.ndarray]]] = [[] for _ in range(self.num_envs)]
        is_idle = was_done.copy()  # frozen, or reset just now
        for k in range(num_ticks):
            rows = np.flatnonzero(~is_idle & ~self.is_done)
            if rows.size:
                tables.run(actions[:, k], rows)
                rewards[rows, k] = tables.rewards()[rows]
                executed[rows] += 1
            for row in rows.tolist() if self.has_films else ():
                films[row].append(self._paint(row))
            if draw == "all":
                drawn.append(self._pixels())
        terminated, truncated = tables.is_terminated, tables.is_truncated
        infos = self._infos() | {"num_ticks": executed}
        if drawn:
            infos["pixels"] = {camera: np.stack([seen[camera] for seen in drawn], axis=1) for camera in drawn[0]}
        if self.has_films:
            infos["films"] = [self._film(frames) for frames in films]
        if self.autoreset_mode == AutoresetMode.SAME_STEP and self.is_done.any():
            done = self.is_done
            final = infos.copy()
            infos["final_obs"], infos["_final_obs"] = self._final_observations(done), done
            infos["final_info"] = final | {f"_{name}": done for name in final}
            infos["_final_info"] = done
            self._renew(np.flatnonzero(done))
            infos |= self._infos()
        return self.observe(with_pixels=draw != "none"), rewards, terminated, truncated, infos

    def observe(self, *, with_pixels: bool = True) -> dict[str, Any]:
        """Return the batched observation of this moment; changes nothing."""
        seen: dict[str, Any] = {"agent_pos": self._placed().agent_pos()}
        if self.config.cameras and with_pixels:
            seen["pixels"] = self._pixels()
        return seen

    def observation(self) -> Observation:
        """Return what a policy sees of this moment, as wamlab's other rooms know it."""
        return Observation(
            frames=self._pixels(),
            state=self._placed().agent_pos(),
            instructions=self.instructions,
            session=self.session.copy(),
        )

    @property
    def instructions(self) -> list[str]:
        """What each table is asked for; empty before the first reset."""
        return [scene.instruction for scene in self.tables.scenes] if self.tables else [""] * self.num_envs

    @property
    def scenes(self) -> list[Scene]:
        return list(self._placed().scenes)

    @property
    def is_done(self) -> np.ndarray:
        """Tables whose episode has ended or not begun, [N]."""
        if self.tables is None:
            return np.ones(self.num_envs, dtype=bool)
        return self.tables.is_terminated | self.tables.is_truncated

    @property
    def is_success(self) -> np.ndarray:
        """Tables whose episode has succeeded, [N]."""
        return np.zeros(self.num_envs, dtype=bool) if self.tables is None else self.tables.state.is_success.copy()

    def snapshot(self, row: int) -> dict[str, Any]:
        """Return all that one table's future depends on, as plain JSON values."""
        return self._placed().snapshot(row)

    def restore(self, row: int, snapshot: Mapping[str, Any]) -> None:
        """Continue one table from a snapshot of any table, bit for bit, as a new session."""
        tables = self._placed()
        tables.restore(row, snapshot)
        self._generators[row] = tables.generators[row]
        self.session[row] = self.session.max() + 1

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an attribute of every table under the name it has on a single environment."""
        scenes = self._placed().scenes
        values = {
            "task": [scene.family for scene in scenes],
            "task_description": self.instructions,
            "_max_episode_steps": [scene.max_ticks for scene in scenes],
            "render": self.render() if name == "render" else (),
        }
        if name not in values or args or kwargs:
            raise InputError(f"a tabletop vector can be asked for {', '.join(values)}, not for {name!r}")
        return tuple(values[name])

    get_attr = call

    def render(self) -> tuple[UInt8[np.ndarray, "h w 3"], ...]:
        """Draw every table from above; changes nothing."""
        return tuple(self._placed().paint(row, "top") for row in range(self.num_envs))

    def _draw(self, row: int, options: Mapping[str, Any] | None) -> Scene:
        return new_scene(self.families[row], self.splits[row], self._generators[row], options)

    def _place(self, row: int, scene: Scene) -> None:
        self._placed().place(row, scene, self._generators[row])
        self.session[row] = self.session.max() + 1

    def _renew(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self._place(row, self._draw(row, None))

    def _paint(self, row: int) -> dict[str, np.ndarray]:
        return {camera: self._placed().paint(row, camera) for camera in self.config.cameras}

    def _pixels(self) -> dict[str, np.ndarray]:
        seen = [self._paint(row) for row in range(self.num_envs)]
        return {camera: np.stack([frames[camera] for frames in seen]) for camera in self.config.cameras}

    def _film(self, frames: Sequence[Mapping[str, np.ndarray]]) -> dict[str, UInt8[np.ndarray, "t h w 3"]]:
        """Join a table's frames by camera; none where it has stood still."""
        empty = np.empty((0, *self.config.shape, 3), np.uint8)
        return {c: np.stack([seen[c] for seen in frames]) if frames else empty for c in self.config.cameras}

    def _final_observations(self, is_done: np.ndarray) -> np.ndarray:
        agent_pos = self._placed().agent_pos()
        finals = np.full(self.num_envs, None, dtype=object)
        for row in np.flatnonzero(is_done).tolist():
            finals[row] = {"agent_pos": agent_pos[row]}
            if self.config.cameras:
                finals[row]["pixels"] = self._paint(row)
        return finals

    def _infos(self) -> dict[str, Any]:
        return self._placed().measure()

    def _placed(self) -> Tables:
        if self.tables is None:
            raise InputError("the tabletops have no episodes yet; call reset() first")
        return self.tables


def _one_each(values: Any, number: int, name: str) -> list[Any]:
    """Return one value for each table: a single one repeated, or a sequence of the right length."""
    if values is None or isinstance(values, str):
        return [values] * number
    values = list(values)
    if len(values) != number:
        raise InputError(f"{name} must be one value or {number}, one for each table; got {len(values)}")
    return values
