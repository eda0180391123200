"""Equivalence of two policies or recipes: two one-sided tests against a margin that is stated first (TOST).

Absence of a significant difference is no equivalence. A verdict is "equivalent" where the interval of the difference
lies inside the margin, "different" where it does not and zero is refused, and otherwise "not enough evidence".
Two recipes differ by more than their episodes: the unit of such a claim is the pair of training seeds
(``compare_means``); the other functions speak of the very checkpoints compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

from wamlab.errors import InputError
from wamlab.score.student import NORMAL, t_cdf

Verdict = Literal["equivalent", "different", "not enough evidence"]
ALPHA = 0.05  # chance of calling "equivalent" what differs by the margin; also of "different" what does not differ


@dataclass(frozen=True)
class Parity:
    """A verdict on candidate minus baseline, with its numbers; ``margin`` was chosen before they were seen."""

    verdict: Verdict
    metric: str
    baseline: float
    candidate: float
    difference: float  # candidate minus baseline, in the margin's unit
    low: float  # of the 1 - 2 alpha interval, which two one-sided tests at alpha amount to
    high: float
    margin: float
    p_equivalent: float  # largest of the two one-sided tests
    p_different: float  # two-sided test of no difference
    num_units: int  # episodes, pairs or seeds; of the smaller side
    units: str
    alpha: float = ALPHA

    @property
    def sentence(self) -> str:
        """Say the verdict with its numbers."""
        reach = f"{self.low:+.3g} to {self.high:+.3g}"
        numbers = (
            f"{self.metric} {self.candidate:.4g} against {self.baseline:.4g}, a difference of {self.difference:+.3g} "
            f"({1 - 2 * self.alpha:.0%} interval {reach}; margin {self.margin:g}; {self.num_units:,} {self.units})"
        )
        return f"{self.verdict}: {numbers}"

    def __str__(self) -> str:
        return self.sentence


def compare_rates(
    baseline_successes: int,
    baseline_trials: int,
    candidate_successes: int,
    candidate_trials: int,
    *,
    margin: float,
    alpha: float = ALPHA,
) -> Parity:
    """Compare success rates of independent episodes, by Farrington and Manning's score test (1990).

    Raises InputError for a margin outside 0..1 or counts that are none.
    """
    _check_margin(margin, alpha)
    for successes, trials in ((baseline_successes, baseline_trials), (candidate_successes, candidate_trials)):
        if not 0 <= successes <= trials or trials < 1:
            raise InputError(f"{successes} successes of {trials} episodes are no success rate")
    a, b = baseline_successes / baseline_trials, candidate_successes / candidate_trials

    def score(difference: float) -> float:
        rate = _restricted_rate(a, baseline_trials, b, candidate_trials, difference)
        moved = rate + difference
        variance = rate * (1 - rate) / baseline_trials + moved * (1 - moved) / candidate_trials
        return _ratio(b - a - difference, variance)

    num_units = min(baseline_trials, candidate_trials)
    return _judge("success", a, b, score, NORMAL.cdf, margin, alpha, (-1.0, 1.0), num_units, "unpaired episodes")


def compare_paired_rates(
    baseline: Bool[np.ndarray, " n"], candidate: Bool[np.ndarray, " n"], *, margin: float, alpha: float = ALPHA
) -> Parity:
    """Compare successes of the same episodes played by both, by Tango's score test (1998); McNemar's at zero."""
    _check_margin(margin, alpha)
    baseline, candidate = _pair(baseline, candidate, 1)
    n = len(baseline)
    lost, won = int((baseline & ~candidate).sum()), int((candidate & ~baseline).sum())

    def score(difference: float) -> float:
        # Maximum likelihood of "only the baseline succeeds", given the difference: root of a quadratic.
        linear = -won - lost + (2 * n - won + lost) * difference
        constant = -lost * difference * (1 - difference)
        rate = (math.sqrt(max(0.0, linear * linear - 8 * n * constant)) - linear) / (4 * n)
        variance = n * (2 * rate + difference * (1 - difference))
        return _ratio(won - lost - n * difference, variance)

    rates = float(baseline.mean()), float(candidate.mean())
    return _judge("success", *rates, score, NORMAL.cdf, margin, alpha, (-1.0, 1.0), n, "paired episodes")


def compare_means(
    baseline: Float[np.ndarray, " n"],
    candidate: Float[np.ndarray, " n"],
    *,
    margin: float,
    alpha: float = ALPHA,
    metric: str = "mean",
    units: str = "paired seeds",
) -> Parity:
    """Compare the means of paired numbers by Student's t, e.g. success or log loss of the same training seeds.

    ``margin`` is in the numbers' own unit: 0.05 of success rates, 0.01 of log losses (1 %).
    """
    _check_margin(margin, alpha)
    baseline, candidate = _pair(baseline, candidate, 2)
    change = candidate - baseline
    mean, error = float(change.mean()), float(change.std(ddof=1) / math.sqrt(len(change)))

    def score(difference: float) -> float:
        return _ratio(mean - difference, error * error)

    def cdf(t: float) -> float:
        return t_cdf(t, len(change) - 1)

    room = (mean - 1e3 * error - margin, mean + 1e3 * error + margin)
    means = float(baseline.mean()), float(candidate.mean())
    return _judge(metric, *means, score, cdf, margin, alpha, room, len(change), units)


def compare_errors(
    baseline: Float[np.ndarray, " n"],
    candidate: Float[np.ndarray, " n"],
    *,
    margin: float,
    alpha: float = ALPHA,
    num_resamples: int = 0,
    seed: int = 0,
) -> Parity:
    """Compare open-loop errors of the same episodes, relative to the baseline's mean: 0.02 is 2 % more error.

    The ratio of means is tested by Fieller's paired t or, with ``num_resamples``, by a paired bootstrap, which does
    not lean on normal means. One number an episode: clips of one episode are not independent.
    """
    _check_margin(margin, alpha)
    baseline, candidate = _pair(baseline, candidate, 2)
    if not baseline.mean() > 0 or baseline.min() < 0 or candidate.min() < 0:
        raise InputError("errors to compare must not be negative, and the baseline's not all zero")
    n = len(baseline)

    def fieller(difference: float) -> float:
        residual = candidate - (1 + difference) * baseline
        return _ratio(float(residual.mean()), float(residual.var(ddof=1)) / n)

    def cdf(t: float) -> float:
        return NORMAL.cdf(t) if num_resamples else t_cdf(t, n - 1)

    room = (-1.0, float(candidate.mean() / baseline.mean()) * 10 + 10)
    score, units = fieller, "paired episodes"
    if num_resamples:
        score = _bootstrap_score(baseline, candidate, num_resamples, seed)
        units = f"paired episodes, bootstrapped {num_resamples} times"
    means = float(baseline.mean()), float(candidate.mean())
    difference = means[1] / means[0] - 1
    return _judge("action error", *means, score, cdf, margin, alpha, room, n, units, difference)


def _bootstrap_score(
    baseline: np.ndarray, candidate: np.ndarray, num_resamples: int, seed: int
) -> Callable[[float], float]:
    """Return the normal score of the share of resampled ratios above a difference; few resamples are never sure."""
    rng, n = np.random.default_rng(seed), len(baseline)
    rows = (rng.integers(0, n, n) for _ in range(num_resamples))
    drawn = np.sort([candidate[row].mean() / baseline[row].mean() - 1 for row in rows])
    least = 0.5 / (num_resamples + 1)

    def score(difference: float) -> float:
        below = (np.searchsorted(drawn, difference, "left") + np.searchsorted(drawn, difference, "right")) / 2
        share = (num_resamples - float(below) + 0.5) / (num_resamples + 1)
        return NORMAL.inv_cdf(min(max(share, least), 1 - least))

    return score


def _judge(
    metric: str,
    baseline: float,
    candidate: float,
    score: Callable[[float], float],
    cdf: Callable[[float], float],
    margin: float,
    alpha: float,
    room: tuple[float, float],
    num_units: int,
    units: str,
    difference: float | None = None,
) -> Parity:
    """Decide by a score that falls with the difference it is asked about, and whose ``cdf`` is known."""
    at_most = cdf(score(margin))  # that the difference is the margin or more
    at_least = 1 - cdf(score(-margin))  # that it is minus the margin or less
    p_equivalent = max(at_most, at_least)
    middle = cdf(score(0.0))
    p_different = min(1.0, 2 * min(middle, 1 - middle))
    verdict: Verdict = "not enough evidence"
    if p_equivalent < alpha:
        verdict = "equivalent"
    elif p_different < alpha:
        verdict = "different"
    ends = [_solve(lambda d, share=share: cdf(score(d)) - share, *room) for share in (1 - alpha, alpha)]
    difference = candidate - baseline if difference is None else difference
    return Parity(
        verdict, metric, baseline, candidate, difference, ends[0], ends[1], margin, p_equivalent, p_different,
        num_units, units, alpha,
    )  # fmt: skip


def _restricted_rate(a: float, num_a: int, b: float, num_b: int, difference: float) -> float:
    """Return the baseline's most likely rate if the candidate's is higher by ``difference``.

    The middle root of a cubic, in its trigonometric form (Farrington and Manning 1990, appendix).
    """
    share = num_a / num_b
    cubic = 1 + share
    square = -(1 + share + b + share * a + difference * (share + 2)) / (3 * cubic)
    linear = (difference**2 + difference * (2 * b + share + 1) + b + share * a) / (3 * cubic)
    constant = -b * difference * (1 + difference) / (2 * cubic)
    v = square**3 - square * linear * 1.5 + constant
    u = math.copysign(math.sqrt(max(0.0, square**2 - linear)), v)
    angle = (math.pi + math.acos(min(1.0, max(-1.0, v / u**3)))) / 3 if u else 0.0
    rate = 2 * u * math.cos(angle) - square - difference
    return min(max(rate, 0.0, -difference), 1.0, 1 - difference)


def _solve(falling: Callable[[float], float], low: float, high: float) -> float:
    """Find where a falling function crosses zero between two places, or the end it is nearest to crossing at."""
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def _ratio(change: float, variance: float) -> float:
    if variance > 0:
        return change / math.sqrt(variance)
    return math.copysign(math.inf, change) if change else 0.0


def _pair(baseline: np.ndarray, candidate: np.ndarray, least: int) -> tuple[np.ndarray, np.ndarray]:
    baseline, candidate = np.asarray(baseline), np.asarray(candidate)
    if baseline.shape != candidate.shape or baseline.ndim != 1 or len(baseline) < least:
        raise InputError(
            f"a paired comparison needs {least} or more numbers of each side in the same order, "
            f"got shapes {baseline.shape} and {candidate.shape}"
        )
    if not (np.isfinite(baseline).all() and np.isfinite(candidate).all()):
        raise InputError("a paired comparison needs finite numbers")
    return baseline, candidate


def _check_margin(margin: float, alpha: float) -> None:
    if not 0 < margin < 1:
        raise InputError(f"the margin is {margin}: give a number between 0 and 1, before looking at the numbers")
    if not 0 < alpha < 0.5:
        raise InputError(f"alpha is {alpha}: give a number between 0 and 0.5")
