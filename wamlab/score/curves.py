"""Whether two recipes' loss curves keep together: a band around their difference that holds at all steps at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from wamlab.errors import InputError
from wamlab.score.parity import ALPHA, Parity, Verdict, compare_means


@dataclass(frozen=True)
class CurveParity:
    """A verdict on two recipes' losses over the same training seeds."""

    verdict: Verdict
    envelope: Float[np.ndarray, " t"]  # how far log losses may lie apart at each step after the first few
    difference: Float[np.ndarray, " t"]  # mean over seeds of log candidate - log baseline, smoothed
    low: Float[np.ndarray, " t"]  # of the band that holds all of the curve with chance 1 - alpha
    high: Float[np.ndarray, " t"]
    end: Parity  # of the mean log loss over the last tenth

    @property
    def sentence(self) -> str:
        """Say the verdict with its numbers."""
        reach = np.maximum(np.abs(self.low), np.abs(self.high)) / self.envelope
        return (
            f"{self.verdict}: the band of the log losses' difference reaches {reach.max():.2g} of the envelope; "
            f"at the end {self.end.sentence}"
        )

    def __str__(self) -> str:
        return self.sentence


def compare_curves(
    baseline: Float[np.ndarray, "s t"],
    candidate: Float[np.ndarray, "s t"],
    *,
    margin: float = 0.01,
    spread_factor: float = 1.0,
    smoothing: float = 0.9,
    alpha: float = ALPHA,
    num_resamples: int = 2000,
) -> CurveParity:
    """Compare the losses (above 0) of two recipes over the same training seeds, row for row.

    The envelope is ``margin`` (of log loss: 0.01 is 1 %), or where that is more, ``spread_factor`` times the standard
    deviation between baseline runs of different seeds (an A/A comparison). The band is studentised by sign flips of
    the seeds, the largest excursion over the curve after its first 1 / (1 - ``smoothing``) steps. "equivalent" if it
    lies inside the envelope and the ends are equivalent; "different" if it leaves the envelope altogether at some
    step, or the ends are different.
    Raises InputError below four seeds, whose sign flips cannot tell.
    """
    baseline, candidate = np.asarray(baseline, float), np.asarray(candidate, float)
    if baseline.shape != candidate.shape or baseline.ndim != 2 or len(baseline) < 4 or baseline.shape[1] < 2:
        raise InputError(
            "curves need the same four or more seeds and two or more steps on both sides, "
            f"got {baseline.shape} and {candidate.shape}"
        )
    if not (baseline.min() > 0 and candidate.min() > 0 and np.isfinite(baseline + candidate).all()):
        raise InputError("curves need finite losses above 0")
    first = min(round(1 / (1 - smoothing)) - 1, baseline.shape[1] - 1)  # before it little is averaged
    logs = [smoothed(np.log(losses), smoothing)[:, first:] for losses in (baseline, candidate)]
    change = logs[1] - logs[0]
    envelope = np.maximum(margin, spread_factor * logs[0].std(axis=0, ddof=1))
    mean, error = change.mean(axis=0), change.std(axis=0, ddof=1) / np.sqrt(len(change))
    reach = _largest_excursion(change - mean, alpha, num_resamples) * error
    last = slice(-max(1, baseline.shape[1] // 10), None)
    ends = [np.log(losses[:, last]).mean(axis=1) for losses in (baseline, candidate)]
    end = compare_means(*ends, margin=margin, alpha=alpha, metric="log loss")
    low, high = mean - reach, mean + reach
    verdict: Verdict = "not enough evidence"
    if (low > envelope).any() or (high < -envelope).any() or end.verdict == "different":
        verdict = "different"
    elif end.verdict == "equivalent" and (np.maximum(-low, high) < envelope).all():
        verdict = "equivalent"
    return CurveParity(verdict, envelope, mean, low, high, end)


def smoothed(curves: Float[np.ndarray, "s t"], smoothing: float) -> Float[np.ndarray, "s t"]:
    """Return running means that forget by ``smoothing`` (0..1) a step, corrected for their short beginning."""
    if not 0 <= smoothing < 1:
        raise InputError(f"smoothing is {smoothing}: give a number from 0 to below 1")
    total, weight, means = np.zeros(len(curves)), 0.0, np.empty_like(curves)
    for place in range(curves.shape[1]):
        total = smoothing * total + (1 - smoothing) * curves[:, place]
        weight = smoothing * weight + (1 - smoothing)
        means[:, place] = total / weight
    return means


def _largest_excursion(residuals: np.ndarray, alpha: float, num_resamples: int) -> float:
    """Return the quantile of max over the curve of |t| when each seed's residual may have either sign."""
    num_seeds = len(residuals)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (num_resamples, num_seeds))
    means = signs @ residuals / num_seeds
    spread = np.maximum(np.square(residuals).mean(axis=0) - np.square(means), 0) * num_seeds / (num_seeds - 1)
    errors = np.sqrt(spread / num_seeds)
    t = np.divide(np.abs(means), errors, out=np.zeros_like(means), where=errors > 0)
    return float(np.quantile(t.max(axis=1), 1 - alpha))
