"""How often the parity verdicts are right, over simulated comparisons whose truth is known.

    wamlab bench parity [--quick] [--json]

Each comparison's size is computed before it runs. Equal: both sides have the same success and errors and must be
called "equivalent". Worse: the candidate succeeds 10 points less often, or errs 5 % more, and must be called
"different". The figures are the worst of the kinds. 200 repeats of each, 1,000 without --quick.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from wamlab.lab.table import Table
from wamlab.score.curves import CurveParity, compare_curves
from wamlab.score.parity import Parity, compare_errors, compare_means, compare_paired_rates, compare_rates
from wamlab.score.sample_size import (
    curve_seeds_needed,
    episodes_needed,
    error_pairs_needed,
    pairs_needed,
    seeds_needed,
)
from wamlab.score.success import wilson_interval

POWER = 0.99  # asked for, so that 95 % of 200 repeats are right with room for chance
RATE, RATE_MARGIN, RATE_LOSS = 0.8, 0.05, -0.10
ERROR_MARGIN, ERROR_LOSS = 0.025, 0.05
DISCORDANCE = 0.2  # share of equal policies' episodes that end differently, by other sampling noise
ERROR_SPREAD = 0.3  # of paired errors of one episode, over the mean error
SEED_SPREAD, SEED_MARGIN = 0.03, 0.05  # of success between training seeds
CURVE_SPREAD, CURVE_NOISE = 0.004, 0.01  # of paired log losses between seeds; of each step's loss
CURVE_STEPS, CURVE_MARGIN, CURVE_LOSS = 200, 0.01, 0.03  # log loss
SMOOTH_SPREAD = float(np.hypot(CURVE_SPREAD, CURVE_NOISE * np.sqrt(2 * 0.1 / 1.9)))  # what smoothing by 0.9 leaves

NUM_UNPAIRED = episodes_needed(RATE, margin=RATE_MARGIN, power=POWER).num_units
NUM_PAIRED = pairs_needed(DISCORDANCE, margin=RATE_MARGIN, power=POWER).num_units
NUM_SEEDS = seeds_needed(SEED_SPREAD, margin=SEED_MARGIN, power=POWER).num_units
NUM_ERRORS = error_pairs_needed(ERROR_SPREAD, margin=ERROR_MARGIN, power=POWER).num_units
NUM_CURVES = curve_seeds_needed(SMOOTH_SPREAD, CURVE_STEPS, margin=CURVE_MARGIN, power=POWER).num_units

Draw = Callable[[np.random.Generator, bool], Parity | CurveParity]


def paired_successes(rng: np.random.Generator, num: int, loss: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw outcomes of the same episodes: the candidate's differ by chance, both ways, and by what it lost."""
    cells = [DISCORDANCE / 2 - min(loss, 0), DISCORDANCE / 2]  # only the baseline, only the candidate succeeds
    cells += [RATE - cells[0], 1 - RATE - cells[1]]
    cell = rng.choice(4, num, p=cells)
    return np.isin(cell, (0, 2)), np.isin(cell, (1, 2))


def unpaired(rng: np.random.Generator, is_worse: bool) -> Parity:
    num = NUM_UNPAIRED
    rates = RATE, RATE + (RATE_LOSS if is_worse else 0)
    a, b = (int(rng.binomial(num, rate)) for rate in rates)
    return compare_rates(a, num, b, num, margin=RATE_MARGIN)


def paired(rng: np.random.Generator, is_worse: bool) -> Parity:
    num = NUM_PAIRED
    return compare_paired_rates(*paired_successes(rng, num, RATE_LOSS if is_worse else 0), margin=RATE_MARGIN)


def seeds(rng: np.random.Generator, is_worse: bool) -> Parity:
    num = NUM_SEEDS
    shared = rng.normal(RATE, 0.05, num)  # what a seed does to both
    change = rng.normal(RATE_LOSS if is_worse else 0, SEED_SPREAD, num)
    return compare_means(shared, shared + change, margin=SEED_MARGIN, metric="success")


def errors(rng: np.random.Generator, is_worse: bool, *, num_resamples: int = 0) -> Parity:
    num = NUM_ERRORS
    episode = rng.lognormal(0, 0.5, num)  # some are hard for both
    episode /= episode.mean()
    spread = ERROR_SPREAD / np.sqrt(2) / np.exp(0.5**2 / 2)
    a, b = (episode * rng.gamma(spread**-2, spread**2, num) for _ in range(2))
    return compare_errors(a, b * (1 + ERROR_LOSS * is_worse), margin=ERROR_MARGIN, num_resamples=num_resamples)


def bootstrapped_errors(rng: np.random.Generator, is_worse: bool) -> Parity:
    return errors(rng, is_worse, num_resamples=400)


def curves(rng: np.random.Generator, is_worse: bool) -> CurveParity:
    num, num_steps = NUM_CURVES, CURVE_STEPS
    steps = np.arange(num_steps)
    course = np.log(0.2 + np.exp(-steps / 40)) + rng.normal(0, 0.02, (num, 1))
    apart = rng.normal(0, CURVE_SPREAD, (num, 1))
    noise = rng.normal(0, CURVE_NOISE, (2, num, num_steps))
    worse = CURVE_LOSS * is_worse * steps / num_steps
    return compare_curves(
        np.exp(course + noise[0]), np.exp(course + apart + worse + noise[1]), margin=CURVE_MARGIN, num_resamples=500
    )


KINDS: dict[str, Draw] = {
    "success, unpaired": unpaired,
    "success, paired": paired,
    "success, by seeds": seeds,
    "action error, t": errors,
    "action error, bootstrap": bootstrapped_errors,
    "loss curves": curves,
}


def run(*, is_quick: bool) -> dict[str, Any]:
    """Judge every kind of comparison; return the worst shares of right verdicts, and each kind's."""
    start_s = time.perf_counter()
    num_repeats = 200 if is_quick else 1000
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    for name, draw in KINDS.items():
        row: dict[str, Any] = {"comparison": name}
        for truth, wanted in (("equal", "equivalent"), ("worse", "different")):
            rng = np.random.default_rng([len(rows), truth == "worse"])
            found = [draw(rng, truth == "worse") for _ in range(num_repeats)]
            verdicts = [parity.verdict for parity in found]
            num_right = verdicts.count(wanted)
            low, high = wilson_interval(num_right, num_repeats)
            sample = found[0].end if isinstance(found[0], CurveParity) else found[0]
            row |= {"units": sample.num_units, "margin": sample.margin}
            row |= {f"{truth}: right": num_right / num_repeats, f"{truth}: 95 %": f"{low:.3f} to {high:.3f}"}
            row[f"{truth}: undecided"] = verdicts.count("not enough evidence") / num_repeats
            figures[f"right_when_{truth}, {name}"] = num_right / num_repeats
        rows.append(row)
    print(f"\n{num_repeats} repeats of each, planned with power {POWER}")
    print(Table(rows))
    for truth in ("equal", "worse"):
        figures[f"right_when_{truth}"] = min(row[f"{truth}: right"] for row in rows)
    figures["repeats"] = num_repeats
    figures["minutes"] = (time.perf_counter() - start_s) / 60
    return figures


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
