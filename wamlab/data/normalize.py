"""Actions and states between robot units and the network's: inverse pairs, and the statistics they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Num

from wamlab.data.lerobot import RobotDataset
from wamlab.data.relative_stats import read_relative_stats
from wamlab.data.robot import RobotConfig, column_parts, stored_dim
from wamlab.errors import InputError, explained_damage

MAX_DIM, MAX_VALUE = 4096, 1e30  # of a robot; float32 ends at 3e38
MIN_WIDTH = 1e-30  # of what varies: to divide by less overflows
MAX_MEASURED_ROWS = 100_000  # relative actions start from at most about so many rows: 77 MB at 24 x 8 floats


@dataclass(frozen=True)
class Quantiles:
    """Maps low..high of each dimension to -1..1 and clips what lies outside.

    ``low`` and ``high`` are the 1st and 99th percentile, or minimum and maximum. A dimension that never changed
    (low = high) passes clipped to -1..1 and comes back as that constant, as in DreamZero.
    """

    low: Float64[np.ndarray, " j"]
    high: Float64[np.ndarray, " j"]

    def to_model(self, values: Num[np.ndarray, "*batch j"]) -> Float32[np.ndarray, "*batch j"]:
        span = self.high - self.low
        scaled = 2 * (values - self.low) / np.where(span, span, 1) - 1
        return np.clip(np.where(span, scaled, values), -1, 1).astype(np.float32)

    def to_robot(self, values: Num[np.ndarray, "*batch j"]) -> Float32[np.ndarray, "*batch j"]:
        clipped = np.clip(np.asarray(values, np.float64), -1, 1)  # so that it returns nothing never recorded
        return (self.low + (clipped + 1) / 2 * (self.high - self.low)).astype(np.float32)


@dataclass(frozen=True)
class Spread:
    """Maps each dimension to mean 0 and standard deviation 1; one that never changed only loses its mean."""

    mean: Float64[np.ndarray, " j"]
    std: Float64[np.ndarray, " j"]

    def to_model(self, values: Num[np.ndarray, "*batch j"]) -> Float32[np.ndarray, "*batch j"]:
        return ((values - self.mean) / np.where(self.std, self.std, 1)).astype(np.float32)

    def to_robot(self, values: Num[np.ndarray, "*batch j"]) -> Float32[np.ndarray, "*batch j"]:
        return (self.mean + values * np.where(self.std, self.std, 1)).astype(np.float32)


Scale = Quantiles | Spread
# The two statistics of a column that each normalisation is made from.
STATISTICS = {"q99": ("q01", "q99"), "min_max": ("min", "max"), "mean_std": ("mean", "std")}


@dataclass(frozen=True)
class Normalizers:
    """One robot's way between its units and the network's, kept with a run and needed by its policy."""

    action: Scale  # of 0 dimensions where nothing is recorded
    state: Scale
    relative_dims: tuple[int, ...]  # of the action: recorded as the difference from the block's state
    max_action_dim: int
    max_state_dim: int

    @property
    def action_mask(self) -> Bool[np.ndarray, " j"]:
        """Say which of the padded action dimensions the robot has."""
        return np.arange(self.max_action_dim) < _dim(self.action)

    @property
    def num_actions(self) -> int:
        """Return how many numbers one of the robot's actions has."""
        return _dim(self.action)

    @property
    def num_states(self) -> int:
        """Return how many numbers the robot's state has."""
        return _dim(self.state)

    def state_to_model(self, state: Num[np.ndarray, "*batch k"]) -> Float32[np.ndarray, "*batch max_k"]:
        """Normalise states and pad them with zeros."""
        return _padded(self.state.to_model(_sized(state, self.state, "state")), self.max_state_dim)

    def actions_to_model(
        self, actions: Num[np.ndarray, "*batch a j"], state: Num[np.ndarray, "*batch k"]
    ) -> Float32[np.ndarray, "*batch a max_j"]:
        """Normalise the actions of blocks that start in ``state`` and pad them with zeros."""
        relative = to_relative(_sized(actions, self.action, "action"), state, self.relative_dims)
        return _padded(self.action.to_model(relative), self.max_action_dim)

    def actions_to_robot(
        self, actions: Num[np.ndarray, "*batch a max_j"], state: Num[np.ndarray, "*batch k"]
    ) -> Float32[np.ndarray, "*batch a j"]:
        """Turn a network's actions into robot units; ``state`` is the robot's (not normalised) at their start."""
        relative = self.action.to_robot(actions[..., : _dim(self.action)])
        return to_absolute(relative, state, self.relative_dims)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers for JSON; ``normalizers_from_dict`` takes them back exactly."""
        return vars(self) | {"action": _scale_to_dict(self.action), "state": _scale_to_dict(self.state)}


def normalizers_from_dict(values: dict[str, Any], *, where: str = "the normalisers") -> Normalizers:
    """Return the normalisers that ``to_dict`` described; InputError, which says ``where``, for what it never wrote."""
    with explained_damage(where):
        found = Normalizers(
            action=_scale_from_dict(values["action"]),
            state=_scale_from_dict(values["state"]),
            relative_dims=tuple(_whole(dim) for dim in values["relative_dims"]),
            max_action_dim=_whole(values["max_action_dim"]),
            max_state_dim=_whole(values["max_state_dim"]),
        )
        if found.num_actions > found.max_action_dim or found.num_states > found.max_state_dim:
            raise ValueError("a robot has more numbers than the network")
        if any(dim >= min(found.num_actions, found.num_states) for dim in found.relative_dims):
            raise ValueError(f"relative_dims are {found.relative_dims}")
        return found


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_DIM:
        raise ValueError(f"{str(value)[:40]} is no whole number from 0 to {MAX_DIM}")
    return value


def to_relative(
    actions: Num[np.ndarray, "*batch a j"], state: Num[np.ndarray, "*batch k"], dims: Sequence[int]
) -> Num[np.ndarray, "*batch a j"]:
    """Subtract the state at a block's start from some dimensions of all its actions."""
    return _shifted(actions, state, dims, -1)


def to_absolute(
    actions: Num[np.ndarray, "*batch a j"], state: Num[np.ndarray, "*batch k"], dims: Sequence[int]
) -> Num[np.ndarray, "*batch a j"]:
    """Undo ``to_relative``."""
    return _shifted(actions, state, dims, +1)


def measure_normalizers(
    dataset: RobotDataset, robot: RobotConfig, actions_per_block: int, *, max_rows: int = MAX_MEASURED_ROWS
) -> Normalizers:
    """Make the normalisers of a whole dataset, from its stored statistics where these serve.

    Relative actions are pooled over the ticks of a block: as DreamZero's files say where they have such blocks, else
    measured over episodes in a fixed random order until these have ``max_rows`` rows.
    Raises InputError for statistics or rows that are not finite.
    """
    names = STATISTICS[robot.normalization]
    kind = Spread if robot.normalization == "mean_std" else Quantiles
    action, state = (
        [_stored(dataset, column, name) for name in names] for column in (robot.action_column, robot.state_column)
    )
    if dims := list(robot.relative_dims):
        stored = read_relative_stats(dataset, robot, actions_per_block)
        if stored is None:
            samples = _sample_relative(dataset, robot, actions_per_block, max_rows)
            stored = {name: _measure(samples, name) for name in names}
        for values, name in zip(action, names, strict=True):
            values[dims] = stored[name]
    return Normalizers(
        action=kind(*action),
        state=kind(*state),
        relative_dims=robot.relative_dims,
        max_action_dim=robot.max_action_dim,
        max_state_dim=robot.max_state_dim,
    )


def read_vectors(dataset: RobotDataset, episode: int, column: str | None) -> Float32[np.ndarray, "t j"]:
    """Return a column of an episode as vectors, its parts joined; of 0 dimensions where ``column`` is None.

    Raises InputError naming the first row that holds a NaN or infinity.
    """
    length = int(dataset.lengths[episode])
    if column is None:
        return np.zeros((length, 0), np.float32)
    parts = [
        dataset.rows(episode, part.name).reshape(length, -1)[:, part.span].astype(np.float32, copy=False)
        for part in column_parts(column)
    ]
    values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    if not np.isfinite(values).all():
        row = int((~np.isfinite(values)).any(axis=1).argmax())
        raise InputError(
            f"{dataset.root}: column {column} of episode {episode} holds {values[row].tolist()} at row {row}; "
            "repair or leave out the episode"
        )
    return values


def _sample_relative(
    dataset: RobotDataset, robot: RobotConfig, actions_per_block: int, max_rows: int
) -> Float32[np.ndarray, "n d"]:
    """Return action[row + tick] - state[row] of the relative dimensions, for ticks 0..actions_per_block-1."""
    dims, samples, num_rows = list(robot.relative_dims), [], 0
    for episode in np.random.default_rng(0).permutation(dataset.num_episodes).tolist():
        if num_rows >= max_rows:
            break
        actions = read_vectors(dataset, episode, robot.action_column)[:, dims]
        state = read_vectors(dataset, episode, robot.state_column)[:, dims]
        if len(actions) >= actions_per_block:
            ahead = np.lib.stride_tricks.sliding_window_view(actions, actions_per_block, axis=0)  # [row dim tick]
            relative = ahead - state[: len(ahead), :, None]
            samples.append(relative.transpose(0, 2, 1).reshape(-1, len(dims)))
            num_rows += len(ahead)
    if not samples:
        raise InputError(f"{dataset.root} has no episode of {actions_per_block} rows, as long as one block")
    return np.concatenate(samples)


def _stored(dataset: RobotDataset, column: str | None, name: str) -> Float64[np.ndarray, " j"]:
    """Return a copy of one statistic of a column; nothing for no column."""
    values = np.concatenate(
        [
            np.array(dataset.stats(part.name)[name], np.float64).reshape(stored_dim(dataset, part.name))[part.span]
            for part in column_parts(column)
        ]
        or [np.zeros(0)]
    )
    if not np.isfinite(values).all():
        raise InputError(f"{dataset.root}: statistic {name} of column {column} is not finite: {values.tolist()}")
    return values


def _measure(samples: Float32[np.ndarray, "n d"], name: str) -> np.ndarray:
    if name in ("q01", "q99"):
        return np.quantile(samples, float(name[1:]) / 100, axis=0)
    if name in ("min", "max"):
        return getattr(samples, name)(axis=0)
    return getattr(samples, name)(axis=0, dtype=np.float64)


def _shifted(actions: np.ndarray, state: np.ndarray, dims: Sequence[int], sign: int) -> np.ndarray:
    moved = actions.copy()
    moved[..., list(dims)] += sign * state[..., None, list(dims)]
    return moved


def _sized(values: np.ndarray, scale: Scale, name: str) -> np.ndarray:
    if values.shape[-1] != _dim(scale):
        raise InputError(f"the {name} has {values.shape[-1]} dimensions, the dataset's has {_dim(scale)}")
    return values


def _padded(values: Float32[np.ndarray, "*batch j"], dim: int) -> np.ndarray:
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, dim - values.shape[-1])])


def _dim(scale: Scale) -> int:
    return len(scale.low if isinstance(scale, Quantiles) else scale.mean)


def _scale_to_dict(scale: Scale) -> dict[str, Any]:
    return {"kind": type(scale).__name__} | {name: values.tolist() for name, values in vars(scale).items()}


def _scale_from_dict(values: dict[str, Any]) -> Scale:
    kind = {"Quantiles": Quantiles, "Spread": Spread}[values["kind"]]
    numbers = {name: np.array(values[name], np.float64) for name in values if name != "kind"}
    if len({array.shape for array in numbers.values()}) > 1 or any(array.ndim != 1 for array in numbers.values()):
        raise ValueError(f"{', '.join(numbers)} have other lengths than one another")
    if not all((np.abs(array) < MAX_VALUE).all() for array in numbers.values()):
        raise ValueError(f"{', '.join(numbers)} hold what is no number")
    scale = kind(**numbers)
    widths = np.abs(scale.std if isinstance(scale, Spread) else scale.high - scale.low)
    if ((widths > 0) & (widths < MIN_WIDTH)).any():
        raise ValueError("a dimension varies by less than a number can say")
    return scale
