"""How much must be played before an equivalence test can give a verdict; asked before anything is run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wamlab.errors import InputError
from wamlab.score.student import NORMAL, t_quantile


@dataclass(frozen=True)
class Design:
    """A comparison as planned: with ``num_units`` on each side, equal ones are called so with chance ``power``."""

    num_units: int
    units: str
    margin: float
    alpha: float
    power: float

    def __str__(self) -> str:
        return (
            f"{self.num_units:,} {self.units} for a verdict within {self.margin:g} "
            f"(alpha {self.alpha:g}, power {self.power:g})"
        )


def episodes_needed(rate: float, *, margin: float, alpha: float = 0.05, power: float = 0.8) -> Design:
    """Return the episodes of each side for independent success rates near ``rate`` (0..1) to be found equivalent."""
    if not 0 < rate < 1:
        raise InputError(f"the expected success rate is {rate}: give a number between 0 and 1")
    return _design(2 * rate * (1 - rate), "unpaired episodes a side", margin, alpha, power)


def pairs_needed(discordance: float, *, margin: float, alpha: float = 0.05, power: float = 0.8) -> Design:
    """Return the episodes, played by both sides, if a share ``discordance`` (0..1) ends differently."""
    if not 0 < discordance <= 1:
        raise InputError(f"the share of episodes that end differently is {discordance}: give one above 0 and up to 1")
    return _design(discordance, "paired episodes", margin, alpha, power)


def error_pairs_needed(relative_spread: float, *, margin: float, alpha: float = 0.05, power: float = 0.8) -> Design:
    """Return the episodes for errors, from the paired differences' standard deviation over the baseline's mean."""
    return _by_student(relative_spread, "paired episodes", margin, alpha, power)


def seeds_needed(spread: float, *, margin: float, alpha: float = 0.05, power: float = 0.8) -> Design:
    """Return the training seeds, from the standard deviation of paired differences, in the margin's unit."""
    return _by_student(spread, "paired seeds", margin, alpha, power)


def curve_seeds_needed(
    spread: float, num_steps: int, *, margin: float, smoothing: float = 0.9, alpha: float = 0.05, power: float = 0.8
) -> Design:
    """Return the seeds for ``compare_curves``, from the largest standard deviation of smoothed paired log losses.

    As many places as are independent after smoothing share alpha and the chance of missing: more than is needed.
    """
    num_places = max(1, round(num_steps * (1 - smoothing)))
    design = _by_student(spread, "paired seeds", margin, alpha / 2 / num_places, 1 - (1 - power) / num_places)
    return Design(max(4, design.num_units), design.units, margin, alpha, power)


def _design(variance: float, units: str, margin: float, alpha: float, power: float) -> Design:
    _check(margin, alpha, power)
    z = NORMAL.inv_cdf(1 - alpha) + NORMAL.inv_cdf((1 + power) / 2)
    return Design(math.ceil(z * z * variance / margin**2), units, margin, alpha, power)


def _by_student(spread: float, units: str, margin: float, alpha: float, power: float) -> Design:
    """Find the number of pairs by Student's quantiles, first by doubling, then by halving."""
    _check(margin, alpha, power)
    if not 0 < spread < math.inf:
        raise InputError(f"the standard deviation of the differences is {spread}: give a number above 0")

    def is_enough(n: int) -> bool:
        t = t_quantile(1 - alpha, n - 1) + t_quantile((1 + power) / 2, n - 1)
        return t * t * spread**2 / margin**2 <= n

    high = 2
    while not is_enough(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return Design(high, units, margin, alpha, power)


def _check(margin: float, alpha: float, power: float) -> None:
    if not 0 < margin < 1:
        raise InputError(f"the margin is {margin}: give a number between 0 and 1")
    if not 0 < alpha < 0.5 or not 0 < power < 1:
        raise InputError(f"alpha {alpha} and power {power} must lie between 0 and 0.5, and 0 and 1")
