"""What clients ask and what they are answered, dialect by dialect; a request becomes the nouns of ``wamlab.types``.

Every dialect: the server speaks first, one binary msgpack map of metadata; then each request has one answer, an error
being a text frame. A request with an "endpoint" is RoboArena's (also DreamZero's, and that of MolmoSpaces' DreamZero
client); one with a "task" and no "prompt" is MolmoSpaces' raw observation; any other is openpi's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, UInt8

from wamlab.errors import InputError
from wamlab.serve.arrays import Encoding, decode, encode

Dialect = Literal["openpi", "roboarena", "molmospaces"]
ACTION_SPACES = ("joint_position", "joint_velocity", "cartesian_position", "cartesian_velocity")
REPLIES = ("dict", "array")
RESET_DONE = "reset successful"  # what RoboArena's client waits for, as a text frame
MAX_SIDE_PX = 4096
MAX_FILM = 256  # frames
ROBOARENA_CAMERAS = {  # their exterior cameras count from 0, DROID's recordings from 1
    "exterior_image_0_left": "exterior_image_1_left",
    "exterior_image_1_left": "exterior_image_2_left",
    "exterior_image_0_right": "exterior_image_1_right",
    "exterior_image_1_right": "exterior_image_2_right",
}
MOLMOSPACES_CAMERAS = {
    "exterior_image_1_left": ("droid_shoulder_light_randomization", "exo_camera_1"),
    "exterior_image_2_left": ("exo_camera_2", "droid_shoulder_light_randomization", "exo_camera_1"),
    "wrist_image_left": ("wrist_camera_zed_mini", "wrist_camera"),
}


@dataclass(frozen=True)
class Contract:
    """What the served policy reads and writes."""

    cameras: tuple[str, ...]  # short names, e.g. "exterior_image_1_left"
    num_states: int  # numbers of the state vector
    num_actions: int  # numbers of one action
    view_px: tuple[int, int] | None = None  # height and width that views are resized to
    action_space: str = "joint_position"
    film_frames: int = 1  # of what a session saw since its last request that go on with its episode; 1: it has none

    def __post_init__(self) -> None:
        if self.action_space not in ACTION_SPACES:
            raise InputError(f"action_space is {self.action_space!r}: give one of {', '.join(ACTION_SPACES)}")

    def metadata(self) -> dict[str, Any]:
        """Return the handshake: the six keys of RoboArena's configuration and no other, which its client refuses."""
        return {
            "image_resolution": self.view_px,
            "needs_wrist_camera": any("wrist" in camera for camera in self.cameras),
            "n_external_cameras": min(2, sum("wrist" not in camera for camera in self.cameras)),
            "needs_stereo_camera": any(camera.endswith("_right") for camera in self.cameras),
            "needs_session_id": True,
            "action_space": self.action_space,
        }


@dataclass(frozen=True)
class Request:
    """One message, understood."""

    dialect: Dialect
    encoding: Encoding
    session_id: str | None  # None: the connection is the session
    is_reset: bool
    film: Mapping[str, UInt8[np.ndarray, "_ _ _ 3"]]  # camera -> frames since the last request, the newest last
    state: Float[np.ndarray, " k"]
    instruction: str

    @property
    def frames(self) -> Mapping[str, UInt8[np.ndarray, "_ _ 3"]]:
        """Return the newest frame of each camera."""
        return {camera: frames[-1] for camera, frames in self.film.items()}


def read_request(message: bytes | str, contract: Contract) -> Request:
    """Understand a message; raises InputError with one sentence for the client."""
    if isinstance(message, str):
        raise InputError("requests are binary msgpack frames, got a text frame")
    value, encoding = decode(message)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError("a request is a map with text keys")
    dialect: Dialect = "openpi"
    if "endpoint" in value:
        dialect = "roboarena"
    elif "task" in value and "prompt" not in value:
        dialect = "molmospaces"
    session_id = value.get("session_id")
    if session_id is not None and (not isinstance(session_id, str) or not 0 < len(session_id) <= 256):
        raise InputError("session_id must be a text of 1 to 256 characters")
    endpoint = value.get("endpoint", "infer")
    if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
        raise InputError(f"endpoint must be infer or reset, not {str(endpoint)[:40]!r}")
    if endpoint == "reset":
        return Request(dialect, encoding, session_id, True, {}, np.zeros(0, np.float32), "")
    instruction = value.get("task" if dialect == "molmospaces" else "prompt")
    if not isinstance(instruction, str):
        raise InputError(f"{'task' if dialect == 'molmospaces' else 'prompt'} must be a text")
    flat = _flattened(value)
    film = {camera: _film_of(camera, flat, dialect) for camera in contract.cameras}
    if len({len(frames) for frames in film.values()}) > 1:
        counts = ", ".join(f"{camera} {len(frames)}" for camera, frames in film.items())
        raise InputError(f"all cameras must send as many frames: {counts}")
    return Request(dialect, encoding, session_id, False, film, _state_of(flat, contract), instruction)


def write_reply(
    request: Request, actions: Float[np.ndarray, "a j"], timing_ms: Mapping[str, float], *, reply: str = "dict"
) -> bytes:
    """Answer with actions as the dialect has them: a map, a bare array (``reply``), or MolmoSpaces' one action."""
    actions = np.ascontiguousarray(actions, np.float32)
    value: Any = {"actions": actions}
    if request.dialect == "openpi":
        value["server_timing"] = dict(timing_ms)
    elif request.dialect == "molmospaces":
        value = {"arm": actions[0, :-1], "gripper": actions[0, -1:], "server_timing": dict(timing_ms)}
    elif reply == "array":
        value = actions
    return encode(value, request.encoding)


def _flattened(value: Mapping[str, Any]) -> dict[str, Any]:
    """Join the keys of maps in the map by slashes, one level deep: "images/cam_high", "qpos/arm"."""
    flat: dict[str, Any] = {}
    for key, part in value.items():
        if isinstance(part, dict):
            flat |= {f"{key}/{name}": item for name, item in part.items()}
        else:
            flat[key] = part
    return flat


def _film_of(camera: str, flat: Mapping[str, Any], dialect: Dialect) -> UInt8[np.ndarray, "t h w 3"]:
    """Find a camera's newest frame, [h w 3] or [3 h w], or a stack [t h w 3] that ends with it; RGB."""
    names: tuple[str, ...] = (camera,)
    if dialect == "roboarena":
        wire = {theirs for theirs, ours in ROBOARENA_CAMERAS.items() if ours == camera}
        names = tuple(wire) if wire else names
    elif dialect == "molmospaces":
        names = (*names, *MOLMOSPACES_CAMERAS.get(camera, ()))
    keys = [f"{place}{name}" for name in names for place in ("observation/", "observation/images/", "images/", "")]
    frame = next((flat[key] for key in keys if key in flat), None)
    if frame is None:
        raise InputError(f"the request has no frame of camera {camera!r}: send it as {keys[0]!r}")
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8:
        raise InputError(f"the frame of camera {camera!r} must be an array of uint8")
    if frame.ndim == 3 and frame.shape[0] == 3 and frame.shape[2] != 3:
        frame = frame.transpose(1, 2, 0)
    film = frame if frame.ndim == 4 else frame[None]
    if film.ndim != 4 or film.shape[3] != 3 or not all(1 <= side <= MAX_SIDE_PX for side in film.shape[1:3]):
        raise InputError(f"the frame of camera {camera!r} has shape {frame.shape}, not [h w 3] up to {MAX_SIDE_PX} px")
    if not 1 <= len(film) <= MAX_FILM:
        raise InputError(f"camera {camera!r} sent {len(film)} frames: send 1 to {MAX_FILM}")
    return film


def _state_of(flat: Mapping[str, Any], contract: Contract) -> Float[np.ndarray, " k"]:
    """Return the state vector: sent whole, or as arm and gripper."""
    if not contract.num_states:
        return np.zeros(0, np.float32)
    arm = "observation/cartesian_position" if contract.action_space[0] == "c" else "observation/joint_position"
    choices = (("observation/state",), ("state",), (arm, "observation/gripper_position"), ("qpos/arm", "qpos/gripper"))
    keys = next((keys for keys in choices if all(key in flat for key in keys)), None)
    if keys is None:
        raise InputError(f"the request has no state: send observation/state, or {arm} and observation/gripper_position")
    parts = []
    for key in keys:
        try:
            part = np.asarray(flat[key], np.float32).reshape(-1)
        except (TypeError, ValueError):
            raise InputError(f"{key} must hold numbers") from None
        parts.append(part[:1] if key == "qpos/gripper" else part)  # two fingers of one width
    state = np.concatenate(parts)
    if len(state) != contract.num_states:
        raise InputError(f"{' and '.join(keys)} have {len(state)} numbers, the policy reads {contract.num_states}")
    if not np.isfinite(state).all():
        raise InputError(f"{' and '.join(keys)} must hold finite numbers")
    return state
