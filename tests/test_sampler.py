"""Solvers: the reference's toy trajectories, convergence, and sampling from a history."""

import pytest
import torch
from torch import Tensor

from wamlab.errors import InputError
from wamlab.flow import solver_levels
from wamlab.model.presets import tiny
from wamlab.model.sampler import SamplerConfig, draw_block_noise, sample_block, solve
from wamlab.model.wam import WorldActionModel

TOY = {
    1: [-0.483200, -1.642312, -0.163107],
    2: [-0.247723, -1.708826, -0.311723],
    4: [-0.090063, -1.776174, -0.227819],
    16: [0.005398, -1.708810, 0.019378],
}
START = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)


def toy_velocity(x: Tensor, level: float) -> Tensor:
    return torch.sin(3 * x) + 0.5 * (1 - level) * x


@pytest.mark.parametrize("num_steps", TOY)
def test_unipc_follows_the_reference(num_steps: int) -> None:
    found = solve(toy_velocity, START, num_steps, solver="unipc")
    assert found.tolist() == pytest.approx(TOY[num_steps], abs=1e-5)


def test_solvers_converge_to_the_same_end() -> None:
    fine = solve(toy_velocity, START, 4000, solver="euler")
    errors = [(solve(toy_velocity, START, n, solver="euler") - fine).abs().max() for n in (20, 40, 80)]
    assert errors[0] > 1.7 * errors[1] > 2.8 * errors[2]
    assert (solve(toy_velocity, START, 100, solver="unipc") - fine).abs().max() < 2e-3


@pytest.mark.parametrize("solver", ["euler", "unipc"])
def test_a_straight_flow_is_exact_in_one_step_count_or_many(solver: str) -> None:
    """A constant velocity field is what a perfectly known sample has; every solver must follow it exactly."""
    target = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    start = solver_levels(1)[0].item()
    noised = start * START + (1 - start) * target
    for num_steps in (1, 3, 8):
        found = solve(lambda x, level: (x - target) / level, noised, num_steps, solver=solver)
        assert torch.allclose(found, target, atol=1e-9)


@pytest.mark.parametrize("has_integer_time", [False, True])
def test_sampling_a_block_repeats_itself_and_leaves_the_history(has_integer_time: bool) -> None:
    config = tiny(layers=1, actions_per_block=4)
    net = WorldActionModel(config).eval()
    text = torch.randn(3, 5, config.text_dim)

    def sampled() -> tuple[Tensor, Tensor]:
        history = net.observe(net.start(text), torch.ones(3, 1, 48, 4, 4))
        noise = draw_block_noise(3, (2, 48, 4, 4), (4, 8), torch.Generator().manual_seed(3))
        found = sample_block(
            net, history, torch.zeros(3, 1, 8), noise,
            SamplerConfig(num_steps=3, solver="unipc", has_integer_time=has_integer_time),
        )  # fmt: skip
        assert history.num_frames == 1
        return found

    with torch.no_grad():
        first, second = sampled(), sampled()
    assert first[0].shape == (3, 2, 48, 4, 4)
    assert first[1].shape == (3, 4, 8)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(InputError, match='no solver "heun": choose one of euler, unipc'):
        solve(toy_velocity, START, 2, solver="heun")
