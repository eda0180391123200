"""The statistics a dataset keeps of each episode, read from either version or measured where it keeps none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wamlab.data.json_files import read_json, read_json_lines
from wamlab.data.layout import STATS_FILE
from wamlab.data.lerobot import RobotDataset
from wamlab.data.statistics import FRAMES_AN_EPISODE, ColourHistogram, as_lists, measure_rows
from wamlab.errors import InputError

Stats = dict[str, dict[str, Any]]  # feature -> mean, std, ... as nested lists


def episode_stats(dataset: RobotDataset) -> list[Stats]:
    """Return the statistics of every episode, in order; those not stored are measured, colours on 100 frames."""
    stored = _stored_v3(dataset) if dataset.version == "v3.0" else _stored_v2(dataset)
    return [
        stored.get(index) or _measured(dataset, episode) for episode, index in enumerate(dataset.episode_index.tolist())
    ]


def dataset_stats(dataset: RobotDataset, episodes: list[Stats]) -> Stats:
    """Return the statistics of the whole dataset: as stored, the columns' measured, the cameras' pooled."""
    path = dataset.root / STATS_FILE
    stats: Stats = dict(read_json(path)) if path.exists() else {}
    for name in dataset.features:
        if name not in stats and name in dataset.cameras:
            if found := [values[name] for values in episodes if name in values]:
                stats[name] = pooled(found)
        elif name not in stats and _is_numeric(dataset, name):
            stats[name] = as_lists(dataset.stats(name))
    return stats


def pooled(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Pool mean, std, min, max and count of several parts; quantiles cannot be."""
    arrays = {name: np.array([part[name] for part in parts], np.float64) for name in ("mean", "std", "min", "max")}
    counts = np.array([np.ravel(part.get("count", 1))[0] for part in parts])
    weights = (counts / counts.sum()).reshape(-1, *[1] * (arrays["mean"].ndim - 1))
    mean = (weights * arrays["mean"]).sum(axis=0)
    variance = (weights * (arrays["std"] ** 2 + (arrays["mean"] - mean) ** 2)).sum(axis=0)
    values = {
        "mean": mean,
        "std": np.sqrt(variance),
        "min": arrays["min"].min(axis=0),
        "max": arrays["max"].max(axis=0),
    }
    return as_lists({**values, "count": np.array([int(counts.sum())])})


def _is_numeric(dataset: RobotDataset, name: str) -> bool:
    return dataset.has_column(name) and dataset.rows(0, name).dtype != object


def _stored_v2(dataset: RobotDataset) -> dict[int, Stats]:
    path = dataset.root / "meta/episodes_stats.jsonl"
    if not path.exists():
        return {}
    records = read_json_lines(path)
    if not all(isinstance(record.get("stats"), dict) and "episode_index" in record for record in records):
        raise InputError(f"{path} has a line without episode_index or stats: mend or delete it")
    return {record["episode_index"]: record["stats"] for record in records}


def _stored_v3(dataset: RobotDataset) -> dict[int, Stats]:
    found: dict[int, Stats] = {}
    for path in sorted((dataset.root / "meta/episodes").glob("*/*.parquet")):
        try:
            names = [name for name in pq.read_schema(path).names if name.startswith("stats/")]
            table = pq.read_table(path, columns=["episode_index", *names]) if names else None
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"cannot read {path}: {error}") from error
        for row in table.to_pylist() if table is not None else []:
            stats: Stats = {}
            for name in names:
                feature, _, kind = name.removeprefix("stats/").rpartition("/")
                if row[name] is not None:
                    stats.setdefault(feature, {})[kind] = row[name]
            found[row["episode_index"]] = stats
    return found


def _measured(dataset: RobotDataset, episode: int) -> Stats:
    length = int(dataset.lengths[episode])
    rows = np.unique(np.linspace(0, length - 1, min(length, FRAMES_AN_EPISODE)).astype(int))
    stats: Stats = {}
    for name in dataset.features:
        if name in dataset.cameras:
            colours = ColourHistogram()
            colours.add(dataset.frames(episode, name, rows))
            stats[name] = as_lists(colours.measure())
        elif (values := dataset.rows(episode, name)).dtype != object:
            stats[name] = as_lists(measure_rows(values))
    return stats
