"""Speculative steps: exactly the target's distribution, accepted as often as theory says, in fewer calls."""

import pytest
import torch
from torch import Tensor

from wamlab.errors import InputError
from wamlab.flow import Gaussian
from wamlab.rl.speculate import acceptance, couple, speculate

DOUBLE = torch.float64


def drawn(num: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num, dim, generator=generator, dtype=DOUBLE)
    return noise, torch.rand(num, generator=generator, dtype=DOUBLE)


def test_coupled_draws_have_the_targets_distribution_and_the_theorys_acceptance() -> None:
    num, std = 400_000, 0.7
    noise, uniform = drawn(num, 3)
    mean = torch.tensor([0.3, -0.2, 0.5], dtype=DOUBLE)
    offset = torch.tensor([1.0, 2.0, -2.0], dtype=DOUBLE) / 3 * 1.1726 * std  # 1.1726 standard deviations
    target = Gaussian(mean.expand(num, 3), torch.tensor(std, dtype=DOUBLE))
    found = couple((mean + offset).expand(num, 3), target, noise, uniform)
    theory = acceptance((mean + offset)[None], Gaussian(mean[None], target.std)).item()
    assert theory == pytest.approx(0.5577, abs=1e-4)
    assert found.is_accepted.double().mean().item() == pytest.approx(theory, abs=4 * 0.5 / num**0.5)
    assert (found.value.mean(dim=0) - mean).abs().max() < 5 * std / num**0.5
    covariance = torch.cov(found.value.T)
    assert (covariance - std**2 * torch.eye(3, dtype=DOUBLE)).abs().max() < 0.005
    for kept in (found.value[found.is_accepted], found.value[~found.is_accepted]):  # neither half alone is
        assert (kept.mean(dim=0) - mean).abs().max() > 0.05
    drafts = mean + offset + std * noise
    assert (found.value - drafts)[found.is_accepted].abs().max() < 1e-12


def test_equal_means_accept_everything_and_distant_ones_nothing() -> None:
    noise, uniform = drawn(1000, 2)
    target = Gaussian(torch.zeros(1000, 2, dtype=DOUBLE), torch.tensor(1.0, dtype=DOUBLE))
    assert couple(target.mean, target, noise, uniform).is_accepted.all()
    far = couple(target.mean + 50, target, noise, uniform)
    assert not far.is_accepted.any() and far.value.abs().max() < 6  # mirrored noise is noise


def step_of(state: Tensor, shift: float) -> Gaussian:
    return Gaussian(0.8 * state + shift, torch.tensor(0.5, dtype=DOUBLE))


@pytest.mark.parametrize("window", [1, 4])
def test_a_speculated_chain_ends_as_an_asked_one_does(window: int) -> None:
    num_chains, num_steps, ends, num_calls = 800, 4, [], 0
    for chain in range(num_chains):
        noise, uniform = drawn(num_steps, 1, seed=chain)
        found = speculate(
            lambda states, _: step_of(states, 0.1), lambda state, _: step_of(state, 0.4),
            torch.ones(1, 1, dtype=DOUBLE), list(noise[:, None]), uniform.tolist(), window=window,
        )  # fmt: skip
        assert len(found.states) == num_steps + 1
        ends.append(found.states[-1].item())
        num_calls += found.num_calls
    mean, variance = 1.0, 0.0
    for _ in range(num_steps):
        mean, variance = 0.8 * mean + 0.1, 0.64 * variance + 0.25
    values = torch.tensor(ends, dtype=DOUBLE)
    error = (variance / num_chains) ** 0.5
    assert abs(values.mean().item() - mean) < 4 * error  # the draft's own chain ends 0.89 higher
    assert values.var().item() == pytest.approx(variance, rel=4 * (2 / num_chains) ** 0.5)
    assert num_calls == num_chains * num_steps if window == 1 else num_calls < 0.6 * num_chains * num_steps


def test_a_good_draft_makes_one_call_of_a_window() -> None:
    noise, uniform = drawn(8, 3)
    start = torch.zeros(1, 3, dtype=DOUBLE)

    def ask(states: Tensor, _: object) -> Gaussian:
        return step_of(states, 0.1)

    found = speculate(ask, ask, start, list(noise[:, None]), uniform.tolist(), window=4)
    assert found.num_calls == 2
    state = start
    for step in range(8):
        state = step_of(state, 0.1).mean + 0.5 * noise[step]
        torch.testing.assert_close(found.states[step + 1], state)


def test_the_ode_cannot_be_speculated() -> None:
    noise, uniform = drawn(2, 3)
    for std in (torch.zeros(()), torch.tensor([1.0, 2.0, 1.0])):
        with pytest.raises(InputError, match="one positive std"):
            couple(torch.zeros(2, 3), Gaussian(torch.zeros(2, 3), std), noise, uniform)
    with pytest.raises(InputError, match="window of 0"):
        speculate(lambda s, _: step_of(s, 0), lambda s, _: step_of(s, 0), noise[:1], [], [], window=0)
