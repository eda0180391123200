"""Laws of the statistics of "no loss of quality": error rates held, verdicts that say what the numbers allow."""

import math

import numpy as np
import pytest

from wamlab.errors import InputError
from wamlab.score.curves import compare_curves, smoothed
from wamlab.score.parity import _restricted_rate, compare_errors, compare_means, compare_paired_rates, compare_rates
from wamlab.score.sample_size import curve_seeds_needed, episodes_needed, pairs_needed, seeds_needed
from wamlab.score.student import t_cdf, t_quantile


def integrated_t_cdf(t: float, freedom: int) -> float:
    """Integrate the density by t = sqrt(freedom) tan(angle), which makes it a power of a cosine."""
    angles = np.linspace(-np.pi / 2, math.atan(t / math.sqrt(freedom)), 200_001)
    whole = np.linspace(-np.pi / 2, np.pi / 2, 200_001)
    areas = [np.trapezoid(np.cos(grid) ** (freedom - 1), grid) for grid in (angles, whole)]
    return float(areas[0] / areas[1])


def test_students_t_equals_its_integral_and_its_quantile_inverts_it() -> None:
    for freedom in (1, 2, 7, 30):
        for t in (-3.0, -0.4, 0.0, 1.3, 5.0):
            assert t_cdf(t, freedom) == pytest.approx(integrated_t_cdf(t, freedom), abs=1e-8)
        assert t_cdf(t_quantile(0.95, freedom), freedom) == pytest.approx(0.95, abs=1e-12)
    assert t_quantile(0.95, 10) == pytest.approx(1.8124611)  # printed tables
    with pytest.raises(InputError, match="at least 1 degree"):
        t_cdf(0.0, 0)


def test_sample_sizes_are_those_of_published_tables() -> None:
    """Two one-sided tests at 5 %, power 80 %, true difference 0."""
    assert [episodes_needed(p, margin=0.05).num_units for p in (0.5, 0.7, 0.9)] == [1713, 1439, 617]
    assert [pairs_needed(d, margin=0.1).num_units for d in (0.1, 0.2, 0.3)] == [86, 172, 257]
    assert [seeds_needed(spread, margin=0.1).num_units for spread in (0.025, 0.05, 0.1, 0.2)] == [3, 4, 11, 36]
    assert str(pairs_needed(0.1, margin=0.1)).startswith("86 paired episodes for a verdict within 0.1")
    assert curve_seeds_needed(0.005, 200, margin=0.01).num_units > seeds_needed(0.005, margin=0.01).num_units


def test_mcnemars_statistic_is_tangos_at_zero() -> None:
    """19 lost, 7 won: z = 12 / sqrt(26)."""
    baseline = np.repeat([True, False, True, False], [19, 7, 60, 14])
    candidate = np.repeat([False, True, True, False], [19, 7, 60, 14])
    found = compare_paired_rates(baseline, candidate, margin=0.05)
    assert found.p_different == pytest.approx(math.erfc(12 / math.sqrt(26) / math.sqrt(2)))
    assert found.verdict == "different"
    assert found.difference == pytest.approx(-0.12)


def test_pooled_z_is_the_unpaired_score_at_zero() -> None:
    found = compare_rates(80, 100, 130, 200, margin=0.05)
    pooled = 210 / 300
    z = -0.15 / math.sqrt(pooled * (1 - pooled) * (1 / 100 + 1 / 200))
    assert found.p_different == pytest.approx(math.erfc(-z / math.sqrt(2)), rel=1e-6)


def test_the_restricted_rate_is_the_most_likely_one() -> None:
    for a, num_a, b, num_b, difference in [
        (0.9, 100, 0.8, 50, 0.05),
        (0.2, 30, 0.5, 90, -0.1),
        (1.0, 20, 1.0, 20, 0.1),
    ]:
        rates = np.linspace(max(0, -difference), min(1, 1 - difference), 100_001)[1:-1]
        moved = rates + difference
        likelihood = num_a * (a * np.log(rates) + (1 - a) * np.log(1 - rates))
        likelihood += num_b * (b * np.log(moved) + (1 - b) * np.log(1 - moved))
        best = rates[likelihood.argmax()]
        assert _restricted_rate(a, num_a, b, num_b, difference) == pytest.approx(best, abs=1e-4)


def test_the_interval_and_the_test_are_one_decision() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        num, margin = int(rng.integers(20, 400)), 0.06
        a, b = rng.random(num) < 0.85, rng.random(num) < 0.85
        errors = rng.gamma(20, size=(2, num))
        for found in (
            compare_rates(int(a.sum()), num, int(b.sum()), num, margin=margin),
            compare_paired_rates(a, b, margin=margin),
            compare_errors(*errors, margin=margin),
            compare_means(*errors / 100, margin=margin),
        ):
            assert (-margin < found.low and found.high < margin) == (found.p_equivalent < 0.05)
            assert found.low <= found.difference <= found.high


def test_at_the_margin_equivalence_is_called_no_more_often_than_alpha() -> None:
    rng = np.random.default_rng(1)
    num, margin, repeats = 300, 0.05, 200
    unpaired = paired = errors = 0
    for _ in range(repeats):
        unpaired += compare_rates(
            int(rng.binomial(num, 0.9)), num, int(rng.binomial(num, 0.85)), num, margin=margin
        ).verdict == "equivalent"  # fmt: skip
        cell = rng.choice(3, num, p=[0.06, 0.01, 0.93])
        paired += compare_paired_rates(cell != 1, cell != 0, margin=margin).verdict == "equivalent"
        base = rng.gamma(4, size=60)
        noisy = base * 1.05 * rng.gamma(200, 1 / 200, 60)
        errors += compare_errors(base, noisy, margin=margin).verdict == "equivalent"
    limit = repeats * 0.05 + 3 * math.sqrt(repeats * 0.05 * 0.95)
    assert unpaired <= limit and paired <= limit and errors <= limit
    assert errors >= 3  # the test is not blind: about 10 are expected


def test_few_episodes_are_no_evidence_and_identical_ones_can_be() -> None:
    same = np.arange(400) % 5 > 0
    assert compare_paired_rates(same[:8], same[:8], margin=0.05).verdict == "not enough evidence"
    assert compare_paired_rates(same, same, margin=0.05).verdict == "equivalent"
    assert compare_rates(9, 10, 9, 10, margin=0.05).verdict == "not enough evidence"


def test_a_bootstrap_agrees_with_students_t_on_many_episodes() -> None:
    rng = np.random.default_rng(2)
    base = rng.lognormal(size=300)
    other = base * rng.lognormal(0.02, 0.2, 300)
    by_t = compare_errors(base, other, margin=0.1)
    drawn = compare_errors(base, other, margin=0.1, num_resamples=1000)
    assert (drawn.low, drawn.high) == pytest.approx((by_t.low, by_t.high), abs=0.006)
    assert drawn.verdict == by_t.verdict == "equivalent"
    assert compare_errors(base, base * 1.3, margin=0.1, num_resamples=200).verdict == "different"


def test_the_sentence_has_the_verdict_the_numbers_and_the_margin() -> None:
    found = compare_rates(905, 1000, 900, 1000, margin=0.05)
    assert found.sentence.startswith("equivalent: success 0.9 against 0.905, a difference of -0.005")
    assert "margin 0.05; 1,000 unpaired episodes" in found.sentence
    assert str(found) == found.sentence


def drawn_curves(num_seeds: int, worse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    course = np.exp(-np.arange(100) / 30) + 0.3
    seeds = course * np.exp(rng.normal(0, 0.02, (num_seeds, 1)))
    return tuple(seeds * np.exp(change + rng.normal(0, 0.004, (num_seeds, 100))) for change in (0, worse))  # pyright: ignore[reportReturnType]


def test_loss_curves_keep_together_or_part_in_the_middle_or_at_the_end() -> None:
    place = np.arange(100)
    assert compare_curves(*drawn_curves(8, np.zeros(100))).verdict == "equivalent"
    assert compare_curves(*drawn_curves(8, 0.04 * (place > 80))).verdict == "different"
    bump = compare_curves(*drawn_curves(8, 0.08 * (abs(place - 50) < 15)))
    assert bump.end.verdict == "equivalent"
    assert bump.verdict == "different"
    assert compare_curves(*drawn_curves(4, np.zeros(100)), margin=0.001).verdict == "not enough evidence"


def test_smoothing_keeps_a_constant() -> None:
    assert smoothed(np.full((2, 5), 3.0), 0.9) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare_rates(1, 2, 1, 2, margin=0.0), "margin is 0"),
        (lambda: compare_rates(3, 2, 1, 2, margin=0.1), "3 successes of 2"),
        (lambda: compare_means(np.zeros(1), np.zeros(1), margin=0.1), r"shapes \(1,\) and \(1,\)"),
        (lambda: compare_means(np.zeros(3), np.full(3, np.nan), margin=0.1), "finite"),
        (lambda: compare_errors(np.zeros(3), np.ones(3), margin=0.1), "not all zero"),
        (lambda: compare_curves(np.ones((3, 9)), np.ones((3, 9))), "four or more seeds"),
        (lambda: compare_curves(np.zeros((4, 9)), np.ones((4, 9))), "losses above 0"),
        (lambda: episodes_needed(1.0, margin=0.1), "between 0 and 1"),
        (lambda: seeds_needed(0.0, margin=0.1), "above 0"),
    ],
)
def test_wrong_input_is_refused_in_a_sentence(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
