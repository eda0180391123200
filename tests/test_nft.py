"""DiffusionNFT: the golden toy, its optimum, its forms and gradients; the old policy that follows."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from small_policy import DOUBLE, SmallNet, batch_of
from torch import Tensor

from wamlab.errors import InputError
from wamlab.flow import NoiseConfig, with_noise
from wamlab.rl.nft import NftConfig, NftExample, branches, follow, keep_of, nft_loss, optimality
from wamlab.types import Batch, FlowExample, Noised, Velocity

LEVEL, SEEN, BETA = 0.6, 0.25, 0.5
CLEAN, GOODNESS = (-1.0, 1.0), (0.1, 0.9)


def toy() -> tuple[NftExample, float]:
    """Two clean values that could lie behind one noised value, weighed by how likely each is; and the old velocity."""
    clean = torch.tensor(CLEAN, dtype=DOUBLE)
    noise = (SEEN - (1 - LEVEL) * clean) / LEVEL
    posterior = (-0.5 * noise.square()).exp()
    posterior = posterior / posterior.sum()
    target = (noise - clean)[:, None, None]
    batch = replace(batch_of(torch.zeros(2, 2, dtype=DOUBLE), 1, 1), actions=clean[:, None, None])
    frames = torch.zeros(2, 3, 2, 2, 2, dtype=DOUBLE)
    levels = torch.full((2, 3), LEVEL, dtype=DOUBLE), torch.full((2, 1), LEVEL, dtype=DOUBLE)
    flow = FlowExample(
        batch, Noised(frames, torch.full((2, 1, 1), SEEN, dtype=DOUBLE), *levels), Velocity(frames, target)
    )
    is_executed = torch.ones(2, 1, 1, dtype=torch.bool)
    example = NftExample(flow, torch.tensor(GOODNESS, dtype=DOUBLE), is_executed, 2 * posterior)
    return example, (posterior * target[:, 0, 0]).sum().item()


def constant(value: Tensor) -> Callable[[Batch, Noised], Velocity]:
    return lambda batch, seen: Velocity(seen.latents * 0, value.expand_as(seen.actions))


def test_the_toy_has_the_golden_gradient_and_optimum() -> None:
    example, old = toy()
    config = NftConfig(beta=BETA)
    value = torch.tensor(old, dtype=DOUBLE, requires_grad=True)
    loss = nft_loss(constant(value), constant(torch.tensor(old, dtype=DOUBLE)), example, config).total
    (gradient,) = torch.autograd.grad(loss, value, create_graph=True)
    assert gradient.item() == pytest.approx(1.235522, abs=1e-6)
    (curvature,) = torch.autograd.grad(gradient, value)
    assert (value - gradient / curvature).item() == pytest.approx(-2.505790, abs=1e-6)  # a parabola: exact


def test_the_optimum_is_the_old_policy_moved_by_what_good_samples_add() -> None:
    example, old = toy()
    posterior = example.weight / 2
    share = (posterior * example.optimality).sum().item()
    good = (posterior * example.optimality * example.flow.target.actions[:, 0, 0]).sum().item() / share
    assert old + 2 / BETA * share * (good - old) == pytest.approx(-2.505790, abs=1e-6)


def test_the_branches_stand_on_either_side_of_the_old_policy() -> None:
    new, old = torch.randn(2, 4, dtype=DOUBLE)
    good, bad = branches(new, old, 0.3)
    assert torch.allclose((good + bad) / 2, old)
    assert torch.allclose(good - bad, 0.6 * (new - old))


def played(seed: int = 0) -> NftExample:
    torch.manual_seed(seed)
    batch = batch_of(torch.randn(6, 2, dtype=DOUBLE))
    batch = replace(batch, actions=torch.randn(6, 3, 2, dtype=DOUBLE), latents=torch.randn(6, 3, 2, 2, 2, dtype=DOUBLE))
    is_executed = torch.ones(6, 3, 2, dtype=torch.bool)
    is_executed[:3, 1:] = False
    flow = with_noise(batch, torch.Generator().manual_seed(seed), NoiseConfig(shift=1.0))
    return NftExample(flow, torch.rand(6, dtype=DOUBLE), is_executed, torch.rand(6, dtype=DOUBLE))


@pytest.mark.parametrize("form", ["velocity", "clean", "preference"])
def test_gradients_are_those_of_finite_differences(form: str) -> None:
    example, old, net, reference = played(), SmallNet(seed=1), SmallNet(seed=2), SmallNet(seed=3)
    config = NftConfig(form=form, has_adaptive_weight=False, video_weight=0.5, reference_weight=0.1)
    for weight in (net.out.weight, net.video.weight):

        def loss() -> Tensor:
            return nft_loss(net, old, example, config, reference=reference).total

        (found,) = torch.autograd.grad(loss(), weight)
        assert found.abs().max() > 1e-3
        with torch.no_grad():
            values = []
            for step in (1e-6, -2e-6):
                weight[0, 1] += step
                values.append(loss().item())
            weight[0, 1] += 1e-6
        assert found[0, 1].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)


def test_the_clean_form_is_the_velocity_form_weighed_by_the_squared_level() -> None:
    example, old, net = played(), SmallNet(seed=1), SmallNet(seed=2)
    level = example.flow.seen.action_noise_level[:1].mean().item()
    one = example[:1]
    plain = nft_loss(net, old, one, NftConfig(beta=0.5)).action
    clean = nft_loss(net, old, one, NftConfig(form="clean", beta=0.5, has_adaptive_weight=False)).action
    assert clean.item() == pytest.approx(5.0 / 0.5 * level**2 * plain.item(), rel=1e-9)


def test_the_adaptive_weight_has_no_gradient_and_leaves_the_direction() -> None:
    example, old, net = played()[3:4], SmallNet(seed=1), SmallNet(seed=1)  # at the old policy both branches are one
    gradients = [
        torch.autograd.grad(
            nft_loss(net, old, example, NftConfig(form="clean", has_adaptive_weight=has)).total, net.out.weight
        )[0].flatten()
        for has in (True, False)
    ]
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0).item() == pytest.approx(1, abs=1e-9)
    assert not torch.allclose(gradients[0], gradients[1])


@pytest.mark.parametrize("form", ["velocity", "clean", "preference"])
def test_good_samples_pull_and_bad_ones_push(form: str) -> None:
    example = played()
    for goodness in (1.0, 0.0):
        net, old = SmallNet(seed=1), SmallNet(seed=1)
        flow = example.flow
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        all_alike = replace(example, optimality=torch.full((6,), goodness, dtype=DOUBLE))
        errors = []
        for _ in range(2):
            found = net(flow.batch, flow.seen).actions - flow.target.actions
            errors.append(torch.where(example.is_executed, found.square(), 0).sum().item())
            nft_loss(net, old, all_alike, NftConfig(form=form)).total.backward()
            optimizer.step()
        assert (errors[1] < errors[0]) == (goodness == 1.0)


def test_micro_batches_add_up_and_average_rewards_teach_nothing() -> None:
    example, net, old = played(), SmallNet(seed=2), SmallNet(seed=1)
    parts = [nft_loss(net, old, example[i : i + 2]).total / 3 for i in (0, 2, 4)]
    assert torch.stack(parts).sum().item() == pytest.approx(nft_loss(net, old, example).total.item(), rel=1e-9)
    average = replace(example, optimality=torch.full((6,), 0.5, dtype=DOUBLE))
    loss = nft_loss(old, old, average).total
    gradients = torch.autograd.grad(loss, list(old.parameters()), allow_unused=True)
    assert all(g is None or g.abs().max() < 1e-12 for g in gradients)


def test_advantages_become_a_share_of_goodness() -> None:
    found = optimality(torch.tensor([-9.0, -2.5, 0.0, 5.0, 9.0]), 5.0)
    assert found.tolist() == [0.0, 0.25, 0.5, 1.0, 1.0]


def test_the_old_policy_follows_by_schedule() -> None:
    old, net = SmallNet(seed=1), SmallNet(seed=2)
    wanted = 0.3 * old.out.weight + 0.7 * net.out.weight
    follow(old, net, 0.3)
    assert torch.allclose(old.out.weight, wanted)
    assert [keep_of(step) for step in (0, 100, 900)] == [0.0, 0.1, 0.5]
    assert [keep_of(step, "late") for step in (75, 95, 900)] == pytest.approx([0.0, 0.15, 0.999])
    assert keep_of(7, "none") == 0
    with pytest.raises(InputError, match='no schedule "slow"'):
        keep_of(1, "slow")
    with pytest.raises(InputError, match="velocity, clean, preference"):
        NftConfig(form="x0")
    assert not math.isnan(nft_loss(net, old, played(), NftConfig(form="clean")).change.item())
