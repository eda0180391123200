"""The tabletop in the layout of the DROID robot: seven joints and a gripper, for tests of policy protocols.

The planar arm is imaginary: three joints follow x, y and heading linearly, the others rest. What matters is
that states and actions have DROID's shapes and units and that the map to the tabletop can be inverted.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from jaxtyping import Float

from wamlab.errors import InputError
from wamlab.sim.tabletop import TabletopEnv

# Joint angles in rad with the gripper in the middle of the table and its heading away from the viewer.
REST_POSE = np.array([0.0, -0.6, 0.0, -2.2, 0.0, 1.6, 0.8])
_JOINTS = (0, 1, 6)  # that follow x, y and heading
_RAD_PER_TABLE = 1.2


def droid_state(agent_pos: Float[np.ndarray, "*batch 5"]) -> Float[np.ndarray, "*batch 8"]:
    """Return seven joint positions in rad and the gripper position (0 open, 1 closed)."""
    x, y, sin, cos, closing = np.moveaxis(np.asarray(agent_pos, dtype=np.float32), -1, 0)
    state = np.zeros((*x.shape, 8), dtype=np.float32)
    state[..., :7] = REST_POSE
    state[..., _JOINTS[0]] += _RAD_PER_TABLE * (x - 0.5)
    state[..., _JOINTS[1]] += _RAD_PER_TABLE * (y - 0.5)
    state[..., _JOINTS[2]] += np.arctan2(-cos, sin)  # 0 at a heading of pi / 2
    state[..., 7] = closing
    return state


def tabletop_action(action: Float[np.ndarray, "*batch 8"]) -> Float[np.ndarray, "*batch 4"]:
    """Turn joint velocities (-1..1 of full speed) and a gripper position (1 closed) into an action."""
    action = np.asarray(action, dtype=np.float32)
    if action.shape[-1:] != (8,):
        raise InputError(f"a DROID action has 8 numbers, seven joints and a gripper; got shape {list(action.shape)}")
    return np.stack([*(action[..., joint] for joint in _JOINTS), 2 * action[..., 7] - 1], axis=-1)


def droid_action(action: Float[np.ndarray, "*batch 4"]) -> Float[np.ndarray, "*batch 8"]:
    """Turn a tabletop action into joint velocities and a gripper position, as ``tabletop_action`` undoes."""
    action = np.asarray(action, dtype=np.float32)
    result = np.zeros((*action.shape[:-1], 8), dtype=np.float32)
    result[..., _JOINTS] = action[..., :3]
    result[..., 7] = (action[..., 3] + 1) / 2
    return result


class DroidView(gymnasium.Wrapper[dict[str, Any], np.ndarray, dict[str, Any], np.ndarray]):
    """Show a tabletop's state and take its actions as DROID's eight numbers."""

    def __init__(self, env: gymnasium.Env[dict[str, Any], np.ndarray]):
        super().__init__(env)
        if not isinstance(env.unwrapped, TabletopEnv):
            raise InputError(f"DroidView wraps a TabletopEnv, got {type(env.unwrapped).__name__}")
        inner = env.observation_space
        assert isinstance(inner, spaces.Dict)
        state = spaces.Box(-np.pi, np.pi, (8,), np.float32)
        self.observation_space = spaces.Dict({**inner.spaces, "agent_pos": state})
        low = np.array([-1.0] * 7 + [0.0], np.float32)
        self.action_space = spaces.Box(low, np.ones(8, np.float32), dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._seen(observation), info

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        observation, *rest = self.env.step(tabletop_action(action))
        return (self._seen(observation), *rest)  # pyright: ignore[reportReturnType]

    def _seen(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {**observation, "agent_pos": droid_state(observation["agent_pos"])}
