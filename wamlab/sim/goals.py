"""What counts as done on the tabletop: goals, wrong choices and progress, for many tables at once."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from wamlab.sim.physics import (
    NOTHING,
    REACH,
    REACH_RADIUS,
    REST_SPEED,
    STACK,
    ZONE,
    ZONE_INNER,
    Layout,
    State,
)


def judge(state: State, layout: Layout) -> None:
    """Update goals, success and failure after a tick, in place.

    A reach is decided where the gripper first comes to rest: slower than REST_SPEED within REACH_RADIUS of an
    object. Over a wrong one the episode has failed, so that visiting every object is no way to succeed.
    Zone and stack goals hold while the released object is in place, so a tower must stand as a whole.
    """
    offset = state.objects[:, :, :2] - state.gripper[:, None, :2]
    distance = np.hypot(offset[..., 0], offset[..., 1])
    is_resting = (distance.min(axis=1) < REACH_RADIUS) & (state.speed < REST_SPEED)
    state.resting[:] = np.where(is_resting, distance.argmin(axis=1), -1)
    state.reached[:] = np.where(is_resting, state.resting, state.reached)

    is_reach = layout.kind[:, 0] == REACH
    rows = np.flatnonzero(is_reach & is_resting)
    if rows.size:
        _judge_reach(state, layout, rows)
    rows = np.flatnonzero(~is_reach)
    if rows.size:
        _judge_places(state, layout, rows)
    state.is_success |= state.met.all(axis=1) & ~state.is_failure


def _judge_reach(state: State, layout: Layout, rows: np.ndarray) -> None:
    resting = state.resting[rows, None]
    stage = current_goal(state, layout)[rows]
    is_here = layout.goal_object[rows] == resting
    is_right = is_here[np.arange(len(rows)), stage]
    was_right = (is_here & state.met[rows] & (layout.kind[rows] == REACH)).any(axis=1)
    state.met[rows, stage] |= is_right
    state.is_failure[rows] |= ~is_right & ~was_right


def _judge_places(state: State, layout: Layout, rows: np.ndarray) -> None:
    kind, thing = layout.kind[rows], layout.goal_object[rows]
    offset = _target_xy(state, layout, rows) - _object_xy(state, rows, thing)
    is_released = thing != state.held[rows, None]
    below = np.take_along_axis(state.below[rows], np.maximum(thing, 0), axis=1)
    is_in_zone = (np.maximum(abs(offset[..., 0]), abs(offset[..., 1])) < ZONE_INNER) & (below < 0)
    is_stacked = below == layout.goal_target[rows]
    is_placed = np.where(kind == ZONE, is_in_zone, is_stacked) & is_released
    state.met[rows] = is_placed | (kind == NOTHING)


def stage_of(state: State, layout: Layout) -> Int64[np.ndarray, " n"]:
    """Count the goals met in a row from the first."""
    leading = np.logical_and.accumulate(state.met, axis=1).sum(axis=1)
    return np.minimum(leading, layout.num_goals)


def current_goal(state: State, layout: Layout) -> Int64[np.ndarray, " n"]:
    """Return the index of the goal to work on: the first unmet, or the last when all are met."""
    return np.minimum(stage_of(state, layout), layout.num_goals - 1)


def progress_of(state: State, layout: Layout) -> Float64[np.ndarray, " n"]:
    """Grade how far each episode is, 0..1; exactly 1 at success and only then.

    Each goal counts equally; within a goal 0.3 is for the gripper coming close to the object and 0.7 for the
    object coming close to its target.
    """
    rows = np.arange(len(state.held))
    stage = current_goal(state, layout)[:, None]
    thing = layout.goal_object[rows[:, None], stage]
    at_object = _nearness(_object_xy(state, rows, thing)[:, 0] - state.gripper[:, :2])
    target = _target_xy(state, layout, rows)[rows, stage[:, 0]]
    at_target = _nearness(target - _object_xy(state, rows, thing)[:, 0])
    is_reach = layout.kind[:, 0] == REACH
    partial = np.where(is_reach, at_object, 0.3 * at_object + 0.7 * at_target)
    graded = np.minimum((stage_of(state, layout) + 0.99 * partial) / layout.num_goals, 0.99)
    return np.where(state.is_success, 1.0, graded)


def _nearness(offset: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.hypot(offset[:, 0], offset[:, 1]), 0.0)


def _object_xy(state: State, rows: np.ndarray, thing: np.ndarray) -> np.ndarray:
    return state.objects[rows[:, None], np.maximum(thing, 0), :2]


def _target_xy(state: State, layout: Layout, rows: np.ndarray) -> np.ndarray:
    target = np.maximum(layout.goal_target[rows], 0)
    zone = layout.zone[rows[:, None], np.minimum(target, layout.zone.shape[1] - 1)]
    is_stack = (layout.kind[rows] == STACK)[..., None]
    return np.where(is_stack, _object_xy(state, rows, layout.goal_target[rows]), zone)
