"""Scenes of the tabletop: what lies where, what is asked for and how it looks, drawn at random."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from wamlab.errors import InputError
from wamlab.sim.language import COLOURS, HELD_OUT_COMBOS, SHAPES, phrase

FAMILIES = ("reach", "push", "pick_place", "stack")
SPLITS = ("seen", "unseen_combo", "unseen_position", "unseen_paraphrase", "visual_shift", "long_horizon")

# Lengths are in table widths; the table is the unit square, x to the right, y away from the viewer.
OBJECT_RADIUS = 0.05
PUSH_RADIUS = 0.065  # too wide for the jaws, so that pushing is the only way
ZONE_HALF = 0.1  # half the side of a square zone
UNSEEN_CORNER = 0.6  # no object or zone lies at x and y beyond it, but in split "unseen_position"
MAX_OBJECTS, MAX_ZONES, MAX_GOALS = 5, 2, 3
TICKS_PER_GOAL = {"reach": 40, "push": 100, "pick_place": 90, "stack": 80}  # time limit

_MIN_START_DISTANCE = 0.25  # from the gripper to every object: a random walk seldom gets there in time
_MIN_CARRY = 0.35  # from an object to its zone
_GRIPPER_START = (math.pi / 2, 0.3)  # heading and its spread, rad


@dataclass(frozen=True)
class Goal:
    """One thing to do: reach an object, bring it to a zone, or stack it on another object."""

    kind: str  # "reach", "zone" or "stack"
    object: int
    target: int = -1  # index of a zone or of an object; -1 for "reach"


@dataclass(frozen=True)
class Look:
    """What the cameras see apart from things: surfaces, light, and small errors of the camera mount."""

    table: tuple[int, int, int] = (224, 217, 205)
    floor: tuple[int, int, int] = (66, 72, 82)
    light: tuple[float, float, float] = (1.0, 1.0, 1.0)  # gain of red, green, blue
    seam_angle_rad: float = 0.0  # of the lines between planks
    camera_shift: tuple[float, float] = (0.0, 0.0)  # table widths
    camera_turn_rad: float = 0.0
    camera_zoom: float = 1.0


@dataclass(frozen=True)
class Scene:
    """A whole episode start: things, gripper, goals, words and looks, as values that JSON holds exactly."""

    family: str
    split: str
    objects: tuple[tuple[str, str], ...]  # (colour, shape)
    poses: tuple[tuple[float, float, float], ...]  # x, y, angle in rad
    radius: float  # of all objects
    zones: tuple[tuple[str, float, float], ...]  # colour, x, y
    gripper: tuple[float, float, float]  # x, y, heading in rad
    goals: tuple[Goal, ...]
    instruction: str
    look: Look = Look()

    @property
    def max_ticks(self) -> int:
        """Time limit of the episode."""
        return TICKS_PER_GOAL[self.family] * len(self.goals)

    def object_name(self, index: int) -> str:
        """Name one object as instructions do, e.g. ``red circle``."""
        return " ".join(self.objects[index])

    def target_name(self, goal: Goal) -> str:
        """Name where a goal's object shall go; empty for a reach goal."""
        if goal.kind == "zone":
            return f"{self.zones[goal.target][0]} zone"
        return self.object_name(goal.target) if goal.kind == "stack" else ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings that ``from_dict`` turns back into an equal scene."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Scene:
        """Rebuild a scene from ``to_dict`` or its JSON; raise InputError where the keys do not fit."""
        try:
            return Scene(
                **{
                    **values,
                    **{key: _tuples(values[key]) for key in ("objects", "poses", "zones", "gripper")},
                    "goals": tuple(Goal(**goal) for goal in values["goals"]),
                    "look": Look(**{key: _tuples(value) for key, value in values["look"].items()}),
                }
            )
        except (TypeError, KeyError) as error:
            raise InputError(
                f"a stored scene does not fit this version ({error}); write its episode list again"
            ) from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def check_names(family: str, split: str) -> None:
    """Raise InputError unless both the task family and the split exist."""
    if family not in FAMILIES:
        raise InputError(f"there is no task family {family!r}; choose one of {', '.join(FAMILIES)}")
    if split not in SPLITS:
        raise InputError(f"there is no split {split!r}; choose one of {', '.join(SPLITS)}")


def draw_scene(family: str, split: str, rng: np.random.Generator) -> Scene:
    """Draw a start whose language is necessary: the goal object has a twin in shape and one in colour."""
    check_names(family, split)
    num_goals = (2 if family == "stack" else 1) + (split == "long_horizon")
    num_objects = num_goals + 2 if family == "stack" else int(rng.integers(3, 4 if family == "push" else 5))
    objects = _draw_objects(num_objects, rng, is_target_unseen=split == "unseen_combo")
    zone_colours = rng.permutation(list(COLOURS))[:2] if family in ("push", "pick_place") else []
    if family == "reach":
        goals = tuple(Goal("reach", i) for i in range(num_goals))
    elif family == "stack":  # 0 on 1, then 2 on 0, then 3 on 2
        goals = tuple(Goal("stack", i + (i > 0), (1, 0, 2)[i]) for i in range(num_goals))
    else:
        goals = tuple(Goal("zone", i, i) for i in range(num_goals))
    radius = PUSH_RADIUS if family == "push" else OBJECT_RADIUS
    zone_xy, xy, gripper_xy = _draw_places(
        num_objects, len(zone_colours), goals, radius, rng, family, is_unseen=split == "unseen_position"
    )
    heading, spread = _GRIPPER_START
    scene = Scene(
        family=family,
        split=split,
        objects=tuple(objects),
        poses=tuple((x, y, float(rng.uniform(-math.pi, math.pi))) for x, y in xy),
        radius=radius,
        zones=tuple((str(colour), x, y) for colour, (x, y) in zip(zone_colours, zone_xy, strict=True)),
        gripper=(*gripper_xy, float(heading + rng.uniform(-spread, spread))),
        goals=goals,
        instruction="",
        look=_draw_look(rng) if split == "visual_shift" else Look(),
    )
    return _shuffled(_instructed(scene, rng), rng)


def swapped(scene: Scene, rng: np.random.Generator) -> Scene:
    """Ask for something else in the same scene: other objects (and another zone), same places, same looks."""
    while True:
        objects = [int(i) for i in rng.permutation(len(scene.objects))]
        zones = [int(i) for i in rng.permutation(len(scene.zones))]
        targets = {"reach": [-1], "zone": zones, "stack": objects}
        goals = tuple(
            replace(goal, object=objects[goal.object], target=targets[goal.kind][goal.target]) for goal in scene.goals
        )
        # Where things end up must differ, but the order of touching them alone may make a reach another one.
        is_other = scene.family == "reach" or not set(goals) & set(scene.goals)
        if is_other and goals[0].object != scene.goals[0].object:
            return _instructed(replace(scene, goals=goals), rng)


def _instructed(scene: Scene, rng: np.random.Generator) -> Scene:
    pairs = [(scene.object_name(goal.object), scene.target_name(goal)) for goal in scene.goals]
    is_unseen = scene.split == "unseen_paraphrase"
    return replace(scene, instruction=phrase(scene.family, pairs, rng, is_unseen=is_unseen))


def _shuffled(scene: Scene, rng: np.random.Generator) -> Scene:
    """Renumber the objects, so that an index never tells which one is asked for."""
    order = [int(i) for i in rng.permutation(len(scene.objects))]
    new = {old: i for i, old in enumerate(order)}
    goals = tuple(
        replace(goal, object=new[goal.object], target=new[goal.target] if goal.kind == "stack" else goal.target)
        for goal in scene.goals
    )
    return replace(
        scene,
        objects=tuple(scene.objects[i] for i in order),
        poses=tuple(scene.poses[i] for i in order),
        goals=goals,
    )


def _draw_objects(number: int, rng: np.random.Generator, *, is_target_unseen: bool) -> list[tuple[str, str]]:
    combos = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    seen = [combo for combo in combos if combo not in HELD_OUT_COMBOS]
    pool = sorted(HELD_OUT_COMBOS) if is_target_unseen else seen
    target = pool[rng.integers(len(pool))]
    rest = [seen[i] for i in rng.permutation(len(seen)) if seen[i] != target]
    same_shape = next(combo for combo in rest if combo[1] == target[1])
    same_colour = next(combo for combo in rest if combo[0] == target[0])
    others = [combo for combo in rest if combo not in (same_shape, same_colour)]
    return [target, same_shape, same_colour, *others][:number]


def _draw_look(rng: np.random.Generator) -> Look:
    tables = ((168, 132, 98), (120, 134, 140), (198, 212, 216), (150, 162, 140), (216, 190, 170))
    floors = ((36, 36, 40), (120, 110, 100), (90, 60, 50), (180, 184, 190))
    light = float(rng.uniform(0.72, 1.0))
    red, green, blue = (float(gain) for gain in rng.uniform(0.88, 1.0, 3))
    return Look(
        table=tables[rng.integers(len(tables))],
        floor=floors[rng.integers(len(floors))],
        light=(light * red, light * green, light * blue),
        seam_angle_rad=float(rng.uniform(0, math.pi)),
        camera_shift=(float(rng.uniform(-0.03, 0.03)), float(rng.uniform(-0.03, 0.03))),
        camera_turn_rad=float(rng.uniform(-0.07, 0.07)),
        camera_zoom=float(rng.uniform(0.93, 1.04)),
    )


Point = tuple[float, float]


def _draw_places(
    num_objects: int,
    num_zones: int,
    goals: Sequence[Goal],
    radius: float,
    rng: np.random.Generator,
    family: str,
    *,
    is_unseen: bool,
) -> tuple[list[Point], list[Point], Point]:
    """Draw places of zones, objects and gripper by rejection: apart, reachable, outside the unseen corner."""
    low = 0.2 if family == "push" else 0.09  # room to get behind an object

    def is_seen(p: Point) -> bool:
        return p[0] < UNSEEN_CORNER or p[1] < UNSEEN_CORNER

    for _ in range(500):
        zones: list[Point] = []
        for _ in range(num_zones):
            fits = [p for p in _points(rng, ZONE_HALF + 0.03) if is_seen(p) and _all_apart(p, zones, 0.3)]
            zones += fits[:1]
        objects: list[Point] = []
        for i in range(num_objects):
            is_corner = is_unseen and i == goals[0].object
            points = _points(rng, max(low, UNSEEN_CORNER if is_corner else 0.0), 1 - low)
            objects += [
                p
                for p in points
                if (is_corner or is_seen(p))
                and _all_apart(p, objects, 2 * radius + 0.07)
                and all(max(abs(p[0] - x), abs(p[1] - y)) > ZONE_HALF + radius + 0.02 for x, y in zones)
            ][:1]
        if len(zones) < num_zones or len(objects) < num_objects:
            continue
        if any(
            goal.kind == "zone" and math.dist(objects[goal.object], zones[goal.target]) < _MIN_CARRY for goal in goals
        ):
            continue
        if family == "push" and not all(_is_path_free(g, objects, zones, goals, radius) for g in goals):
            continue
        starts = [p for p in _points(rng, 0.06) if _all_apart(p, objects, _MIN_START_DISTANCE)]
        if starts:
            return zones, objects, starts[0]
    raise RuntimeError(f"no place for {num_objects} objects and {num_zones} zones in 500 draws")


def _points(rng: np.random.Generator, low: float, high: float | None = None, number: int = 24) -> list[Point]:
    draws = rng.uniform(low, 1 - low if high is None else high, (number, 2))
    return [(float(x), float(y)) for x, y in draws]


def _all_apart(p: Point, others: Sequence[Point], distance: float) -> bool:
    return all(math.hypot(p[0] - x, p[1] - y) >= distance for x, y in others)


def _is_path_free(
    goal: Goal, objects: Sequence[Point], zones: Sequence[Point], goals: Sequence[Goal], radius: float
) -> bool:
    """Say whether nothing stands between an object, the gripper behind it, and its zone."""
    (x, y), (zone_x, zone_y) = objects[goal.object], zones[goal.target]
    length = math.hypot(zone_x - x, zone_y - y)
    ux, uy = (zone_x - x) / length, (zone_y - y) / length
    obstacles = [p for i, p in enumerate(objects) if i != goal.object]
    obstacles += [zones[other.target] for other in goals[: goals.index(goal)]]
    for px, py in obstacles:
        along = min(max((px - x) * ux + (py - y) * uy, -radius - 0.06), length)
        if math.hypot(px - x - along * ux, py - y - along * uy) < 2 * radius + 0.02:
            return False
    return True
