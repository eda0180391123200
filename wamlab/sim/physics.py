"""Motion on the tabletop for many tables at once: a gripper hovers, grasps, carries, stacks and pushes discs.

Every array leads with the axis n of tables, and no table's numbers depend on its neighbours: a table gives
the same bits alone and in a batch. An open gripper hovers above everything; a closed one slides on the table
like a bar and pushes. Closing over a small object grasps it; opening drops it on what lies below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float64, Int64

from wamlab.sim.scene import MAX_GOALS, MAX_OBJECTS, MAX_ZONES, ZONE_HALF, Scene

MAX_SPEED = 0.045  # table widths per tick and axis
MAX_TURN_RAD = 0.3  # per tick
CLOSING_RATE = 0.4  # per tick: open to closed takes three
CLOSED = 0.5  # from here on the gripper grasps or pushes
HOLDING = 0.6  # an object between the jaws keeps them this far open
RELEASED = 0.4
EDGE = 0.02  # the gripper stays this far inside the table

BAR_HALF, BAR_RADIUS = 0.05, 0.012  # the closed gripper on the table: a capsule across its heading
GRASP_ALONG, GRASP_ACROSS = 0.05, 0.035  # how far an object may lie from the gripper to be grasped
GRASP_RADIUS = 0.055  # of the largest object that fits the jaws
STACK_RADIUS = 0.045  # a drop this close to an object's centre lands on it

REACH_RADIUS = 0.065
REST_SPEED = 0.02  # table widths per tick: slower than this over an object is a decision for it
ZONE_INNER = ZONE_HALF - 0.025  # an object's centre must be inside this square

NOTHING, REACH, ZONE, STACK = range(4)
KINDS = {"reach": REACH, "zone": ZONE, "stack": STACK}

R = TypeVar("R", bound="Rows")


class Rows:
    """Mix-in of dataclasses whose arrays all lead with the axis of tables."""

    def take(self: R, rows: Any) -> R:
        """Copy some tables."""
        return type(self)(**{name: getattr(self, name)[rows] for name in self.names()})

    def put(self: R, rows: Any, part: R) -> None:
        """Overwrite some tables."""
        for name in self.names():
            getattr(self, name)[rows] = getattr(part, name)

    def to_lists(self, row: int) -> dict[str, Any]:
        """Return one table as plain numbers, exactly."""
        return {name: getattr(self, name)[row].tolist() for name in self.names()}

    def set_lists(self, row: int, values: dict[str, Any]) -> None:
        """Overwrite one table with what ``to_lists`` gave."""
        for name in self.names():
            getattr(self, name)[row] = np.asarray(values[name], dtype=getattr(self, name).dtype)

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]  # pyright: ignore[reportArgumentType]


@dataclass
class Layout(Rows):
    """What does not change during an episode."""

    radius: Float64[np.ndarray, "n m"]  # 0 for an object that is not there
    zone: Float64[np.ndarray, "n z 2"]  # centre
    kind: Int64[np.ndarray, "n g"]
    goal_object: Int64[np.ndarray, "n g"]
    goal_target: Int64[np.ndarray, "n g"]
    num_goals: Int64[np.ndarray, " n"]
    max_ticks: Int64[np.ndarray, " n"]


@dataclass
class State(Rows):
    """What changes during an episode."""

    gripper: Float64[np.ndarray, "n 4"]  # x, y, heading in rad, closing (0 open, 1 closed)
    objects: Float64[np.ndarray, "n m 3"]  # x, y, angle in rad; far outside when not there
    held: Int64[np.ndarray, " n"]  # object between the jaws or -1
    below: Int64[np.ndarray, "n m"]  # object that this one stands on or -1
    speed: Float64[np.ndarray, " n"]  # table widths moved in the last tick
    resting: Int64[np.ndarray, " n"]  # object the gripper rests over right now or -1
    reached: Int64[np.ndarray, " n"]  # object last rested over, grasped or pushed, or -1
    met: Bool[np.ndarray, "n g"]  # goals fulfilled; True for goals that are not there
    tick: Int64[np.ndarray, " n"]
    is_success: Bool[np.ndarray, " n"]  # stays True once all goals were met together
    is_failure: Bool[np.ndarray, " n"]  # a reach that came to rest over a wrong object


def lay_out(scenes: Sequence[Scene]) -> tuple[Layout, State]:
    """Put scenes on tables, at tick 0."""
    num = len(scenes)
    ints = np.full((num, MAX_GOALS), -1)
    layout = Layout(
        radius=np.zeros((num, MAX_OBJECTS)),
        zone=np.zeros((num, MAX_ZONES, 2)),
        kind=np.full((num, MAX_GOALS), NOTHING),
        goal_object=ints.copy(),
        goal_target=ints.copy(),
        num_goals=np.array([len(scene.goals) for scene in scenes], dtype=np.int64),
        max_ticks=np.array([scene.max_ticks for scene in scenes], dtype=np.int64),
    )
    # Absent objects are parked far away and apart, so that no formula needs a mask for them.
    parked = np.array([(-10.0 - 5 * i, -10.0, 0.0) for i in range(MAX_OBJECTS)])
    state = State(
        gripper=np.array([(*scene.gripper, 0.0) for scene in scenes]).reshape(num, 4),
        objects=np.tile(parked, (num, 1, 1)),
        held=np.full(num, -1),
        below=np.full((num, MAX_OBJECTS), -1),
        speed=np.zeros(num),
        resting=np.full(num, -1),
        reached=np.full(num, -1),
        met=np.ones((num, MAX_GOALS), dtype=bool),
        tick=np.zeros(num, dtype=np.int64),
        is_success=np.zeros(num, dtype=bool),
        is_failure=np.zeros(num, dtype=bool),
    )
    for row, scene in enumerate(scenes):
        layout.radius[row, : len(scene.poses)] = scene.radius
        state.objects[row, : len(scene.poses)] = scene.poses
        for i, (_, x, y) in enumerate(scene.zones):
            layout.zone[row, i] = x, y
        for i, goal in enumerate(scene.goals):
            layout.kind[row, i] = KINDS[goal.kind]
            layout.goal_object[row, i], layout.goal_target[row, i] = goal.object, goal.target
            state.met[row, i] = False
    return layout, state


def wrapped(angle: Any) -> Any:
    """Return the same angle between -pi and pi."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def advance(state: State, layout: Layout, motion: Float64[np.ndarray, "n 4"]) -> None:
    """Move every table by one tick, in place; ``motion`` is dx, dy, dtheta, gripper in -1..1."""
    gripper = state.gripper
    before = gripper.copy()
    gripper[:, :2] = np.clip(before[:, :2] + MAX_SPEED * motion[:, :2], EDGE, 1 - EDGE)
    gripper[:, 2] = wrapped(before[:, 2] + MAX_TURN_RAD * motion[:, 2])
    closing = np.clip((motion[:, 3] + 1) / 2, before[:, 3] - CLOSING_RATE, before[:, 3] + CLOSING_RATE)
    gripper[:, 3] = np.where(state.held >= 0, np.minimum(closing, HOLDING), closing)
    state.speed[:] = np.hypot(gripper[:, 0] - before[:, 0], gripper[:, 1] - before[:, 1])
    state.tick += 1

    is_closed = gripper[:, 3] >= CLOSED
    rows = np.flatnonzero(is_closed & (before[:, 3] < CLOSED) & (state.held < 0))
    if rows.size:
        _grasp(state, layout, rows)
    rows = np.flatnonzero(state.held >= 0)
    if rows.size:
        state.objects[rows, state.held[rows], :2] = gripper[rows, :2]
        state.objects[rows, state.held[rows], 2] += MAX_TURN_RAD * motion[rows, 2]
        state.reached[rows] = state.held[rows]
    rows = np.flatnonzero((state.held >= 0) & (gripper[:, 3] < RELEASED))
    if rows.size:
        _release(state, layout, rows)
    rows = np.flatnonzero(is_closed & (state.held < 0))
    if rows.size:
        _push(state, layout, rows)


def _grasp(state: State, layout: Layout, rows: np.ndarray) -> None:
    """Take the nearest object that fits, lies within the jaws and carries nothing."""
    along, across, _ = _seen_from_bar(state, rows)
    is_free = (layout.radius[rows] > 0) & (layout.radius[rows] <= GRASP_RADIUS) & ~_is_covered(state, rows)
    is_inside = is_free & (abs(along) < GRASP_ALONG) & (abs(across) < GRASP_ACROSS)
    distance = np.where(is_inside, np.hypot(along, across), np.inf)
    nearest = distance.argmin(axis=1)
    has_one = is_inside.any(axis=1)
    rows, nearest = rows[has_one], nearest[has_one]
    state.held[rows] = nearest
    state.below[rows, nearest] = -1
    state.gripper[rows, 3] = HOLDING


def _release(state: State, layout: Layout, rows: np.ndarray) -> None:
    """Drop what is held: onto the nearest uncovered object if close enough, else onto the table."""
    held = state.held[rows]
    offset = state.objects[rows, :, :2] - state.gripper[rows, None, :2]
    distance = np.hypot(offset[..., 0], offset[..., 1])
    distance[_is_covered(state, rows)] = np.inf
    distance[np.arange(len(rows)), held] = np.inf
    nearest = distance.argmin(axis=1)
    is_stacked = distance.min(axis=1) < STACK_RADIUS
    state.below[rows, held] = np.where(is_stacked, nearest, -1)
    state.held[rows] = -1
    rows = rows[~is_stacked]
    if rows.size:
        _settle(state, layout, rows)


def _push(state: State, layout: Layout, rows: np.ndarray) -> None:
    """Shove objects out of the closed gripper's bar, then out of each other, stacks riding along."""
    along, across, bar = _seen_from_bar(state, rows)
    beyond = along - np.clip(along, -BAR_HALF, BAR_HALF)
    distance = np.hypot(beyond, across)
    depth = layout.radius[rows] + BAR_RADIUS - distance
    is_hit = (depth > 0) & _is_on_table(state, layout, rows)
    is_any = is_hit.any(axis=1)
    if not is_any.any():
        return
    rows, depth, is_hit = rows[is_any], depth[is_any], is_hit[is_any]
    bar, beyond, across, distance = bar[is_any], beyond[is_any], across[is_any], distance[is_any]
    is_centred = distance < 1e-9  # straight on the bar: out along the heading
    beyond = np.where(is_centred, 0.0, beyond / np.maximum(distance, 1e-9))
    across = np.where(is_centred, 1.0, across / np.maximum(distance, 1e-9))
    ahead = np.stack([bar[:, 1], -bar[:, 0]], axis=-1)
    out = beyond[..., None] * bar[:, None] + across[..., None] * ahead[:, None]
    before = state.objects[rows, :, :2]
    state.objects[rows, :, :2] = before + np.where(is_hit, depth, 0.0)[..., None] * out
    state.reached[rows] = np.where(is_hit, depth, -np.inf).argmax(axis=1)
    _settle(state, layout, rows)
    _carry_stacks(state, rows, before)


def _seen_from_bar(state: State, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return objects' offsets along the bar and across it, [n, m], and the bar's direction, [n, 2]."""
    heading = state.gripper[rows, 2]
    bar = np.stack([-np.sin(heading), np.cos(heading)], axis=-1)
    offset = state.objects[rows, :, :2] - state.gripper[rows, None, :2]
    along = offset[..., 0] * bar[:, None, 0] + offset[..., 1] * bar[:, None, 1]
    across = offset[..., 0] * bar[:, None, 1] - offset[..., 1] * bar[:, None, 0]
    return along, across, bar


def _is_covered(state: State, rows: np.ndarray) -> np.ndarray:
    return (state.below[rows][:, :, None] == np.arange(MAX_OBJECTS)).any(axis=1)


def _is_on_table(state: State, layout: Layout, rows: np.ndarray) -> np.ndarray:
    is_held = np.arange(MAX_OBJECTS) == state.held[rows, None]
    return (layout.radius[rows] > 0) & (state.below[rows] < 0) & ~is_held


def _settle(state: State, layout: Layout, rows: np.ndarray) -> None:
    """Push overlapping objects on the table apart, half each, and keep them inside the edges."""
    radius = layout.radius[rows]
    is_on_table = _is_on_table(state, layout, rows)
    is_pair = is_on_table[:, :, None] & is_on_table[:, None, :] & ~np.eye(MAX_OBJECTS, dtype=bool)
    xy = state.objects[rows, :, :2]
    for _ in range(3):  # a pair needs one pass, a row of three needs more
        offset = xy[:, :, None] - xy[:, None]
        distance = np.hypot(offset[..., 0], offset[..., 1])
        overlap = np.where(is_pair, np.maximum(radius[:, :, None] + radius[:, None] - distance, 0.0), 0.0)
        shift = (0.5 * overlap / np.maximum(distance, 1e-9))[..., None] * offset
        xy = xy + sum(shift[:, :, j] for j in range(MAX_OBJECTS))
        inside = np.clip(xy, radius[..., None], 1 - radius[..., None])
        xy = np.where(is_on_table[..., None], inside, xy)
    state.objects[rows, :, :2] = xy


def _carry_stacks(state: State, rows: np.ndarray, before: np.ndarray) -> None:
    """Move what stands on a pushed object by as much as the object at the foot of the stack."""
    below = state.below[rows]
    if (below < 0).all():
        return
    foot = np.tile(np.arange(MAX_OBJECTS), (len(rows), 1))
    for _ in range(MAX_OBJECTS - 1):
        under = np.take_along_axis(below, foot, axis=1)
        foot = np.where(under >= 0, under, foot)
    shift = state.objects[rows, :, :2] - before
    carried = np.take_along_axis(shift, foot[..., None], axis=1)
    state.objects[rows, :, :2] += np.where((below >= 0)[..., None], carried, 0.0)
