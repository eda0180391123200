"""Step records as columns of numbers, and few enough of them to draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.lib.stride_tricks import sliding_window_view

SPLIT = "split/"  # prefix of the columns that add up to a step's time
CURVES = ("loss", "video_loss", "action_loss", "samples_per_s", "mfu", "memory_gib", "gradient_norm")
STEP_TIME = "step_s"
PERCENTILES = {"step_p50": 50, "step_p90": 90, "step_p99": 99}  # of the time of recent steps
RECENT_STEPS = 100  # that percentiles are taken over; all of a bucket where that is more
SMOOTH = "~"  # suffix of a column's smoothed twin
SMOOTH_BUCKETS = 10  # time constant of the smoothing, so that it looks the same at any length of run


class Columns:
    """Columns that grow by one row a record; a name that comes late, or is missing once, has NaN there."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.num_rows = 0
        self._arrays = {"step": np.full(1024, np.nan)}
        self._means_of: tuple = ()  # names and bucket size of the finished buckets' means below
        self._means = np.empty((0, 0))
        self.extend(records)

    @property
    def names(self) -> list[str]:
        return list(self._arrays)

    def __getitem__(self, name: str) -> Float[np.ndarray, " n"]:
        return self._arrays[name][: self.num_rows]

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append step records as ``metrics.jsonl`` holds them."""
        rows = [numbers_of(record) for record in records]
        start, end = self.num_rows, self.num_rows + len(rows)
        self._reserve(end, dict.fromkeys(name for row in rows for name in row))
        for name, array in self._arrays.items():
            array[start:end] = [row.get(name, np.nan) for row in rows]
        self.num_rows = end

    def bucket_means(self, names: Sequence[str], size: int) -> Float[np.ndarray, "c m"]:
        """Average the buckets of columns; those that are full are computed once."""
        if self._means_of != (tuple(names), size):
            self._means_of, self._means = (tuple(names), size), np.empty((len(names), 0))
        num_known = self._means.shape[1]
        fresh = means(np.stack([self[name][num_known * size :] for name in names]), size)
        found = np.concatenate([self._means, fresh], axis=1)
        self._means = found[:, : self.num_rows // size]
        return found

    def _reserve(self, num_rows: int, names: Iterable[str]) -> None:
        before = capacity = len(self._arrays["step"])
        while capacity < num_rows:
            capacity *= 2
        if capacity > before:
            for name, array in self._arrays.items():
                self._arrays[name] = np.full(capacity, np.nan)
                self._arrays[name][:before] = array
        for name in names:
            if name not in self._arrays:
                self._arrays[name] = np.full(capacity, np.nan)


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Pick what is drawn from a step record; time that no part claims becomes ``split/other``."""
    numbers = {name: float(record[name]) for name in ("step", STEP_TIME, *CURVES) if record.get(name) is not None}
    parts = {name: float(s) for name, s in (record.get("split_s") or {}).items() if s is not None}
    numbers |= {SPLIT + name: seconds for name, seconds in parts.items()}
    if parts and record.get("step_s") is not None:
        numbers[SPLIT + "other"] = max(0.0, record["step_s"] - sum(parts.values()))
    return numbers


def bucket_size(num_rows: int, max_buckets: int) -> int:
    """Return how many rows share a bucket: the smallest power of two that keeps to ``max_buckets``.

    It changes only each time the run doubles in length, so a chart that grows is mostly appended to.
    """
    size = 1
    while size * max_buckets < num_rows:
        size *= 2
    return size


def extremes(values: Float[np.ndarray, "... n"], size: int) -> Float[np.ndarray, "... m"]:
    """Keep the least and the greatest value of each bucket, in the order they came; NaN only if all are."""
    if size == 1:
        return values
    buckets = _bucketed(values, size)
    is_gap = np.isnan(buckets)
    low = np.where(is_gap, np.inf, buckets).argmin(axis=-1)
    high = np.where(is_gap, -np.inf, buckets).argmax(axis=-1)
    order = np.sort(np.stack([low, high], axis=-1), axis=-1)
    return np.take_along_axis(buckets, order, axis=-1).reshape(*values.shape[:-1], -1)


def means(values: Float[np.ndarray, "... n"], size: int) -> Float[np.ndarray, "... m"]:
    """Average each bucket over what it has."""
    buckets = _bucketed(values, size)
    is_known = ~np.isnan(buckets)
    count = is_known.sum(axis=-1)
    return np.where(count > 0, np.where(is_known, buckets, 0.0).sum(axis=-1) / np.maximum(count, 1), np.nan)


def smoothed(values: Float[np.ndarray, "... m"], window: int = SMOOTH_BUCKETS) -> Float[np.ndarray, "... m"]:
    """Average each value with those before it under weights that fall by e over ``window``."""
    weights = np.exp(-np.arange(3 * window)[::-1] / window)
    before = np.full((*values.shape[:-1], 3 * window - 1), np.nan)
    seen = sliding_window_view(np.concatenate([before, values], axis=-1), 3 * window, axis=-1)
    is_known = ~np.isnan(seen)
    total, weight = np.where(is_known, seen, 0.0) @ weights, is_known @ weights
    return np.where(weight > 0, total / np.maximum(weight, 1e-300), np.nan)


def percentiles(values: Float[np.ndarray, " n"], size: int, first_bucket: int = 0) -> Float[np.ndarray, "p m"]:
    """Take ``PERCENTILES`` of the last ``RECENT_STEPS`` values up to each bucket's end, of all in a larger bucket."""
    window = max(size, RECENT_STEPS)
    ends = np.minimum(np.arange(first_bucket + 1, -(-len(values) // size) + 1) * size, len(values))
    if not len(ends):
        return np.empty((len(PERCENTILES), 0))
    start = max(0, int(ends[0]) - window)
    missing = window - (int(ends[0]) - start)
    seen = np.concatenate([np.full(missing, np.nan), values[start:]])
    windows = sliding_window_view(seen, window)[ends - ends[0]]
    # Sorting puts NaN last, so that the known values of a window stand at its front.
    ordered, count = np.sort(windows, axis=1), (~np.isnan(windows)).sum(axis=1)
    places = [np.clip(np.ceil(share / 100 * count).astype(int) - 1, 0, None) for share in PERCENTILES.values()]
    return np.stack([ordered[np.arange(len(ends)), place] for place in places])


def drawable(columns: Columns, size: int, first_bucket: int = 0) -> dict[str, Float[np.ndarray, " rows"]]:
    """Return equally long columns to draw, from a bucket on: one row a bucket of 1, two rows a larger one.

    Curves keep their extremes and get a smoothed twin; the parts of a step are averaged, and of its time percentiles
    are taken.
    """
    twice = 1 if size == 1 else 2
    # The smoothing looks back three windows, so that drawing in parts gives what drawing at once gives.
    lookback = max(0, first_bucket - 3 * SMOOTH_BUCKETS)
    skipped = first_bucket - lookback
    steps = columns["step"][first_bucket * size :]
    if size == 1:
        drawn = {"step": steps}
    else:
        last = np.minimum(np.arange(size - 1, len(steps) + size - 1, size), len(steps) - 1)
        drawn = {"step": np.stack([steps[::size], steps[last]], axis=1).reshape(-1)}
    # All columns of a kind at once: a growing chart draws a bucket or two many times.
    if curves := [name for name in columns.names if name in CURVES]:
        values = np.stack([columns[name][first_bucket * size :] for name in curves])
        drawn |= zip(curves, extremes(values, size), strict=True)
        recent = columns.bucket_means(curves, size)[:, lookback:]
        smooth = smoothed(recent)[:, skipped:].repeat(twice, axis=1)
        drawn |= zip([name + SMOOTH for name in curves], smooth, strict=True)
    if parts := [name for name in columns.names if name.startswith(SPLIT)]:
        values = np.stack([columns[name][first_bucket * size :] for name in parts])
        drawn |= zip(parts, means(values, size).repeat(twice, axis=1), strict=True)
    if STEP_TIME in columns.names:
        found = percentiles(columns[STEP_TIME], size, first_bucket)
        drawn |= zip(PERCENTILES, found.repeat(twice, axis=1), strict=True)
    return drawn


def _bucketed(values: Float[np.ndarray, "... n"], size: int) -> Float[np.ndarray, "... m size"]:
    if num_missing := -values.shape[-1] % size:
        values = np.concatenate([values, np.full((*values.shape[:-1], num_missing), np.nan)], axis=-1)
    return values.reshape(*values.shape[:-1], -1, size)
