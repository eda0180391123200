"""Means, spreads and quantiles of columns and frames, under the names LeRobot stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
FRAMES_AN_EPISODE = 100  # enough for colour statistics; lerobot samples about as many
LARGE_PX, SMALL_PX = 300, 150  # frames larger than the one are thinned towards the other


def measure_rows(rows: Shaped[np.ndarray, "n ..."]) -> dict[str, np.ndarray]:
    """Measure each dimension over rows [n] or [n, dim]: mean, std, min, max, q01..q99 [dim], count [1]."""
    flat = rows.reshape(len(rows), -1)
    flat = flat.astype(np.int64) if flat.dtype == bool else flat
    quantiles = np.quantile(flat, list(QUANTILES.values()), axis=0)
    return {
        "mean": flat.mean(axis=0, dtype=np.float64),
        "std": flat.std(axis=0, dtype=np.float64),
        "min": flat.min(axis=0).astype(np.float64),
        "max": flat.max(axis=0).astype(np.float64),
        "count": np.array([len(flat)]),
        **dict(zip(QUANTILES, quantiles.astype(np.float64), strict=True)),
    }


class ColourHistogram:
    """How often each channel of RGB frames takes each of its 256 values; histograms add up."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, 256), np.int64)
        self._num_frames = 0

    def add(self, frames: UInt8[np.ndarray, "t h w 3"]) -> None:
        """Count the pixels of evenly spread, thinned frames of an episode."""
        rows = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), FRAMES_AN_EPISODE)).astype(int))
        longer = max(frames.shape[1:3])
        stride = longer // SMALL_PX if longer > LARGE_PX else 1
        sample = frames[rows, ::stride, ::stride]
        self._num_frames += len(sample)
        for channel in range(3):
            self._counts[channel] += np.bincount(sample[..., channel].ravel(), minlength=256)

    def merge(self, other: ColourHistogram) -> None:
        """Add the counts of another histogram."""
        self._counts += other._counts
        self._num_frames += other._num_frames

    def measure(self) -> dict[str, np.ndarray]:
        """Return mean, std, min, max, q01..q99 of the channels in 0..1 [3, 1, 1] and count of frames [1]."""
        levels = np.arange(256) / 255
        share = self._counts / self._counts.sum(axis=1, keepdims=True)
        cumulated = np.cumsum(self._counts, axis=1)
        mean = share @ levels
        measured = {
            "mean": mean,
            "std": np.sqrt(np.maximum(share @ levels**2 - mean**2, 0)),
            "min": np.array([levels[counts > 0][0] for counts in self._counts]),
            "max": np.array([levels[counts > 0][-1] for counts in self._counts]),
        }
        for name, quantile in QUANTILES.items():
            measured[name] = levels[(cumulated < quantile * cumulated[:, -1:]).sum(axis=1)]
        shaped = {name: values.reshape(3, 1, 1) for name, values in measured.items()}
        return {**shaped, "count": np.array([self._num_frames])}


def as_lists(stats: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return statistics as nested lists for JSON and parquet."""
    return {name: values.tolist() for name, values in stats.items()}
