"""A world model as an environment: what the robot would see next is predicted, not simulated.

The world model itself comes as a few callables, so that this room knows no network. Episodes begin at keyframes, real
recorded moments; from there on everything seen is imagined. A chunk of actions is one step of the world. Siblings that
start alike meet the same chances: the world's noise is counted by the episode's seed and its ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, UInt8

from wamlab.errors import InputError
from wamlab.sim.physics import CLOSING_RATE, EDGE, MAX_SPEED, MAX_TURN_RAD


@dataclass(frozen=True)
class Keyframe:
    """A recorded moment that imagined episodes begin at."""

    frames: Mapping[str, UInt8[np.ndarray, "h w 3"]]  # camera -> what it showed
    state: Float[np.ndarray, " k"]  # robot units
    instruction: str
    goal: Mapping[str, UInt8[np.ndarray, "h w 3"]] | None = None  # what the cameras showed as the task was done


@dataclass(frozen=True)
class Imagined:
    """What one chunk of actions led to, a row an episode."""

    minds: Sequence[Any]  # what each episode goes on from
    state: Float[np.ndarray, "b k"]
    score: Float[np.ndarray, " b"]  # 0 to 1: how much it looks as if the task were done


@runtime_checkable
class World(Protocol):
    """A world model as an environment asks it; a mind is one episode's past."""

    def begin(self, starts: Sequence[Keyframe], /) -> Sequence[Any]: ...

    def step(
        self, minds: Sequence[Any], states: np.ndarray, actions: np.ndarray, keys: Sequence[tuple[int, int]], /
    ) -> Imagined: ...

    def look(self, mind: Any, /) -> Mapping[str, UInt8[np.ndarray, "h w 3"]]: ...

    def pack(self, mind: Any, /) -> Any: ...  # as plain JSON, bit for bit

    def unpack(self, packed: Any, start: Keyframe, /) -> Any: ...


class ImaginedVector:
    """Episodes in a world model, as an ``Env``: all that are not done step in one call of the network."""

    def __init__(
        self,
        num_envs: int,
        world: World,
        start: Callable[[int], Keyframe],
        *,
        max_ticks: int = 40,
        threshold: float = 0.5,
    ) -> None:
        """Begin at ``start(seed)``; an episode succeeds at a score of ``threshold`` and is cut at ``max_ticks``."""
        if num_envs < 1 or max_ticks < 1 or not 0 < threshold <= 1:
            raise InputError(
                f"imagined episodes need places, ticks and a threshold above 0 up to 1, "
                f"got {num_envs}, {max_ticks} and {threshold}"
            )
        self.num_envs, self.shared, self.start = num_envs, world, start
        self.max_ticks, self.threshold = max_ticks, threshold
        self._seeds: list[int] = []
        self._starts: list[Keyframe] = []
        self._minds: list[Any] = []
        self._state = np.zeros((num_envs, 0), np.float32)
        self._tick, self._score = np.zeros(num_envs, int), np.zeros(num_envs)

    @property
    def instructions(self) -> list[str]:
        """What each episode is asked for; empty before the first reset."""
        return [start.instruction for start in self._starts] or [""] * self.num_envs

    @property
    def is_success(self) -> Bool[np.ndarray, " b"]:
        """Episodes that looked done after their newest chunk."""
        return (self._score >= self.threshold) & (self._tick > 0)

    @property
    def is_done(self) -> Bool[np.ndarray, " b"]:
        """Episodes that have ended or not begun."""
        if not self._minds:
            return np.ones(self.num_envs, bool)
        return self.is_success | (self._tick >= self.max_ticks)

    def reset(self, *, seed: Any = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Begin episodes at the keyframes of their seeds: one a place, or the first one's, which the others follow."""
        first: Any = 0 if seed is None else seed
        seeds = [int(first) + row for row in range(self.num_envs)] if isinstance(first, int | np.integer) else [*first]
        if len(seeds) != self.num_envs or any(number is None or int(number) < 0 for number in seeds):
            raise InputError(f"seeds must be {self.num_envs} numbers from 0 on, one for each episode; got {seeds}")
        self._seeds = [int(number) for number in seeds]
        self._starts = [self.start(number) for number in self._seeds]
        self._minds = list(self.shared.begin(self._starts))
        self._state = np.stack([start.state for start in self._starts]).astype(np.float32)
        self._tick, self._score = np.zeros(self.num_envs, int), np.zeros(self.num_envs)
        return self.observe(), {}

    def chunk_step(self, actions: Float[np.ndarray, "b a j"], /) -> tuple[Any, ...]:
        """Imagine what chunks of actions lead to; as ``TabletopVector.chunk_step``, with the score as reward."""
        return self.chunk_steps([self], [actions])[0]

    @staticmethod
    def chunk_steps(envs: Sequence[ImaginedVector], actions: Sequence[np.ndarray]) -> list[tuple[Any, ...]]:
        """Step several environments of one world in one call of it."""
        places = [(env, row) for env in envs for row in np.flatnonzero(~env.is_done).tolist()]
        rows = [
            _checked(chunk, env.num_envs)[row]
            for env, chunk in zip(envs, actions, strict=True)
            for row in np.flatnonzero(~env.is_done).tolist()
        ]
        num_ticks = [np.zeros(env.num_envs, int) for env in envs]
        if places:
            found = envs[0].shared.step(
                [env._minds[row] for env, row in places],
                np.stack([env._state[row] for env, row in places]),
                np.stack(rows),
                [(env._seeds[row], int(env._tick[row])) for env, row in places],
            )
            for number, (env, row) in enumerate(places):
                env._minds[row], env._state[row] = found.minds[number], found.state[number]
                env._score[row] = found.score[number]
                env._tick[row] += rows[number].shape[0]
                num_ticks[envs.index(env)][row] = rows[number].shape[0]
        return [
            env._result(chunk.shape[1], executed) for env, chunk, executed in zip(envs, actions, num_ticks, strict=True)
        ]

    def observe(self) -> Mapping[str, Any]:
        """Return what is seen now."""
        if not self._minds:
            raise InputError("the imagined episodes have not begun; call reset() first")
        views = [self.shared.look(mind) for mind in self._minds]
        return {
            "agent_pos": self._state.copy(),
            "pixels": {camera: np.stack([view[camera] for view in views]) for camera in views[0]},
        }

    def snapshot(self, row: int, /) -> Any:
        """Return all that an episode's future depends on, as plain JSON values."""
        return {
            "seed": self._seeds[row],
            "tick": int(self._tick[row]),
            "score": float(self._score[row]),
            "state": self._state[row].tolist(),
            "mind": self.shared.pack(self._minds[row]),
        }

    def restore(self, row: int, snapshot: Any, /) -> None:
        """Go on from a snapshot of any place of the same world, bit for bit."""
        if missing := {"seed", "tick", "score", "state", "mind"} - set(snapshot):
            raise InputError(f"the snapshot lacks {', '.join(sorted(missing))}: it was not taken from imagination")
        start = self.start(snapshot["seed"])
        if not self._minds:
            raise InputError("the imagined episodes have not begun; call reset() first")
        self._seeds[row], self._starts[row] = snapshot["seed"], start
        self._minds[row] = self.shared.unpack(snapshot["mind"], start)
        self._tick[row], self._score[row] = snapshot["tick"], snapshot["score"]
        self._state[row] = np.asarray(snapshot["state"], np.float32)

    def _result(self, num_columns: int, executed: np.ndarray) -> tuple[Any, ...]:
        rewards = np.where(np.arange(num_columns) < executed[:, None], self._score[:, None], 0.0)
        infos = {"num_ticks": executed, "is_success": self.is_success, "progress": self._score.copy()}
        return self.observe(), rewards, self.is_success, self.is_done & ~self.is_success, infos


def moved_pose(state: Float[np.ndarray, "b 5"], actions: Float[np.ndarray, "b a 4"]) -> Float[np.ndarray, "b 5"]:
    """Integrate a tabletop gripper's pose over a chunk of actions, as if it touched nothing.

    Exact but for a gripper that holds something, which closes less, and for noise in what is executed.
    """
    xy, heading, closing = state[:, :2].astype(np.float64), np.arctan2(state[:, 2], state[:, 3]), state[:, 4]
    heading, closing = heading.astype(np.float64), closing.astype(np.float64)
    for motion in np.clip(actions, -1, 1).swapaxes(0, 1):
        xy = np.clip(xy + MAX_SPEED * motion[:, :2], EDGE, 1 - EDGE)
        heading = heading + MAX_TURN_RAD * motion[:, 2]
        closing = np.clip((motion[:, 3] + 1) / 2, closing - CLOSING_RATE, closing + CLOSING_RATE)
    return np.stack([*xy.T, np.sin(heading), np.cos(heading), closing], axis=-1).astype(np.float32)


def _checked(actions: Any, num_envs: int) -> np.ndarray:
    actions = np.asarray(actions, np.float64)
    if actions.ndim != 3 or len(actions) != num_envs or not actions.shape[1]:
        raise InputError(f"an action chunk must have shape [{num_envs}, K, j] with K >= 1, got {list(actions.shape)}")
    if not np.isfinite(actions).all():
        raise InputError("actions hold a NaN or an infinity; check the policy's output")
    return actions
