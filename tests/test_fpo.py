"""Flow policy optimisation: ratios of losses of the same noise."""

from dataclasses import replace

import pytest
import torch
from small_policy import DOUBLE, SmallNet, batch_of
from torch import Tensor

from wamlab.errors import InputError
from wamlab.rl.fpo import FpoConfig, FpoExample, draw_steps, flow_errors, fpo_loss
from wamlab.rl.objectives import ClipConfig

WIDE = ClipConfig(low=0.9, high=9.0)


def played(net: SmallNet, entries: str = "mean") -> FpoExample:
    batch = replace(batch_of(torch.randn(6, 2, dtype=DOUBLE)), actions=torch.randn(6, 3, 2, dtype=DOUBLE))
    is_executed = torch.ones(6, 3, 2, dtype=torch.bool)
    is_executed[:3, 1:] = False
    seen, target = draw_steps(batch, 4, torch.Generator().manual_seed(0))
    with torch.no_grad():
        old = flow_errors(net, batch, seen, target, is_executed, entries)
    advantage = torch.randn(6, dtype=DOUBLE)
    return FpoExample(batch, seen, target, is_executed, old, advantage, torch.rand(6, dtype=DOUBLE))


def test_draws_are_of_the_same_chunk_with_other_noise() -> None:
    example = played(SmallNet())
    clean = example.seen.actions - example.seen.action_noise_level[..., None] * example.target_actions
    assert torch.allclose(clean, example.batch.actions[:, None].expand_as(clean), atol=1e-6)
    assert not torch.allclose(example.target_actions[:, 0], example.target_actions[:, 1])


@pytest.mark.parametrize("is_per_draw", [False, True])
def test_before_the_first_update_ratios_are_one_and_the_gradient_weighs_losses_by_advantages(
    *, is_per_draw: bool
) -> None:
    net = SmallNet()
    example = played(net)
    terms = fpo_loss(net, example, FpoConfig(is_per_draw=is_per_draw))
    assert terms.ratio_error < 1e-12
    assert terms.clipped == 0
    (found,) = torch.autograd.grad(terms.total, net.out.weight)
    own = flow_errors(net, example.batch, example.seen, example.target_actions, example.is_executed).mean(dim=1)
    (wanted,) = torch.autograd.grad((example.weight * example.advantage * own).mean(), net.out.weight)
    assert torch.allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("config", [FpoConfig(clip=WIDE), FpoConfig(clip=WIDE, entries="sum", is_per_draw=True)])
def test_gradients_are_those_of_finite_differences(config: FpoConfig) -> None:
    example, net = played(SmallNet(), config.entries), SmallNet()
    with torch.no_grad():
        net.out.weight += 0.02 * torch.randn_like(net.out.weight)

    def loss() -> Tensor:
        return fpo_loss(net, example, config).total

    (found,) = torch.autograd.grad(loss(), net.out.weight)
    values = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            net.out.weight[0, 1] += step
            values.append(loss().item())
        net.out.weight[0, 1] += 1e-6
    assert found[0, 1].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)


def test_the_ratio_is_that_of_mean_losses_and_micro_batches_add_up() -> None:
    net, other = SmallNet(), SmallNet(seed=1)
    example = replace(played(net), advantage=torch.ones(6, dtype=DOUBLE), weight=torch.ones(6, dtype=DOUBLE))
    new = flow_errors(other, example.batch, example.seen, example.target_actions, example.is_executed)
    wanted = -(example.old_loss.mean(dim=1) - new.mean(dim=1)).exp().mean()
    wide = FpoConfig(clip=ClipConfig(low=1.0, high=1e9))
    assert fpo_loss(other, example, wide).total.item() == pytest.approx(wanted.item(), rel=1e-9)
    parts = [fpo_loss(other, example[i : i + 2], wide).total / 3 for i in (0, 2, 4)]
    assert torch.stack(parts).sum().item() == pytest.approx(wanted.item(), rel=1e-9)
    with pytest.raises(InputError, match="give mean or sum"):
        FpoConfig(entries="max")
