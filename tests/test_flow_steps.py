"""Stochastic solver steps: golden coefficients, the marginals they must keep, their log-probability."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from wamlab.flow import Gaussian, cps_transition, euler_step, gaussian_log_prob, sde_transition

DOUBLE = torch.float64
Step = Callable[[Tensor, Tensor, Tensor, Tensor, float], Gaussian]
DATA_MEAN, DATA_VARIANCE = 1.0, 0.25


def at(level: float) -> Tensor:
    return torch.tensor(level, dtype=DOUBLE)


def grid(num_steps: int) -> list[float]:
    return torch.linspace(1, 0, num_steps + 1, dtype=DOUBLE).tolist()


def exact_velocity(noised: Tensor, level: float) -> Tensor:
    """Return the mean of noise - clean given what is seen, where the data are Gaussian."""
    variance = (1 - level) ** 2 * DATA_VARIANCE + level**2
    covariance = level - (1 - level) * DATA_VARIANCE
    return -DATA_MEAN + covariance / variance * (noised - (1 - level) * DATA_MEAN)


def final_std(step: Step, num_steps: int) -> float:
    """Return the standard deviation of the samples, exactly: every step is linear, so variances propagate."""
    levels = grid(num_steps)
    variance = 1.0
    for level, following in pairwise(levels):
        points = torch.tensor([0.0, 1.0], dtype=DOUBLE)
        found = step(points, exact_velocity(points, level), at(level), at(following), levels[1])
        slope = (found.mean[1] - found.mean[0]).item()
        variance = slope**2 * variance + found.std.item() ** 2
    return variance**0.5


def sde(noised: Tensor, velocity: Tensor, level: Tensor, following: Tensor, cap: float) -> Gaussian:
    return sde_transition(noised, velocity, level, following, noise_scale=0.7, level_cap=cap)


def ode(noised: Tensor, velocity: Tensor, level: Tensor, following: Tensor, cap: float) -> Gaussian:
    return Gaussian(euler_step(noised, velocity, level.item(), following.item()), torch.zeros((), dtype=DOUBLE))


def scoreless(noised: Tensor, velocity: Tensor, level: Tensor, following: Tensor, cap: float) -> Gaussian:
    """Noise on top of the ODE without the score term that would undo it (WAM-RL's printed equation)."""
    return Gaussian(ode(noised, velocity, level, following, cap).mean, sde(noised, velocity, level, following, cap).std)


def cps(noised: Tensor, velocity: Tensor, level: Tensor, following: Tensor, cap: float) -> Gaussian:
    return cps_transition(noised, velocity, level, following, noise_share=0.5)


MARGINALS: dict[Step, tuple[float, ...]] = {
    sde: (0.480, 0.498, 0.502),
    ode: (0.431, 0.482, 0.496),
    scoreless: (0.842, 0.974, 1.08),
    cps: (0.400, 0.443, 0.456),
}


def keeps_marginals(step: Step) -> bool:
    return abs(final_std(step, 200) - DATA_VARIANCE**0.5) < 0.005


def test_the_sde_keeps_the_data_s_spread_and_noise_without_score_does_not() -> None:
    assert keeps_marginals(sde)
    assert keeps_marginals(ode)
    assert not keeps_marginals(scoreless)


@pytest.mark.parametrize("step", MARGINALS)
def test_final_spreads_are_the_published_ones(step: Step) -> None:
    """The published ones were sampled; these are exact, hence the tolerance."""
    found = [final_std(step, num_steps) for num_steps in (10, 40, 200)]
    assert found == pytest.approx(MARGINALS[step], abs=2e-3)


def test_sde_coefficients_are_the_golden_ones() -> None:
    levels = grid(4)
    for index, (std, clean_weight, noise_weight) in enumerate(
        [(0.5, 0.25, 0.625), (0.4330127, 0.5, 0.375), (0.25, 0.75, 0.1875), (0.1443376, 1.0, -0.0416667)]
    ):
        level, following = levels[index : index + 2]

        def mean_of(clean: float, noise: float, level: float = level, following: float = following) -> Gaussian:
            noised, velocity = at((1 - level) * clean + level * noise), at(noise - clean)
            return sde_transition(noised, velocity, at(level), at(following), noise_scale=0.5, level_cap=0.75)

        assert mean_of(1, 0).mean.item() == pytest.approx(clean_weight, abs=1e-7)
        assert mean_of(0, 1).mean.item() == pytest.approx(noise_weight, abs=1e-7)
        assert mean_of(0, 1).std.item() == pytest.approx(std, abs=1e-7)


def test_both_forms_of_the_sde_mean_agree() -> None:
    noised, velocity = torch.randn(2, 1000, dtype=DOUBLE)
    level = torch.rand(1000, dtype=DOUBLE) * 0.9 + 0.05
    following = level * torch.rand(1000, dtype=DOUBLE)
    found = sde_transition(noised, velocity, level, following, noise_scale=0.5, level_cap=1.0).mean
    square, step = 0.25 * level / (1 - level), level - following
    other = noised * (1 - square * step / (2 * level)) - step * velocity * (1 + square * (1 - level) / (2 * level))
    assert (found - other).abs().max() < 1e-13


def test_an_sde_without_noise_is_the_ode_and_a_clean_entry_stays() -> None:
    noised, velocity = torch.randn(2, 3, 5, dtype=DOUBLE)
    level, following = torch.tensor([0.8, 0.5, 0.0], dtype=DOUBLE), torch.tensor([0.5, 0.2, 0.0], dtype=DOUBLE)
    found = sde_transition(noised, velocity, level, following, noise_scale=0.0, level_cap=0.8)
    assert torch.allclose(found.mean, noised + (following - level)[:, None] * velocity, atol=1e-14)
    assert not found.std.any()
    noisy = sde_transition(noised, velocity, level, following, noise_scale=0.7, level_cap=0.8)
    assert torch.equal(noisy.mean[2], noised[2])
    assert noisy.std[2] == 0 < noisy.std[0]


@pytest.mark.parametrize("noise_share", [0.0, 0.3, 1.0])
def test_coefficient_preserving_steps_spend_exactly_the_next_level(noise_share: float) -> None:
    levels = grid(5)
    for level, following in pairwise(levels):
        # clean 0 and noise 1: what is left of the noise is the mean
        found = cps_transition(at(level), at(1.0), at(level), at(following), noise_share=noise_share)
        assert (found.mean.square() + found.std.square()).item() == pytest.approx(following**2, abs=1e-14)


def test_log_probability_is_the_normal_distribution_s_and_0_for_a_deterministic_step() -> None:
    value, mean = torch.randn(2, 4, 6, dtype=DOUBLE)
    std = torch.rand(4, 1, dtype=DOUBLE) + 0.1
    found = gaussian_log_prob(value, Gaussian(mean, std))
    assert torch.allclose(found, torch.distributions.Normal(mean, std).log_prob(value), atol=1e-12)
    mean.requires_grad_()
    still = gaussian_log_prob(value, Gaussian(mean, torch.zeros(4, 1, dtype=DOUBLE)))
    assert not still.any()
    (gradient,) = torch.autograd.grad(still.sum(), mean)
    assert not gradient.any()
    assert gaussian_log_prob(value.bfloat16(), Gaussian(mean.bfloat16(), std)).dtype == torch.float32
