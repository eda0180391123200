"""DreamZero's statistics of relative actions, as files of a dataset: action[row + tick] - state[row] over a block."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64

from wamlab.data.json_files import read_json
from wamlab.data.lerobot import RobotDataset
from wamlab.data.modality import NamedSlice, feature_size
from wamlab.data.robot import RobotConfig, column_parts, stored_dim
from wamlab.errors import InputError

RELATIVE_FILE = "meta/relative_stats_dreamzero.json"  # over all ticks of a block
RELATIVE_TICKS_FILE = "meta/relative_horizon_stats_dreamzero.json"  # of each tick
Place = tuple[str, int]  # a column and one of its dimensions


def shared_parts(dataset: RobotDataset) -> dict[str, tuple[NamedSlice, NamedSlice]]:
    """Return the parts that actions and states share, by name: modality.json's, else "action" for the whole of both."""
    slices, shared = dataset.modality.slices, {}
    for name, action in slices.items():
        part = name.removeprefix("action.")
        state = slices.get(f"state.{part}")
        if name.startswith("action.") and state and state.end - state.first == action.end - action.first:
            shared[part] = action, state
    whole = [NamedSlice(c, 0, feature_size(dataset.features.get(c, {}))) for c in ("action", "observation.state")]
    has_both = all(part.column in dataset.features for part in whole) and whole[0].end == whole[1].end
    if has_both and not shared:
        shared["action"] = whole[0], whole[1]
    return shared


def read_relative_stats(
    dataset: RobotDataset, robot: RobotConfig, num_ticks: int
) -> Mapping[str, Float64[np.ndarray, " d"]] | None:
    """Return what is stored of the robot's relative dimensions, in their order: mean, std, min, max, q01, q99.

    None where the dataset has no such files or they lack a dimension; also, with a warning, where their blocks have
    another number of ticks. Raises InputError for a file that is malformed or not finite.
    """
    path, ticks_path = dataset.root / RELATIVE_FILE, dataset.root / RELATIVE_TICKS_FILE
    if not path.exists():
        return None
    found = _places_in_parts(dataset, robot)
    stored = read_json(path)
    if not isinstance(stored, dict):
        raise InputError(f"{path} does not map parts to their statistics: delete it, or write it anew")
    if found is None or not all(name in stored for name, _ in found):
        return None
    ticks = read_json(ticks_path) if ticks_path.exists() else {}
    try:
        known_ticks = {len(ticks[name]["mean"]) for name, _ in found if name in ticks}
        kinds = ("mean", "std", "min", "max", "q01", "q99")
        stats = {
            kind: np.array([np.ravel(stored[name][kind])[dim] for name, dim in found], np.float64) for kind in kinds
        }
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path} or {ticks_path.name} is malformed ({error!r}): delete both, or write them anew"
        ) from error
    if known_ticks != {num_ticks}:
        said = f"blocks of {', '.join(map(str, sorted(known_ticks)))} ticks" if known_ticks else "no length of blocks"
        warnings.warn(
            f"{path} says {said} and these are of {num_ticks}: relative actions are measured anew at every start; "
            f"wamlab data stats {dataset.root} --write --horizon {num_ticks} keeps them",
            stacklevel=3,
        )
        return None
    if not all(np.isfinite(values).all() for values in stats.values()):
        raise InputError(f"{path} holds a NaN or infinity: write it anew (wamlab data stats {dataset.root} --write)")
    return stats


def _places_in_parts(dataset: RobotDataset, robot: RobotConfig) -> list[tuple[str, int]] | None:
    """Return the part of each relative dimension, and its place there; None if one is in no shared part."""
    actions, states = (_places(dataset, column) for column in (robot.action_column, robot.state_column))
    known: dict[tuple[Place, Place], tuple[str, int]] = {}
    for name, (action, state) in shared_parts(dataset).items():
        for dim in range(action.end - action.first):
            known[(action.column, action.first + dim), (state.column, state.first + dim)] = name, dim
    found = [known.get((actions[dim], states[dim])) for dim in robot.relative_dims]
    return [place for place in found if place] if all(found) else None


def _places(dataset: RobotDataset, column: str | None) -> list[Place]:
    """Return where the dimensions of a column of the configuration are stored."""
    places: list[Place] = []
    for part in column_parts(column):
        whole = dataset.modality.slices.get(part.name, NamedSlice(part.name, 0, 0))
        if part.name in dataset.features:
            whole = NamedSlice(part.name, 0, 0)
        places += [(whole.column, whole.first + dim) for dim in range(stored_dim(dataset, part.name))[part.span]]
    return places
