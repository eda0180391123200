"""Scripted experts of the tabletop: smooth controllers of what the cameras show, and episodes they play.

An expert goes at full speed far from where it wants to be and slows down in proportion near it, so its
action is a nearly deterministic function of the picture, agent_pos and the instruction. Disturbances are
added to what is executed, while the recorded label stays the intention (DART, Laskey et al. 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from gymnasium.utils import seeding
from jaxtyping import Float32

from wamlab.errors import InputError
from wamlab.sim.physics import BAR_RADIUS, CLOSED, MAX_SPEED, MAX_TURN_RAD, REACH_RADIUS
from wamlab.sim.scene import FAMILIES, Scene, swapped
from wamlab.sim.table import FPS, TableConfig, Tables
from wamlab.sim.tabletop import TabletopEnv, new_scene
from wamlab.types import Episode

FAILURES = {
    "reach": ("wrong_object", "stop_early", "near_miss"),
    "push": ("wrong_object", "stop_early", "near_miss"),
    "pick_place": ("wrong_object", "stop_early", "near_miss"),
    "stack": ("wrong_object", "stop_early"),
}

OPEN, CLOSE = -1.0, 1.0
_GAIN = 0.5  # share of the way to go that is gone in one tick
_AT_OBJECT = 0.02  # close enough to grasp or to drop, table widths
NEAR_MISS = 0.13  # table widths
_BEHIND = 0.035  # room between an object and the gripper before it closes to push


@dataclass(frozen=True)
class Style:
    """How well an expert plays."""

    noise: float = 0.2  # standard deviation of what is added to dx and dy, in units of full speed
    hesitation: float = 0.0  # chance per tick of a pause of 2 to 5 ticks
    is_label_clean: bool = True  # record the intention, not what was executed
    tail_ticks: int = 8  # of holding still after success, so that windows near the end exist
    failure: str | None = None  # one of the family's FAILURES

    def __post_init__(self) -> None:
        if self.noise < 0 or not 0 <= self.hesitation < 1 or self.tail_ticks < 0:
            raise InputError(f"noise, hesitation or tail_ticks is out of range in {self}")


def expert_action(tables: Tables, row: int = 0) -> Float32[np.ndarray, " 4"]:
    """Choose what an expert does now for the first unmet goal of one table."""
    scene, state = tables.scenes[row], tables.state
    is_met = state.met[row, : len(scene.goals)].tolist()
    goal = scene.goals[is_met.index(False) if False in is_met else -1]
    x, y, heading, closing = state.gripper[row].tolist()
    things = state.objects[row].tolist()
    thing = things[goal.object][:2]
    to_thing = thing[0] - x, thing[1] - y
    if goal.kind == "reach":  # goes on converging after success: no jump in the action
        return _moved(*to_thing, 0.0, OPEN)
    if all(is_met):
        return _moved(0.0, 0.0, 0.0, CLOSE if scene.family == "push" else OPEN)
    target = scene.zones[goal.target][1:] if goal.kind == "zone" else tuple(things[goal.target][:2])
    if scene.family == "push":
        return _push((x, y, heading, closing), thing, target, scene.radius)
    held = int(state.held[row])
    if held == goal.object:
        to_target = target[0] - x, target[1] - y
        return _moved(*to_target, 0.0, CLOSE if math.hypot(*to_target) > _AT_OBJECT else OPEN)
    is_ready = held < 0 and math.hypot(*to_thing) < _AT_OBJECT
    return _moved(*to_thing, 0.0, CLOSE if is_ready else OPEN)


def _push(gripper: tuple[float, ...], thing: Sequence[float], target: Sequence[float], radius: float) -> np.ndarray:
    """Hover to behind the object and turn across the way, close, and push along the line to the target."""
    x, y, heading, closing = gripper
    to_go = target[0] - thing[0], target[1] - thing[1]
    distance = max(math.hypot(*to_go), 1e-6)
    ux, uy = to_go[0] / distance, to_go[1] / distance
    ahead = (thing[0] - x) * ux + (thing[1] - y) * uy  # how far the object is in front of the gripper
    aside = (thing[0] - x) * -uy + (thing[1] - y) * ux  # and to its left
    turn = (math.atan2(uy, ux) - heading + math.pi / 2) % math.pi - math.pi / 2  # a bar has two equal sides
    contact = radius + BAR_RADIUS
    if closing >= CLOSED:
        is_behind = ahead > 0.5 * contact and abs(aside) < 0.04
        forward = min(distance + ahead - contact, 2 * MAX_SPEED)
        dx, dy = forward * ux + aside * -uy, forward * uy + aside * ux
        return _moved(dx, dy, turn, CLOSE) if is_behind else _moved(0.0, 0.0, turn, OPEN)
    back = contact + _BEHIND
    dx, dy = thing[0] - back * ux - x, thing[1] - back * uy - y
    is_ready = math.hypot(dx, dy) < _AT_OBJECT and abs(turn) < 0.2
    return _moved(dx, dy, turn, CLOSE if is_ready else OPEN)


def _moved(dx: float, dy: float, turn: float, grip: float) -> np.ndarray:
    """Return the action that goes half of the way (table widths, rad), at full speed at most."""
    x, y = _GAIN * dx / MAX_SPEED, _GAIN * dy / MAX_SPEED
    length = max(math.hypot(x, y), 1.0)
    spin = min(max(_GAIN * turn / MAX_TURN_RAD, -1.0), 1.0)
    return np.array([x / length, y / length, spin, grip], dtype=np.float32)


def play_expert(
    env: TabletopEnv | str,
    seed: int,
    *,
    style: Style = Style(),
    split: str = "seen",
    size: int | tuple[int, int] = 96,
    cameras: tuple[str, ...] = ("top", "wrist"),
) -> Episode:
    """Play one episode and record it; ``env`` is an environment or the name of a task family.

    Row i of the action belongs to frame i. Signals: ``next.reward`` (1 at the tick that succeeds),
    ``next.success`` (stays True), ``next.done`` (True in the last row), ``executed_action`` (disturbed).
    With an environment given, ``split``, ``size`` and ``cameras`` are its own.
    """
    if isinstance(env, str):
        env = TabletopEnv(env, split, size=size, cameras=cameras)
    if env.config.action_noise or env.config.latency_ticks or env.config.control != "delta":
        raise InputError("experts play environments without action noise, latency or absolute control")
    observation, _ = env.reset(seed=seed)
    real, scene = env.tables, env.scene
    assert real is not None
    rng = np.random.default_rng([seed, 1])
    plan = real  # what the expert believes; a failure is a right plan for another scene
    if style.failure is not None:
        plan = Tables([_misunderstood(scene, style.failure, rng)], real.generators, env.config)
    stop_tick = int(rng.uniform(0.2, 0.65) * _length(scene)) if style.failure == "stop_early" else math.inf

    rows: list[tuple[dict, np.ndarray, np.ndarray, bool]] = []
    pause, tail = 0, 0
    while tail < style.tail_ticks + 1 and len(rows) < scene.max_ticks + style.tail_ticks:
        label = expert_action(plan)
        if len(rows) >= stop_tick:
            label[:3] = 0.0
        pause = pause - 1 if pause else _draw_pause(real, style, rng)
        executed = _disturbed(label, style, rng, is_paused=pause > 0)
        before = observation
        observation, *_ = env.step(executed)
        if plan is not real:
            plan.run(executed[None])
        is_over = bool(plan.is_terminated[0]) or len(rows) >= stop_tick
        tail = tail + 1 if is_over else 0
        rows.append((before, label, executed, bool(real.state.is_success[0])))
    return _recorded(rows, scene.instruction, env.config.cameras, style)


def play_episodes(
    families: Sequence[str] = FAMILIES,
    num_episodes: int = 100,
    seed: int = 0,
    *,
    first: int = 0,
    style: Style = Style(),
    failure_share: float = 0.0,
    split: str = "seen",
    size: int | tuple[int, int] = 96,
    cameras: tuple[str, ...] = ("top", "wrist"),
) -> Iterator[Episode]:
    """Play episodes ``first`` .. ``first + num_episodes - 1`` of an endless list that the seed decides.

    Families take turns; ``failure_share`` of the episodes fail on purpose. Episode i is the same whoever
    plays it, so several workers may share the list.
    """
    if not families or not 0 <= failure_share <= 1 or num_episodes < 0 or first < 0:
        raise InputError("play_episodes needs at least one family, failure_share in 0..1 and no negative counts")
    for index in range(first, first + num_episodes):
        rng = np.random.default_rng([seed, index])
        family = families[index % len(families)]
        failure = style.failure
        if rng.random() < failure_share:
            failure = str(rng.choice(FAILURES[family]))
        yield play_expert(
            family,
            int(rng.integers(2**31)),
            style=replace(style, failure=failure),
            split=split,
            size=size,
            cameras=cameras,
        )


@dataclass(frozen=True)
class ActorOutcome:
    """How many episodes ended that an actor played who sees the tables themselves."""

    rate: float
    ticks: np.ndarray  # length of each successful episode


def measure_actor(
    act: Callable[[Tables, int], np.ndarray], family: str, seeds: Sequence[int], split: str = "seen"
) -> ActorOutcome:
    """Let ``act`` (tables, row -> action) play one blind episode a seed to its end."""
    generators = [seeding.np_random(seed)[0] for seed in seeds]
    scenes = [new_scene(family, split, generator, None) for generator in generators]
    tables = Tables(scenes, generators, TableConfig(cameras=()))
    actions = np.zeros((len(seeds), 4))
    while (rows := np.flatnonzero(~(tables.is_terminated | tables.is_truncated))).size:
        for row in rows:
            actions[row] = act(tables, int(row))
        tables.run(actions, rows)
    is_success = tables.state.is_success
    return ActorOutcome(float(is_success.mean()), tables.state.tick[is_success])


def expert_with(style: Style = Style(), seed: int = 0) -> Callable[[Tables, int], np.ndarray]:
    """Return an expert disturbed as the style says, for ``measure_actor``."""
    rng = np.random.default_rng(seed)
    return lambda tables, row: _disturbed(expert_action(tables, row), style, rng, is_paused=False)


def random_actor(seed: int = 0) -> Callable[[Tables, int], np.ndarray]:
    """Return an actor that draws every action uniformly, for ``measure_actor``."""
    rng = np.random.default_rng(seed)
    return lambda tables, row: rng.uniform(-1, 1, 4)


def _disturbed(label: np.ndarray, style: Style, rng: np.random.Generator, *, is_paused: bool) -> np.ndarray:
    executed = label.copy()
    noise = style.noise * rng.normal(size=2)
    executed[:2] = 0.0 if is_paused else np.clip(executed[:2] + noise, -1, 1)
    return executed


def _draw_pause(tables: Tables, style: Style, rng: np.random.Generator) -> int:
    """Return how many ticks to hesitate from now on; never over an object, which would decide a reach."""
    if not style.hesitation or rng.random() >= style.hesitation:
        return 0
    offset = tables.state.objects[0, :, :2] - tables.state.gripper[0, :2]
    is_over_object = np.hypot(offset[:, 0], offset[:, 1]).min() < REACH_RADIUS + MAX_SPEED
    return 0 if is_over_object else int(rng.integers(2, 6))


def _misunderstood(scene: Scene, failure: str, rng: np.random.Generator) -> Scene:
    """Return the scene as an expert that fails sees it."""
    if failure not in FAILURES[scene.family]:
        raise InputError(
            f"{scene.family} has no failure {failure!r}; choose one of {', '.join(FAILURES[scene.family])}"
        )
    if failure == "wrong_object":
        return swapped(scene, rng)
    if failure == "stop_early":
        return scene
    goal = scene.goals[-1]
    angle = rng.uniform(0, 2 * math.pi)
    if scene.family == "reach":
        poses = list(scene.poses)
        x, y, turn = poses[goal.object]
        poses[goal.object] = (*_beside(x, y, angle), turn)
        return replace(scene, poses=tuple(poses))
    zones = list(scene.zones)
    colour, x, y = zones[goal.target]
    if scene.family == "push":  # fall short: beyond or beside, it would have passed through the zone
        thing_x, thing_y, _ = scene.poses[goal.object]
        angle = math.atan2(thing_y - y, thing_x - x)
    zones[goal.target] = (colour, *_beside(x, y, angle))
    return replace(scene, zones=tuple(zones))


def _beside(x: float, y: float, angle_rad: float) -> tuple[float, float]:
    """Return a point a near miss away, on the other side where this one leaves the table."""
    dx, dy = NEAR_MISS * math.cos(angle_rad), NEAR_MISS * math.sin(angle_rad)
    return (x + dx if 0.1 < x + dx < 0.9 else x - dx, y + dy if 0.1 < y + dy < 0.9 else y - dy)


def _length(scene: Scene) -> int:
    """Count the ticks an undisturbed expert needs."""
    tables = Tables([scene], [np.random.default_rng(0)], TableConfig(cameras=()))
    while not (tables.is_terminated[0] or tables.is_truncated[0]):
        tables.run(expert_action(tables)[None])
    return int(tables.state.tick[0])


def _recorded(rows: Sequence[tuple], instruction: str, cameras: Sequence[str], style: Style) -> Episode:
    seen, labels, executed, success = zip(*rows, strict=True)
    is_success = np.array(success)
    is_first = is_success & ~np.concatenate([[False], is_success[:-1]])
    return Episode(
        frames={camera: np.stack([one["pixels"][camera] for one in seen]) for camera in cameras},
        state=np.stack([one["agent_pos"] for one in seen]),
        action=np.stack(labels if style.is_label_clean else executed).astype(np.float32),
        instruction=instruction,
        fps=FPS,
        signals={
            "next.reward": is_first.astype(np.float32),
            "next.success": is_success,
            "next.done": np.arange(len(rows)) == len(rows) - 1,
            "executed_action": np.stack(executed).astype(np.float32),
        },
    )
