"""The statistics a dataset keeps of each episode, read from either version or measured where it keeps none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wamlab.data.json_files import read_json, walk_json_lines
from wamlab.data.layout import STATS_FILE
from wamlab.data.lerobot import RobotDataset
from wamlab.data.statistics import FRAMES_AN_EPISODE, ColourHistogram, as_lists, measure_rows
from wamlab.data.tables import open_table
from wamlab.errors import InputError

EPISODES_AT_ONCE = 64  # of which statistics are in memory
Stats = dict[str, dict[str, Any]]  # feature -> mean, std, ... as nested lists


def episode_stats(dataset: RobotDataset) -> Iterator[Stats]:
    """Yield the statistics of every episode, in order; those not stored are measured, colours on 100 frames.

    One at a time, so that a dataset may have more than memory holds.
    """
    stored = _StoredV3(dataset.root) if dataset.version == "v3.0" else _StoredV2(dataset.root)
    for episode, index in enumerate(dataset.episode_index.tolist()):
        yield stored.read(index) or _measured(dataset, episode)


def dataset_stats(dataset: RobotDataset, pools: Mapping[str, Pool]) -> Stats:
    """Return the statistics of the whole dataset: as stored, the columns' measured, the cameras' pooled."""
    path = dataset.root / STATS_FILE
    stats: Stats = dict(read_json(path)) if path.exists() else {}
    for name in dataset.features:
        if name not in stats and name in dataset.cameras:
            if name in pools:
                stats[name] = pools[name].measure()
        elif name not in stats and _is_numeric(dataset, name):
            stats[name] = as_lists(dataset.stats(name))
    return stats


class Pool:
    """Mean, std, min, max and count of many parts together; quantiles cannot be pooled."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, np.zeros(()), np.zeros(())  # of deviations from the mean
        self._min, self._max = np.array(np.inf), np.array(-np.inf)

    def add(self, part: Mapping[str, Any]) -> None:
        """Take in a part's statistics; one without count counts once."""
        mean, std, low, high = (np.array(part[name], np.float64) for name in ("mean", "std", "min", "max"))
        if (count := int(np.ravel(part.get("count", 1))[0])) < 1:
            return
        total, off = self._count + count, mean - self._mean
        self._squares = self._squares + count * std**2 + off**2 * (self._count * count / total)
        self._mean = self._mean + off * (count / total)
        self._min, self._max, self._count = np.minimum(self._min, low), np.maximum(self._max, high), total

    def measure(self) -> dict[str, Any]:
        """Return the statistics of all parts as nested lists."""
        values = {"mean": self._mean, "std": np.sqrt(self._squares / self._count), "min": self._min, "max": self._max}
        return as_lists({**values, "count": np.array([self._count])})


def _is_numeric(dataset: RobotDataset, name: str) -> bool:
    return dataset.has_column(name) and dataset.rows(0, name).dtype != object


class _StoredV2:
    """Finds an episode's line in episodes_stats.jsonl."""

    def __init__(self, root: Path):
        self._path = root / "meta/episodes_stats.jsonl"
        self._starts: dict[int, int] = {}  # byte at which each episode's line begins
        if self._path.exists():
            for start, record in walk_json_lines(self._path):
                if not isinstance(record.get("stats"), dict) or "episode_index" not in record:
                    raise InputError(f"{self._path} has a line without episode_index or stats: mend or delete it")
                self._starts[record["episode_index"]] = start

    def read(self, index: int) -> Stats | None:
        if index not in self._starts:
            return None
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            return json.loads(file.readline())["stats"]


class _StoredV3:
    """Finds an episode's row in the files under meta/episodes; quick where episodes are asked for in their order."""

    def __init__(self, root: Path):
        self._places: dict[int, tuple[Path, int]] = {}  # file and row of each episode
        self._path: Path | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._first, self._rows = 0, []  # rows in memory, and which row of the file the first one is
        for path in sorted((root / "meta/episodes").glob("*/*.parquet")):
            if not any(name.startswith("stats/") for name in open_table(path).schema_arrow.names):
                continue
            for row, index in enumerate(_read(path, ["episode_index"])["episode_index"].to_pylist()):
                self._places[index] = path, row

    def read(self, index: int) -> Stats | None:
        if index not in self._places:
            return None
        path, row = self._places[index]
        if path != self._path or row < self._first:
            file = open_table(path)
            names = [name for name in file.schema_arrow.names if name.startswith("stats/")]
            self._batches = file.iter_batches(EPISODES_AT_ONCE, columns=names, use_threads=False)
            self._path, self._first, self._rows = path, 0, []
        while row >= self._first + len(self._rows):
            self._first += len(self._rows)
            try:
                self._rows = next(self._batches).to_pylist()
            except (OSError, pa.ArrowException) as error:
                raise InputError(f"cannot read {path}: {error}") from error
        stats: Stats = {}
        for name, value in self._rows[row - self._first].items():
            feature, _, kind = name.removeprefix("stats/").rpartition("/")
            if value is not None:
                stats.setdefault(feature, {})[kind] = value
        return stats


def _read(path: Path, columns: list[str]) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"cannot read {path}: {error}") from error


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
