"""Statistics of a whole dataset, relative actions included, in one pass over its rows with bounded memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.data.json_files import read_json, write_json
from wamlab.data.layout import STATS_FILE
from wamlab.data.lerobot import RobotDataset
from wamlab.data.modality import NamedSlice
from wamlab.data.relative_stats import RELATIVE_FILE, RELATIVE_TICKS_FILE, shared_parts
from wamlab.data.statistics import QUANTILES, as_lists
from wamlab.data.tables import as_array
from wamlab.data.value_counts import RunningStatistics
from wamlab.data.walk import walk_tables
from wamlab.errors import InputError

MAX_RELATIVE_EPISODES = 10_000  # drawn at random where there are more, as in DreamZero
NOT_NUMBERS = ("video", "image", "string", "language")
Stats = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Measured:
    """What ``measure_dataset`` found; statistics are mean, std, min, max, q01..q99 and count."""

    columns: Stats  # [dim]
    relative: Stats = field(default_factory=dict)  # action[row + tick] - state[row] by part, over all ticks [dim]
    relative_ticks: Stats = field(default_factory=dict)  # the same of each tick [tick, dim]
    relative_error: float = 0.0  # by which share of themselves quantiles may be off at most; else as numpy's


def measure_dataset(
    dataset: RobotDataset,
    *,
    num_ticks: int = 24,
    relative: Sequence[str] | None = None,
    max_relative_episodes: int = MAX_RELATIVE_EPISODES,
    seen: Callable[[int], object] = lambda num_rows: None,
) -> Measured:
    """Measure every column of numbers and the actions relative to the state at the start of ``num_ticks`` ticks.

    ``relative`` names parts of both action and state in modality.json, or "action" for the whole of both; None takes
    all such parts but grippers, as DreamZero does; an empty list or 0 ticks none. ``seen`` hears of rows as they pass.
    Raises InputError for values that are not finite, tables that are missing or damaged, and unknown parts.
    """
    if num_ticks < 0:
        raise InputError(f"num_ticks is {num_ticks}: give at least 0")
    names = [name for name, feature in dataset.features.items() if feature["dtype"] not in NOT_NUMBERS]
    parts = _relative_parts(dataset, relative) if num_ticks else {}
    chosen = set(np.random.default_rng(0).permutation(dataset.num_episodes)[:max_relative_episodes].tolist())
    columns: dict[str, RunningStatistics] = {}
    ticks = {name: RunningStatistics(num_ticks * (part[0].end - part[0].first)) for name, part in parts.items()}
    for episode, table in walk_tables(dataset, names):
        rows: dict[str, np.ndarray] = {}
        for name in table.column_names:
            if name in names:
                values = as_array(table[name], f"column {name} of episode {episode}").reshape(len(table), -1)
                if values.dtype == object:
                    raise InputError(f"column {name} of episode {episode} holds texts, info.json says numbers")
                _check_finite(values, name, episode, dataset.root)
                rows[name] = values
                running = columns.setdefault(name, RunningStatistics(values.shape[1]))
                if values.shape[1] != running.dim:
                    raise InputError(
                        f"column {name} of episode {episode} has {values.shape[1]} dimensions, before {running.dim}"
                    )
                running.add(values)
        if episode in chosen and len(table) >= num_ticks:
            for name, (action, state) in parts.items():
                if action.column in rows and state.column in rows:
                    ticks[name].add(_relative(rows[action.column], rows[state.column], action, state, num_ticks))
        seen(len(table))
    return _measured(columns, {name: running for name, running in ticks.items() if running.count}, num_ticks)


def _measured(columns: dict[str, RunningStatistics], ticks: dict[str, RunningStatistics], num_ticks: int) -> Measured:
    per_tick: Stats = {}
    for name, running in ticks.items():
        found = running.measure(QUANTILES)
        per_tick[name] = {
            kind: values if kind == "count" else values.reshape(num_ticks, -1) for kind, values in found.items()
        }
    pooled = {name: running.pooled(num_ticks) for name, running in ticks.items()}
    return Measured(
        columns={name: running.measure(QUANTILES) for name, running in columns.items()},
        relative={name: running.measure(QUANTILES) for name, running in pooled.items()},
        relative_ticks=per_tick,
        relative_error=max([r.relative_error for r in (*columns.values(), *ticks.values(), *pooled.values())] or [0.0]),
    )


def write_stats(dataset: RobotDataset, measured: Measured) -> list[Path]:
    """Put the statistics into ``meta``, each file whole or not at all, and return the files.

    What stats.json says of cameras stays. An open dataset still has the old ones: open it again.
    Raises InputError for a folder that cannot be written to.
    """
    path = dataset.root / STATS_FILE
    stored = read_json(path) if path.exists() else {}
    stored = stored if isinstance(stored, dict) else {}
    files: dict[str, Mapping[str, Any]] = {STATS_FILE: stored | _listed(measured.columns)}
    if measured.relative:
        files |= {RELATIVE_FILE: _listed(measured.relative), RELATIVE_TICKS_FILE: _listed(measured.relative_ticks)}
    for name, content in files.items():
        _replace_json(dataset.root / name, content)
    return [dataset.root / name for name in files]


def _replace_json(path: Path, content: Mapping[str, Any]) -> None:
    partial: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
        os.close(descriptor)
        partial = Path(name)
        write_json(partial, content)
        partial.chmod(0o644)  # mkstemp makes it private
        partial.replace(path)
    except OSError as error:
        if partial is not None:
            partial.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror or error}; make its folder writable") from error


def _listed(stats: Stats) -> dict[str, Any]:
    return {name: as_lists(values) for name, values in stats.items()}


def _relative(
    actions: np.ndarray, states: np.ndarray, action: NamedSlice, state: NamedSlice, num_ticks: int
) -> np.ndarray:
    """Return action[row + tick] - state[row] as rows of [tick x dim], for rows with all ticks ahead."""
    ahead = np.lib.stride_tricks.sliding_window_view(actions[:, action.span], num_ticks, axis=0)  # [row dim tick]
    relative = ahead - states[: len(ahead), state.span, None]
    return np.ascontiguousarray(relative.transpose(0, 2, 1)).reshape(len(ahead), -1)


def _relative_parts(dataset: RobotDataset, names: Sequence[str] | None) -> dict[str, tuple[NamedSlice, NamedSlice]]:
    shared = shared_parts(dataset)
    if names is None:
        return {name: parts for name, parts in shared.items() if "gripper" not in name}
    if unknown := [name for name in names if name not in shared]:
        known = ", ".join(shared) or "none"
        raise InputError(
            f"{dataset.root} has no part {unknown[0]!r} of one size in both action and state; there is {known}"
        )
    return {name: shared[name] for name in names}


def _check_finite(values: np.ndarray, name: str, episode: int, root: Path) -> None:
    if values.dtype.kind == "f" and not (is_finite := np.isfinite(values).all(axis=1)).all():
        row = int((~is_finite).argmax())
        raise InputError(
            f"{root}: column {name} of episode {episode} holds {values[row].tolist()} at row {row}; "
            "repair or leave out the episode (wamlab data check lists all such places)"
        )
