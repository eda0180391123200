"""How sure a mean over held-out clips is: bootstrap intervals over episodes, whose clips are not independent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from wamlab.errors import InputError

NUM_RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with the percentile interval that resampled episodes give it; nan where nothing was measured."""

    value: float
    low: float
    high: float
    num_episodes: int

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


def bootstrap_means(
    sums: Float[np.ndarray, " n *c"],
    counts: Float[np.ndarray, " n *c"],
    episodes: Sequence[int] | np.ndarray,
    *,
    change: Callable[[np.ndarray], np.ndarray] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> list[Interval]:
    """Return the interval of sum / count of each column, one column for arrays of one axis.

    Row i is a clip of ``episodes[i]``; whole episodes are drawn with replacement. ``change`` is applied to the means,
    e.g. to turn squared errors into decibels. Raises InputError for arrays that do not fit.
    """
    sums, counts, episodes = np.asarray(sums, float), np.asarray(counts, float), np.asarray(episodes)
    if sums.shape != counts.shape or len(sums) != len(episodes) or not len(sums):
        raise InputError(f"sums {sums.shape}, counts {counts.shape} and {len(episodes)} episodes do not fit")
    _, places = np.unique(episodes, return_inverse=True)
    num_episodes = int(places.max()) + 1
    by_episode = np.zeros((2, num_episodes, *sums.reshape(len(sums), -1).shape[1:]))
    np.add.at(by_episode[0], places, sums.reshape(len(sums), -1))
    np.add.at(by_episode[1], places, counts.reshape(len(counts), -1))
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(num_episodes, np.full(num_episodes, 1 / num_episodes), num_resamples).astype(float)
    change = change or (lambda means: means)
    values = change(_ratio(*by_episode.sum(axis=1)))
    drawn = change(_ratio(weights @ by_episode[0], weights @ by_episode[1]))
    edges = [_quantiles(column) for column in drawn.T]
    known = (by_episode[1] > 0).sum(axis=0)
    return [
        Interval(float(value), float(low), float(high), int(num))
        for value, (low, high), num in zip(values, edges, known, strict=True)
    ]


def _quantiles(drawn: np.ndarray) -> tuple[float, float]:
    drawn = drawn[~np.isnan(drawn)]  # resamples that hold no value of this column
    if not len(drawn):
        return np.nan, np.nan
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest")
    return float(low), float(high)


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
