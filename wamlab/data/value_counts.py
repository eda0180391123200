"""Statistics of a stream of rows in bounded memory: moments exactly, quantiles from counts of values.

Values are counted one by one while few enough differ; beyond, neighbours share a count, by as many of the lowest
bits of their floating-point numbers as needed. So small, whole and rounded numbers stay exact, and what is lost
elsewhere is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64, Num, UInt64

VALUES_AT_ONCE = 2**21  # sorted together: 16 MiB
COUNTS_IN_ALL = 2**23  # shared by the dimensions: 128 MiB
FEWEST_COUNTS, MOST_COUNTS = 2**12, 2**17  # of one column
SIGN = np.uint64(1 << 63)


class ValueCounts:
    """How often each value of one column occurs."""

    def __init__(self, limit: int = MOST_COUNTS):
        self._limit = limit
        self._keys: UInt64[np.ndarray, " values"] = np.zeros(0, np.uint64)
        self._counts: Int64[np.ndarray, " values"] = np.zeros(0, np.int64)
        self._shift = 0

    @property
    def relative_error(self) -> float:
        """Return by what share of itself a quantile may be off: 0 where every value was counted on its own."""
        return 2.0 ** (self._shift - 53) if self._shift else 0.0

    def add(self, values: Float64[np.ndarray, " n"]) -> None:
        """Count finite values."""
        keys, counts = np.unique(_keys(values) >> np.uint64(self._shift), return_counts=True)
        self._merge(keys, counts)

    def merge(self, other: ValueCounts) -> None:
        """Add what another has counted."""
        shift = max(self._shift, other._shift)
        self._coarsen(shift)
        self._merge(*_collapsed(other._keys >> np.uint64(shift - other._shift), other._counts))

    def quantiles(self, shares: Sequence[float]) -> Float64[np.ndarray, " shares"]:
        """Return what ``np.quantile`` returns of all values, interpolated linearly."""
        ends = np.cumsum(self._counts)
        places = np.array(shares) * (ends[-1] - 1)
        below = np.floor(places)
        # Not halfway into a count of one value: that would be another value.
        middle = (1 << self._shift >> 1) if self._shift else 0
        values = _values((self._keys << np.uint64(self._shift)) + np.uint64(middle))
        low = values[np.searchsorted(ends, below, side="right")]
        high = values[np.searchsorted(ends, np.ceil(places), side="right")]
        return low + (high - low) * (places - below)

    def _merge(self, keys: np.ndarray, counts: np.ndarray) -> None:
        order = np.argsort(joined := np.concatenate([self._keys, keys]), kind="stable")
        self._keys, self._counts = _collapsed(joined[order], np.concatenate([self._counts, counts])[order])
        if len(self._keys) > self._limit:
            shift = self._shift
            while len(self._keys) > self._limit // 2:  # rarely, not at every addition
                shift += 1
                self._coarsen(shift)

    def _coarsen(self, shift: int) -> None:
        self._keys, self._counts = _collapsed(self._keys >> np.uint64(shift - self._shift), self._counts)
        self._shift = shift


def _keys(values: np.ndarray) -> np.ndarray:
    """Return numbers of the same order as the values, without a sign."""
    bits = (values.astype(np.float64) + 0.0).view(np.uint64)  # + 0.0: minus zero is zero
    return np.where(bits & SIGN, ~bits, bits | SIGN)


def _values(keys: np.ndarray) -> np.ndarray:
    return np.where(keys & SIGN, keys ^ SIGN, ~keys).view(np.float64)


def _collapsed(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join neighbours of equal key."""
    if not len(keys):
        return keys, counts
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[starts], np.add.reduceat(counts, starts)


class RunningStatistics:
    """Mean, spread, extremes and quantiles of each dimension of rows that come in parts."""

    def __init__(self, dim: int):
        self.dim = dim
        limit = min(max(COUNTS_IN_ALL // max(1, dim), FEWEST_COUNTS), MOST_COUNTS)
        self._values = [ValueCounts(limit) for _ in range(dim)]
        self._count = 0
        self._mean, self._squares = np.zeros(dim), np.zeros(dim)
        self._min, self._max = np.full(dim, np.inf), np.full(dim, -np.inf)
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0

    def add(self, rows: Num[np.ndarray, "n dim"]) -> None:
        """Take finite rows in."""
        self._waiting.append(rows)
        self._num_waiting += len(rows)
        if self._num_waiting * self.dim >= VALUES_AT_ONCE:
            self._take()

    def measure(self, shares: dict[str, float]) -> dict[str, np.ndarray]:
        """Return mean, std, min, max, count and the named quantiles, as ``measure_rows`` does of all rows at once."""
        self._take()
        found = {
            "mean": self._mean.copy(),
            "std": np.sqrt(self._squares / self._count),
            "min": self._min.copy(),
            "max": self._max.copy(),
            "count": np.array([self._count]),
        }
        quantiles = np.stack([values.quantiles(list(shares.values())) for values in self._values], axis=1)
        inside = np.clip(quantiles, self._min, self._max)
        return found | dict(zip(shares, inside, strict=True))

    def pooled(self, groups: int) -> RunningStatistics:
        """Return the statistics over ``groups`` equal parts of the dimensions, all taken as rows of one."""
        self._take()
        dim = self.dim // groups
        pool = RunningStatistics(dim)
        for group in range(groups):
            part = slice(group * dim, (group + 1) * dim)
            pool._merge_moments(self._count, self._mean[part], self._squares[part], self._min[part], self._max[part])
            for own, values in zip(pool._values, self._values[part], strict=True):
                own.merge(values)
        return pool

    @property
    def relative_error(self) -> float:
        """Return by what share of itself a quantile may be off at most."""
        self._take()
        return max((values.relative_error for values in self._values), default=0.0)

    @property
    def count(self) -> int:
        return self._count + self._num_waiting

    def _take(self) -> None:
        if not self._num_waiting:
            return
        rows = np.concatenate(self._waiting).astype(np.float64)
        self._waiting, self._num_waiting = [], 0
        mean = rows.mean(axis=0)
        squares = ((rows - mean) ** 2).sum(axis=0)
        self._merge_moments(len(rows), mean, squares, rows.min(axis=0), rows.max(axis=0))
        for values, column in zip(self._values, np.ascontiguousarray(rows.T), strict=True):
            values.add(column)

    def _merge_moments(
        self, count: int, mean: np.ndarray, squares: np.ndarray, least: np.ndarray, most: np.ndarray
    ) -> None:
        """Join moments of two parts (Chan, Golub and LeVeque 1979), which loses no digits as sums of squares do."""
        total = self._count + count
        apart = mean - self._mean
        self._mean = self._mean + apart * (count / total)
        self._squares = self._squares + squares + apart**2 * (self._count * count / total)
        self._count = total
        self._min, self._max = np.minimum(self._min, least), np.maximum(self._max, most)
