"""Public simulators behind wamlab's ``Env``: PushT, MetaWorld and LIBERO, each from an extra of its own.

Their pins conflict (MetaWorld 3.1.1 wants mujoco 3.3.0), so each may need an environment of its own. Frames are drawn
without a screen: set ``MUJOCO_GL=egl`` (or ``osmesa``) for the two that run on MuJoCo.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from xml.etree import ElementTree  # nosec B405  # of files that come with installed packages

import numpy as np
from jaxtyping import Float32, Float64, UInt8

from wamlab.errors import InputError

INSTALL = {
    "pusht": "pip install 'wamlab[pusht]'",
    "metaworld": "pip install 'wamlab[metaworld]'",
    "libero": "pip install 'wamlab[libero]'",
}
LIBERO_TICKS = {  # of an episode, as published evaluations allow (OpenVLA, openpi)
    "libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400,
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What one environment shows at a moment."""

    frames: Mapping[str, UInt8[np.ndarray, "h w 3"]]
    state: Float32[np.ndarray, " k"]


@runtime_checkable
class Place(Protocol):
    """One environment of a simulator: a task with a time limit."""

    instruction: str
    max_ticks: int

    def reset(self, seed: int) -> Seen: ...

    def step(self, action: np.ndarray) -> tuple[Seen, bool]:
        """Execute one action; return what is seen then and whether the task is done."""
        ...

    def close(self) -> None: ...


class AdaptedVector:
    """Environments of one simulator that play chunks; one that has ended is stepped and drawn no more.

    With ``has_films`` the infos of a chunk also have "films": for each place camera to [t h w 3], a frame a tick that
    it executed. ``num_actions`` is how many numbers an action has, if that is known.
    """

    def __init__(
        self,
        places: Sequence[Place],
        *,
        has_films: bool = False,
        num_actions: int | None = None,
        control_hz: float | int = 10.0,
    ) -> None:
        if not places:
            raise InputError("a vector needs at least one environment")
        self.places, self.num_envs = list(places), len(places)
        self.has_films, self.num_actions, self.control_hz = has_films, num_actions, control_hz
        self.is_success, self.is_done = np.zeros((2, self.num_envs), dtype=bool)
        self.is_done[:] = True  # no episode has begun
        self._num_ticks = np.zeros(self.num_envs, dtype=int)
        self._seen: list[Seen] = []

    @property
    def instructions(self) -> list[str]:
        return [place.instruction for place in self.places]

    def reset(self, *, seed: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode everywhere, with a seed each: from an int on, or a list of them."""
        seeds = range(seed or 0, (seed or 0) + self.num_envs) if isinstance(seed, int | None) else list(seed)
        if len(seeds) != self.num_envs:
            raise InputError(f"{self.num_envs} environments need as many seeds, got {len(seeds)}")
        self._seen = [place.reset(int(number)) for place, number in zip(self.places, seeds, strict=True)]
        self.is_success, self.is_done = np.zeros((2, self.num_envs), dtype=bool)
        self._num_ticks[:] = 0
        return self._observation(), {}

    def chunk_step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """Execute chunks [b a j]; return observation, success [b], done [b] and infos with "num_ticks" [b].

        Raises InputError before the first reset and for chunks of another shape.
        """
        if not self._seen:
            raise InputError("the environments have no episodes yet; call reset() first")
        if np.ndim(actions) != 3 or len(actions) != self.num_envs:
            raise InputError(f"{self.num_envs} chunks of actions [b a j] are needed, got shape {np.shape(actions)}")
        executed = np.zeros(self.num_envs, dtype=int)
        films: list[list[Seen]] = [[] for _ in self.places]
        for row in np.flatnonzero(~self.is_done).tolist():
            place = self.places[row]
            for action in actions[row]:
                self._seen[row], self.is_success[row] = place.step(np.asarray(action, np.float32))
                executed[row] += 1
                if self.has_films:
                    films[row].append(self._seen[row])
                self._num_ticks[row] += 1
                self.is_done[row] = self.is_success[row] or self._num_ticks[row] >= place.max_ticks
                if self.is_done[row]:
                    break
        infos: dict[str, Any] = {"num_ticks": executed, "is_success": self.is_success.copy()}
        if self.has_films:
            infos["films"] = [self._film(seen) for seen in films]
        return self._observation(), self.is_success.copy(), self.is_done.copy(), infos

    def close(self) -> None:
        """Free renderers now: at the interpreter's end they complain."""
        for place in self.places:
            place.close()

    def _film(self, shown: Sequence[Seen]) -> dict[str, UInt8[np.ndarray, "t h w 3"]]:
        """Join what a place has shown by camera; nothing where it has stood still."""
        first = self._seen[0].frames
        return {c: np.stack([seen.frames[c] for seen in shown]) if shown else first[c][None][:0] for c in first}

    def _observation(self) -> dict[str, Any]:
        cameras = self._seen[0].frames
        return {
            "pixels": {camera: np.stack([seen.frames[camera] for seen in self._seen]) for camera in cameras},
            "agent_pos": np.stack([seen.state for seen in self._seen]),
        }


class PushT:
    """gym-pusht: push a T onto its outline, with the absolute target in px (0..512) as action, 10 ticks a second."""

    instruction, max_ticks = "push the T-shaped block onto the T-shaped target", 300
    num_actions, control_hz = 2, 10.0

    def __init__(self, task: str = "", size: int = 96) -> None:
        if task:
            raise InputError(f"PushT has one task, so there is no {task!r}")
        _import("pusht", "gym_pusht")
        gymnasium = _import("pusht", "gymnasium")
        self.env = gymnasium.make(
            "gym_pusht/PushT-v0", obs_type="pixels_agent_pos", observation_width=size, observation_height=size
        )

    def reset(self, seed: int) -> Seen:
        return self._seen(self.env.reset(seed=seed)[0])

    def step(self, action: np.ndarray) -> tuple[Seen, bool]:
        seen, _, _, _, info = self.env.step(np.clip(action[:2], 0, 512))
        return self._seen(seen), bool(info["is_success"])

    def close(self) -> None:
        self.env.close()

    def _seen(self, seen: Mapping[str, Any]) -> Seen:
        return Seen({"top": np.asarray(seen["pixels"], np.uint8)}, np.asarray(seen["agent_pos"], np.float32))


class MetaWorld:
    """MetaWorld 3: one of 50 tasks of a Sawyer arm, with hand motion and grip in -1..1 as actions."""

    max_ticks, num_actions, control_hz = 500, 4, 80.0
    camera = "corner2"  # drawn upside down by the simulator

    def __init__(self, task: str = "reach-v3", size: int = 96) -> None:
        _import("metaworld", "metaworld")
        gymnasium = _import("metaworld", "gymnasium")
        try:
            self.env = gymnasium.make(
                "Meta-World/MT1", env_name=task, render_mode="rgb_array", camera_name=self.camera, width=size,
                height=size, disable_env_checker=True, seed=0,  # the seed fixes the list of 50 goals
            )  # fmt: skip
        except KeyError:
            raise InputError(f"MetaWorld has no task {task!r}: give one such as reach-v3 or drawer-open-v3") from None
        without_shadows(self.env.unwrapped.model)
        self.instruction = task.rsplit("-v", 1)[0].replace("-", " ")

    def reset(self, seed: int) -> Seen:
        self.env.unwrapped.np_random = np.random.default_rng(seed)  # its reset draws the goal before it seeds
        return self._seen(self.env.reset(seed=seed)[0])

    def step(self, action: np.ndarray) -> tuple[Seen, bool]:
        seen, _, _, _, info = self.env.step(np.clip(action[:4], -1, 1))
        return self._seen(seen), bool(info["success"])

    def close(self) -> None:
        self.env.close()

    def _seen(self, seen: np.ndarray) -> Seen:
        frame = np.ascontiguousarray(np.asarray(self.env.render(), np.uint8)[::-1, ::-1])
        return Seen({self.camera: frame}, seen[:4].astype(np.float32))  # hand x, y, z and how far it is open


class Libero:
    """LIBERO: a task "suite/number", such as "libero_spatial/0"; seven actions in -1..1, two cameras, 20 Hz.

    It shows what the published datasets of it do (robot file ``libero``): both views turned by half, and as state the
    hand's place, its rotation as axis times angle and two fingers.
    """

    num_actions, control_hz = 7, 20.0
    idle, num_settling = np.array([0, 0, 0, 0, 0, 0, -1], np.float32), 10  # ticks in which objects fall onto the table

    def __init__(self, task: str = "libero_spatial/0", size: int = 96) -> None:
        benchmark = _import("libero", "libero.libero.benchmark")
        envs = _import("libero", "libero.libero.envs")
        suite, _, number = task.partition("/")
        suites = benchmark.get_benchmark_dict()
        if suite not in suites or not number.isdigit():
            raise InputError(f"LIBERO has no task {task!r}: give SUITE/NUMBER with one of {', '.join(sorted(suites))}")
        tasks = suites[suite]()
        if int(number) >= tasks.n_tasks:
            raise InputError(f"{suite} has tasks 0 to {tasks.n_tasks - 1}, not {number}")
        self.max_ticks = LIBERO_TICKS.get(suite, 300)
        self.instruction = tasks.get_task(int(number)).language
        self.starts = tasks.get_task_init_states(int(number))
        self.env = envs.OffScreenRenderEnv(
            bddl_file_name=tasks.get_task_bddl_file_path(int(number)), camera_heights=size, camera_widths=size
        )
        self.env.env.set_xml_processor(xml_without_shadows)  # every reset compiles the scene anew

    def reset(self, seed: int) -> Seen:
        self.env.seed(seed)
        self.env.reset()
        seen = self.env.set_init_state(self.starts[seed % len(self.starts)])
        for _ in range(self.num_settling):
            seen, *_ = self.env.step(self.idle)
        return self._seen(seen)

    def step(self, action: np.ndarray) -> tuple[Seen, bool]:
        seen, *_ = self.env.step(np.clip(action[:7], -1, 1))
        return self._seen(seen), bool(self.env.check_success())

    def close(self) -> None:
        self.env.close()

    def _seen(self, seen: Mapping[str, Any]) -> Seen:
        cameras = {"image": "agentview_image", "wrist_image": "robot0_eye_in_hand_image"}
        frames = {name: np.ascontiguousarray(seen[key][::-1, ::-1]).astype(np.uint8) for name, key in cameras.items()}
        parts = [seen["robot0_eef_pos"], axis_angle(seen["robot0_eef_quat"]), seen["robot0_gripper_qpos"]]
        return Seen(frames, np.concatenate(parts).astype(np.float32))


def axis_angle(quaternion: np.ndarray) -> Float64[np.ndarray, 3]:
    """Return a rotation's axis times its angle in rad, 0 to 2 pi, of a unit quaternion (x, y, z, w)."""
    *axis, w = np.asarray(quaternion, np.float64)
    length = np.linalg.norm(axis)
    return np.array(axis) * (2 * np.arctan2(length, w) / length if length > 1e-9 else 2.0)


Simulator = type[PushT] | type[MetaWorld] | type[Libero]
SIMULATORS: Mapping[str, Simulator] = {"pusht": PushT, "metaworld": MetaWorld, "libero": Libero}


def make_adapted(
    simulator: str, task: str = "", num_envs: int = 1, *, size: int = 96, has_films: bool = False
) -> AdaptedVector:
    """Make environments of a simulator, each showing ``size`` px; the simulator's first task if none is named.

    Raises InputError for an unknown simulator or task, and with the install command for one that is not there.
    """
    if simulator not in SIMULATORS:
        raise InputError(f"there is no simulator {simulator!r}: give one of {', '.join(SIMULATORS)}")
    kind, named = SIMULATORS[simulator], (task,) if task else ()
    places = [kind(*named, size=size) for _ in range(num_envs)]
    return AdaptedVector(places, has_films=has_films, num_actions=kind.num_actions, control_hz=kind.control_hz)


def without_shadows(model: Any) -> None:
    """Turn off shadows and multisampling of a MuJoCo model, which cost a software renderer most of a frame."""
    model.vis.quality.shadowsize = 0
    model.vis.quality.offsamples = 0


def xml_without_shadows(xml: str) -> str:
    """Turn off shadows and multisampling in a MuJoCo scene before it is compiled."""
    root = ElementTree.fromstring(xml)  # nosec B314
    visual = root.find("visual")
    visual = ElementTree.SubElement(root, "visual") if visual is None else visual
    quality = visual.find("quality")
    quality = ElementTree.SubElement(visual, "quality") if quality is None else quality
    quality.attrib |= {"shadowsize": "0", "offsamples": "0"}
    return ElementTree.tostring(root, encoding="unicode")


def _import(simulator: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or "?"):
            raise
        raise InputError(f"{simulator} is not installed: {INSTALL[simulator]}") from None
