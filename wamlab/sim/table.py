"""Tables with all that is on them: scenes, physics, goals, random numbers, cameras; the core of both envs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, UInt8

from wamlab.errors import InputError
from wamlab.sim.goals import judge, progress_of, stage_of
from wamlab.sim.physics import MAX_SPEED, MAX_TURN_RAD, advance, lay_out, wrapped
from wamlab.sim.render import CAMERAS, Moment, Painter
from wamlab.sim.scene import Scene

NUM_ACTIONS = 4  # dx, dy, dtheta, gripper (-1 open, 1 closed)
FPS = 10.0  # control ticks per second


@dataclass(frozen=True)
class TableConfig:
    """How a table is driven and seen; the same for every table of a batch."""

    size: int | tuple[int, int] = 96  # height and width in px
    cameras: tuple[str, ...] = ("top", "wrist")  # () leaves pixels out
    control: str = "delta"  # or "absolute": actions are a pose to go to
    action_noise: float = 0.0  # standard deviation added to dx, dy, dtheta before they are executed
    latency_ticks: int = 0  # an action is executed this many ticks after it was sent
    reward: str = "sparse"  # or "dense": progress at every tick
    supersample: int = 2  # pictures are drawn this much larger and reduced; 1 is faster and jagged

    def __post_init__(self) -> None:
        if min(self.shape) < 16 or max(self.shape) > 2048:
            raise InputError(f"camera size must be 16 to 2048 px, got {self.size}")
        if self.supersample not in (1, 2, 3, 4):
            raise InputError(f"supersample must be 1 to 4, got {self.supersample}")
        if unknown := set(self.cameras) - set(CAMERAS):
            raise InputError(f"there is no camera {sorted(unknown)}; choose from {', '.join(CAMERAS)}")
        if self.control not in ("delta", "absolute"):
            raise InputError(f"control must be 'delta' or 'absolute', got {self.control!r}")
        if self.reward not in ("sparse", "dense"):
            raise InputError(f"reward must be 'sparse' or 'dense', got {self.reward!r}")
        if self.action_noise < 0 or self.latency_ticks < 0:
            raise InputError(f"action_noise and latency_ticks must not be negative in {self}")

    @property
    def shape(self) -> tuple[int, int]:
        return (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)  # pyright: ignore


class Tables:
    """N independent tables; each a pure function of its scene, its generator and its actions."""

    def __init__(self, scenes: Sequence[Scene], generators: Sequence[np.random.Generator], config: TableConfig):
        self.config = config
        self.scenes = list(scenes)
        self.generators = list(generators)
        self.layout, self.state = lay_out(scenes)
        self.waiting = np.zeros((len(scenes), config.latency_ticks, NUM_ACTIONS))  # sent, not yet executed
        for row in range(len(scenes)):
            self.waiting[row] = self._hold_action(row)
        self.painters = [Painter(config.shape, config.supersample) for _ in scenes]

    def __len__(self) -> int:
        return len(self.scenes)

    def place(self, row: int, scene: Scene, generator: np.random.Generator) -> None:
        """Start an episode on one table."""
        layout, state = lay_out([scene])
        self.layout.put([row], layout)
        self.state.put([row], state)
        self.scenes[row], self.generators[row] = scene, generator
        self.waiting[row] = self._hold_action(row)

    def run(self, actions: Float[np.ndarray, "n 4"], rows: np.ndarray | None = None) -> None:
        """Execute one action on each table, or on some only; the others stay frozen and cost nothing."""
        if rows is None or len(rows) == len(self):
            self._run(self.state, self.layout, actions, np.arange(len(self)))
        elif len(rows):
            state, layout = self.state.take(rows), self.layout.take(rows)
            self._run(state, layout, actions[rows], rows)
            self.state.put(rows, state)

    def _run(self, state: Any, layout: Any, actions: np.ndarray, rows: np.ndarray) -> None:
        actions = np.asarray(actions, dtype=np.float64)
        if self.config.latency_ticks:
            queue = np.concatenate([self.waiting[rows], actions[:, None]], axis=1)
            actions, self.waiting[rows] = queue[:, 0], queue[:, 1:]
        motion = np.clip(actions, -1, 1)
        if self.config.control == "absolute":
            motion = _towards(state.gripper, motion)
        if self.config.action_noise:
            noise = np.stack([self.generators[row].normal(size=3) for row in rows])
            motion[:, :3] = np.clip(motion[:, :3] + self.config.action_noise * noise, -1, 1)
        advance(state, layout, motion)
        judge(state, layout)

    def _hold_action(self, row: int) -> np.ndarray:
        x, y, heading, closing = self.state.gripper[row]
        if self.config.control == "absolute":
            return np.array([2 * x - 1, 2 * y - 1, heading / np.pi, 2 * closing - 1])
        return np.array([0.0, 0.0, 0.0, 2 * closing - 1])

    @property
    def is_terminated(self) -> np.ndarray:
        """Episodes decided: succeeded, or a reach that came to rest over a wrong object."""
        return self.state.is_success | self.state.is_failure

    @property
    def is_truncated(self) -> np.ndarray:
        """Episodes out of time and not decided."""
        return (self.state.tick >= self.layout.max_ticks) & ~self.is_terminated

    def rewards(self) -> np.ndarray:
        """Return 1.0 where the episode has succeeded, or progress if the reward is dense."""
        if self.config.reward == "dense":
            return progress_of(self.state, self.layout)
        return self.state.is_success.astype(np.float64)

    def agent_pos(self) -> Float32[np.ndarray, "n 5"]:
        """Return x, y, sine and cosine of the heading, and closing of every gripper."""
        x, y, heading, closing = self.state.gripper.T
        return np.stack([x, y, np.sin(heading), np.cos(heading), closing], axis=-1).astype(np.float32)

    def measure(self) -> dict[str, np.ndarray]:
        """Return is_success, is_failure, progress, stage and reached of every table."""
        return {
            "is_success": self.state.is_success.copy(),
            "is_failure": self.state.is_failure.copy(),
            "progress": progress_of(self.state, self.layout),
            "stage": stage_of(self.state, self.layout),
            "reached": self.state.reached.copy(),
        }

    def paint(self, row: int, camera: str, size: tuple[int, int] | None = None) -> UInt8[np.ndarray, "h w 3"]:
        """Draw what a camera sees; changes nothing."""
        painter = self.painters[row] if size is None else Painter(size)
        return painter.paint(camera, self.scenes[row], self.moment(row))

    def moment(self, row: int) -> Moment:
        state, num_objects = self.state, len(self.scenes[row].objects)
        below, levels = state.below[row].tolist(), []
        for under in below[:num_objects]:
            levels.append(0)
            while under >= 0:
                levels[-1] += 1
                under = below[under]
        return Moment(
            tuple(state.gripper[row].tolist()),
            tuple(map(tuple, state.objects[row, :num_objects].tolist())),
            int(state.held[row]),
            tuple(levels),
        )

    def snapshot(self, row: int) -> dict[str, Any]:
        """Return all that one table's future depends on, as plain JSON values."""
        return {
            "scene": self.scenes[row].to_dict(),
            "state": self.state.to_lists(row),
            "waiting": self.waiting[row].tolist(),
            "generator": self.generators[row].bit_generator.state,
        }

    def restore(self, row: int, snapshot: Mapping[str, Any]) -> None:
        """Continue one table from a snapshot, bit for bit; raise InputError where it does not fit."""
        missing = {"scene", "state", "waiting", "generator"} - set(snapshot)
        if missing or len(snapshot["waiting"]) != self.config.latency_ticks:
            raise InputError(
                "the snapshot was not taken from a tabletop with this latency; restore it where it was taken"
            )
        generator = np.random.Generator(np.random.PCG64())
        generator.bit_generator.state = snapshot["generator"]
        self.place(row, Scene.from_dict(snapshot["scene"]), generator)
        self.state.set_lists(row, snapshot["state"])
        self.waiting[row] = np.asarray(snapshot["waiting"]).reshape(self.waiting[row].shape)


def _towards(gripper: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Turn an absolute action (x, y over the table, heading over a full turn) into a motion."""
    motion = action.copy()
    motion[:, :2] = ((action[:, :2] + 1) / 2 - gripper[:, :2]) / MAX_SPEED
    motion[:, 2] = wrapped(action[:, 2] * np.pi - gripper[:, 2]) / MAX_TURN_RAD
    return np.clip(motion, -1, 1)


def checked_actions(actions: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return actions as an array; raise InputError unless their shape fits and they are finite."""
    actions = np.asarray(actions)
    if actions.shape != shape or actions.dtype.kind not in "fiu":
        raise InputError(f"actions must be numbers of shape {list(shape)}, got {actions.dtype} {list(actions.shape)}")
    if not np.isfinite(actions).all():
        raise InputError("actions hold a NaN or an infinity; check the policy's output")
    return actions
