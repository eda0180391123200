"""Flow matching: golden scalars of the DreamZero schedule, weights and loss; laws of noising."""

from functools import partial

import pytest
import torch

from wamlab import flow
from wamlab.types import Batch, Velocity

GOLDEN_TABLE = {0: 1.0, 1: 0.9998, 100: 0.978261, 250: 0.9375, 500: 0.833333, 750: 0.625,
                833: 0.5006, 900: 0.357143, 950: 0.208333, 999: 0.00498}  # fmt: skip
GOLDEN_WEIGHTS = {1: 0.00128, 100: 0.13907, 250: 0.39795, 500: 1.02486, 750: 1.91404, 833: 2.07640,
                  900: 1.86535, 950: 1.25078, 990: 0.30680, 999: 0.03188}  # fmt: skip
GOLDEN_LEVELS = {
    1: [0.9998, 0],
    4: [0.9998, 0.93727, 0.83306, 0.62469, 0],
    16: [0.9998, 0.98663, 0.97201, 0.95566, 0.93727, 0.91642, 0.8926, 0.86512, 0.83306, 0.79517, 0.7497,
         0.69414, 0.62469, 0.53541, 0.41639, 0.2498, 0],
}  # fmt: skip


def small_batch(num_samples: int = 4, num_blocks: int = 2) -> Batch:
    return Batch(
        latents=torch.randn(num_samples, 1 + 2 * num_blocks, 3, 4, 4),
        actions=torch.rand(num_samples, 4 * num_blocks, 5) * 2 - 1,
        action_mask=(torch.arange(5) < 3).expand(num_samples, 4 * num_blocks, 5),
        state=torch.rand(num_samples, num_blocks, 6),
        text=torch.randn(num_samples, 7, 8),
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_training_table_has_the_published_levels() -> None:
    table = flow.noise_table()
    assert table.shape == (1000,)
    for index, level in GOLDEN_TABLE.items():
        assert table[index].item() == pytest.approx(level, abs=1e-6)


def test_loss_weights_have_the_published_values_and_average_one() -> None:
    weights = flow.loss_weight(flow.noise_table())
    assert weights.mean().item() == pytest.approx(1, abs=1e-9)
    for index, weight in GOLDEN_WEIGHTS.items():
        assert weights[index].item() == pytest.approx(weight, abs=1e-5)
    assert flow.loss_weight(torch.tensor(1.0, dtype=torch.float64)).item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("num_steps", GOLDEN_LEVELS)
def test_solver_levels_are_the_published_ones(num_steps: int) -> None:
    levels = flow.solver_levels(num_steps)
    assert levels.tolist() == pytest.approx(GOLDEN_LEVELS[num_steps], abs=1e-5)
    if num_steps == 16:
        assert (1000 * levels[:-1]).long().tolist() == [
            999, 986, 972, 955, 937, 916, 892, 865, 833, 795, 749, 694, 624, 535, 416, 249,
        ]  # fmt: skip


def test_the_loss_has_the_published_value() -> None:
    """Prediction 0, target 1, frame levels .9 .7 .7, 8 real dimensions of 32 (spec 11.3).

    The reference weighs a level by the table entry nearest to it, so the levels are moved there first;
    levels drawn in training are entries already.
    """
    table = flow.noise_table()
    high, low = (table[(table - level).abs().argmin()].item() for level in (0.9, 0.7))
    target = Velocity(video=torch.ones(1, 3, 2, 4, 4), actions=torch.ones(1, 4, 32))
    predicted = Velocity(video=torch.zeros(1, 3, 2, 4, 4), actions=torch.zeros(1, 4, 32))
    terms = flow.velocity_loss(
        predicted,
        target,
        torch.tensor([[high, low, low]], dtype=torch.float64),
        torch.full((1, 4), low, dtype=torch.float64),
        (torch.arange(32) < 8).expand(1, 4, 32),
    )
    assert terms.video.item() == pytest.approx(1.324542, abs=2e-6)
    assert terms.action.item() == pytest.approx(0.417841, abs=2e-6)
    assert terms.total.item() == pytest.approx(1.324542 + 0.417841, abs=2e-6)


def test_coupled_actions_share_the_level_of_their_block() -> None:
    video, action = flow.draw_noise_levels(64, 7, 3, 4, generator(), flow.NoiseConfig())
    assert torch.equal(video[:, 1::2], video[:, 2::2])
    assert torch.equal(action.reshape(64, 3, 4), video[:, 1::2, None].expand(-1, -1, 4))
    assert not torch.equal(video[:, 0], video[:, 1])
    table = flow.noise_table()
    assert torch.isin(video, table).all()


@pytest.mark.parametrize(("beta", "mean"), [(3.0, 0.921), (7.0, 0.969)])
def test_decoupled_video_levels_follow_the_shifted_beta(beta: float, mean: float) -> None:
    config = flow.NoiseConfig(is_decoupled=True, video_beta=beta)
    video, action = flow.draw_noise_levels(50_000, 5, 2, 3, generator(), config)
    assert video.mean().item() == pytest.approx(mean, abs=2e-3)
    assert action.mean().item() == pytest.approx(0.748, abs=3e-3)
    assert not torch.equal(action[:, 0], video[:, 1])


def test_adding_noise_and_following_the_true_velocity_returns_the_clean_data() -> None:
    batch = small_batch()
    example = flow.with_noise(batch, generator())
    level = example.seen.video_noise_level[..., None, None, None].float()
    clean = flow.euler_step(example.seen.latents, example.target.video, 0.0, 0.0) - level * example.target.video
    assert torch.allclose(clean, batch.latents, atol=1e-5)


def test_micro_batches_of_an_example_add_up_to_its_loss_and_gradient() -> None:
    weight = torch.randn(5, 5, requires_grad=True)

    def net(batch: Batch, seen) -> Velocity:
        return Velocity(video=seen.latents * weight.sum(), actions=seen.actions @ weight)

    loss = partial(flow.flow_loss, net)
    example = flow.with_noise(small_batch(), generator())
    (whole,) = torch.autograd.grad(loss(example).total, weight)
    parts = [loss(example[i : i + 1]).total / 4 for i in range(4)]
    (summed,) = torch.autograd.grad(torch.stack(parts).sum(), weight)
    assert torch.allclose(whole, summed, rtol=1e-5)


def test_masked_actions_do_not_move_the_loss() -> None:
    batch = small_batch()
    example = flow.with_noise(batch, generator())

    def net_with(noise: float):
        def net(_: Batch, seen) -> Velocity:
            junk = torch.where(batch.action_mask, 0.0, noise)
            return Velocity(video=seen.latents, actions=seen.actions + junk)

        return net

    assert flow.flow_loss(net_with(0.0), example).action == flow.flow_loss(net_with(9.0), example).action


def test_a_batch_without_actions_has_a_video_loss_only() -> None:
    batch = small_batch()
    bare = Batch(batch.latents, batch.actions[:, :0], batch.action_mask[:, :0], batch.state, batch.text)
    terms = flow.flow_loss(lambda _, seen: Velocity(seen.latents, seen.actions), flow.with_noise(bare, generator()))
    assert terms.action == 0
    assert terms.total == terms.video


def test_the_same_seed_draws_the_same_noise() -> None:
    batch = small_batch()
    first, second = (flow.with_noise(batch, generator(7)) for _ in range(2))
    assert torch.equal(first.seen.latents, second.seen.latents)
    assert not torch.equal(first.seen.latents, flow.with_noise(batch, generator(8)).seen.latents)
