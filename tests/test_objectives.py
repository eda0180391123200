"""Policy-gradient objectives: where the clip acts, gradients by finite differences, KLs two ways, micro-batches."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from small_policy import DOUBLE, SDE, SmallNet, batch_of, example_of, play
from torch import Tensor

from wamlab.errors import InputError
from wamlab.flow import Gaussian, flow_loss, with_noise
from wamlab.rl.flow_policy import LogProbConfig, chain_steps, log_prob
from wamlab.rl.kl import feature_kl, gaussian_kl, sampled_kl
from wamlab.rl.objectives import (
    ClipConfig,
    PolicyConfig,
    PolicyExample,
    ValueHead,
    clipped_loss,
    policy_loss,
    success_video_loss,
    value_loss,
)

CONFIGS = {
    "joint": PolicyConfig(),
    "a ratio a step": PolicyConfig(log_prob=LogProbConfig(steps="each")),
    "a ratio a tick": PolicyConfig(log_prob=LogProbConfig(per="tick")),
    "means": PolicyConfig(log_prob=LogProbConfig(entries="mean", steps="mean"), kl="k3"),
    "k2 a tick and step": PolicyConfig(log_prob=LogProbConfig(per="tick", steps="each"), kl="k2"),
}


def played(net: SmallNet, config: PolicyConfig, steps: list[int] | None = None) -> PolicyExample:
    chain = play(net, batch_of(torch.randn(6, 2, dtype=DOUBLE)), seed=1, steps=steps)
    is_executed = torch.ones(6, 3, 2, dtype=torch.bool)
    is_executed[:3, 1:] = is_executed[:, :, 1] = False
    return example_of(chain, torch.randn(6, dtype=DOUBLE), config.log_prob, is_executed)


def moved(net: SmallNet, size: float = 0.02) -> SmallNet:
    other = SmallNet()
    other.load_state_dict({name: value + size * torch.randn_like(value) for name, value in net.state_dict().items()})
    return other


def test_the_clip_stops_gradients_in_exactly_two_regions() -> None:
    log_ratio = torch.linspace(-1, 1, 101, dtype=DOUBLE, requires_grad=True)
    ratio = log_ratio.exp()
    for sign in (1.0, -1.0):
        loss, is_stopped = clipped_loss(log_ratio, torch.full((101,), sign, dtype=DOUBLE), ClipConfig(0.2, 0.28, None))
        (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
        stopped = ratio > 1.28 if sign > 0 else ratio < 0.8
        assert torch.equal(gradient == 0, stopped)
        assert torch.equal(is_stopped, stopped)
        assert torch.allclose(gradient[~stopped], (-sign * ratio)[~stopped])


def test_the_dual_clip_bounds_the_loss_of_bad_chunks_only() -> None:
    log_ratio = torch.tensor([0.0, 1.0, 1.2, 500.0], dtype=DOUBLE, requires_grad=True)
    bad, is_stopped = clipped_loss(log_ratio, torch.full((4,), -2.0, dtype=DOUBLE), ClipConfig(dual=3.0))
    assert bad.tolist() == pytest.approx([2.0, 2 * 2.718281828, 6.0, 6.0])
    assert is_stopped.tolist() == [False, False, True, True]
    (gradient,) = torch.autograd.grad(bad.sum(), log_ratio)
    assert torch.isfinite(gradient).all()
    good, _ = clipped_loss(-log_ratio.detach(), torch.full((4,), 2.0, dtype=DOUBLE), ClipConfig(dual=3.0))
    assert good.tolist() == pytest.approx((-2 * (-log_ratio.detach()).clamp(min=-20).exp()).tolist())


@pytest.mark.parametrize("name", CONFIGS)
def test_before_the_first_update_all_ratios_are_one(name: str) -> None:
    net, config = SmallNet(), CONFIGS[name]
    example = played(net, config)
    terms = policy_loss(net, SDE, example, config)
    assert terms.ratio_error < 1e-12
    assert terms.clipped == 0
    assert terms.degenerate == 0
    assert terms.action.item() == pytest.approx(-example.advantage.mean().item(), abs=1e-12)


def test_before_the_first_update_the_gradient_is_that_of_the_weighted_log_probability() -> None:
    net, config = SmallNet(), PolicyConfig()
    example = played(net, config)
    parameters = [net.hidden.weight, net.out.weight]
    found = torch.autograd.grad(policy_loss(net, SDE, example, config).total, parameters)
    probable = log_prob(example.chain, chain_steps(net, SDE, example.chain), example.is_executed)
    wanted = torch.autograd.grad(-(example.advantage * probable).mean(), parameters)
    for own, other in zip(found, wanted, strict=True):
        assert torch.allclose(own, other, atol=1e-12)
        assert own.abs().max() > 1e-3


@pytest.mark.parametrize("steps", [None, [1]], ids=["all steps", "one step"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_finite_differences(name: str, steps: list[int] | None) -> None:
    net, config = SmallNet(), replace(CONFIGS[name], kl_weight=0.3)
    example = played(net, config, steps)
    reference = partial(chain_steps, moved(net), SDE)
    net = moved(net)

    def loss() -> Tensor:
        return policy_loss(net, SDE, example, config, reference=reference).total

    found = torch.autograd.grad(loss(), net.out.weight)[0]
    assert found.abs().max() > 1e-3
    with torch.no_grad():
        for index in [(0, 0), (1, 5)]:
            values = []
            for step in (1e-6, -2e-6):
                net.out.weight[index] += step
                values.append(loss().item())
            net.out.weight[index] += 1e-6
            assert found[index].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("name", CONFIGS)
def test_entries_that_were_not_played_do_not_count(name: str) -> None:
    net, config = SmallNet(), CONFIGS[name]
    example = played(net, config)
    is_executed, chain = example.is_executed[:, None], example.chain
    junk = replace(chain, next_actions=torch.where(is_executed, chain.next_actions, 9.0))
    moving = replace(chain, next_actions=torch.where(is_executed, chain.next_actions + 0.1, chain.next_actions))
    net = moved(net)
    plain, same, other = (
        policy_loss(net, SDE, replace(example, chain=own), config).action for own in (chain, junk, moving)
    )
    assert plain == same != other


@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_add_up_to_the_loss(name: str) -> None:
    net, config = SmallNet(), replace(CONFIGS[name], kl_weight=0.3, video_weight=0.5)
    example = played(net, config)
    example = replace(
        example,
        weight=torch.rand(6, dtype=DOUBLE),
        flow=with_noise(example.chain.batch, torch.Generator().manual_seed(3)),
        is_success=torch.tensor([True, True, False, False, True, False]),
    )
    net, reference = moved(net), partial(chain_steps, moved(net), SDE)
    loss = partial(policy_loss, net, SDE, config=config, reference=reference)
    parts = [loss(example[i : i + 2]).total / 3 for i in (0, 2, 4)]
    assert torch.stack(parts).sum().item() == pytest.approx(loss(example).total.item(), rel=1e-6)


def test_the_total_is_the_weighted_sum_of_its_terms() -> None:
    net = SmallNet()
    config = PolicyConfig(kl_weight=0.3, entropy_weight=0.2, value_weight=0.7, video_weight=0.6)
    example = replace(
        played(net, PolicyConfig()),
        flow=with_noise(batch_of(torch.zeros(6, 2, dtype=DOUBLE)), torch.Generator().manual_seed(3)),
        is_success=torch.tensor([True, True, False, False, True, False]),
        value_target=torch.randn(6, dtype=DOUBLE),
    )
    terms = policy_loss(
        moved(net), SDE, example, config,
        reference=partial(chain_steps, net, SDE), value_head=lambda batch: batch.state.sum(dim=(1, 2)),
    )  # fmt: skip
    wanted = terms.action + 0.3 * terms.kl - 0.2 * terms.entropy + 0.7 * terms.value + 0.6 * terms.video
    assert terms.total.item() == pytest.approx(wanted.item(), rel=1e-9)
    assert min(abs(term.item()) for term in (terms.kl, terms.entropy, terms.value, terms.video)) > 1e-4


def test_one_chunk_s_probability_rises_with_its_advantage_and_falls_with_its_sign_flipped() -> None:
    config = PolicyConfig()
    for sign in (1.0, -1.0):
        net = SmallNet()
        example = replace(played(net, config), advantage=torch.full((6,), sign, dtype=DOUBLE))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        policy_loss(net, SDE, example, config).total.backward()
        optimizer.step()
        after = log_prob(example.chain, chain_steps(net, SDE, example.chain), example.is_executed)
        assert ((after - example.old_log_prob).mean() * sign).item() > 1e-4


def test_equal_spreads_have_the_golden_kl_and_that_of_their_velocities() -> None:
    step, sigma, level = 0.1, 0.7, 0.6
    std = torch.tensor(sigma * step**0.5, dtype=DOUBLE)
    means = torch.tensor([0.3, 0.35], dtype=DOUBLE)
    found = gaussian_kl(Gaussian(means[1], std), Gaussian(means[0], std))
    assert found.item() == pytest.approx(0.02551, abs=5e-6)
    scale = torch.tensor(sigma * ((1 - level) / level) ** 0.5, dtype=DOUBLE).item()  # so that sigma(level) is sigma
    velocity = torch.randn(2, 5, dtype=DOUBLE)
    noised, levels = torch.randn(5, dtype=DOUBLE), torch.full((5,), level, dtype=DOUBLE)
    policy = replace(SDE, noise_scale=scale, level_cap=0.9)
    pair = [policy(noised, noised, own, levels, levels - step) for own in velocity]
    wanted = 0.5 * step * (1 / sigma + sigma * (1 - level) / (2 * level)) ** 2 * (velocity[0] - velocity[1]).square()
    assert torch.allclose(gaussian_kl(*pair), wanted, atol=1e-13)


def test_the_kl_of_any_gaussians_is_torch_s() -> None:
    mean, other = torch.randn(2, 4, 3, dtype=DOUBLE)
    std, spread = torch.rand(2, 4, 3, dtype=DOUBLE) + 0.1
    normal = torch.distributions.Normal
    wanted = torch.distributions.kl_divergence(normal(mean, std), normal(other, spread))
    assert torch.allclose(gaussian_kl(Gaussian(mean, std), Gaussian(other, spread)), wanted)
    assert torch.allclose(feature_kl(mean, std, other, spread), wanted.sum(dim=-1))
    assert not gaussian_kl(Gaussian(mean, torch.zeros(())), Gaussian(other, torch.zeros(()))).any()


def test_sampled_kls_estimate_the_exact_one() -> None:
    std = 0.7 * 0.1**0.5
    own, other = torch.distributions.Normal(0.05, std), torch.distributions.Normal(0.0, std)
    samples = 0.05 + std * torch.randn(1_000_000, dtype=DOUBLE)
    estimates = {k: sampled_kl(own.log_prob(samples), other.log_prob(samples), k) for k in ("k1", "k2", "k3")}
    for found in estimates.values():
        assert found.mean().item() == pytest.approx(0.02551, abs=1.2e-3)
    assert estimates["k1"].min() < 0 <= estimates["k3"].min()
    assert estimates["k3"].var() < estimates["k1"].var() / 30
    with pytest.raises(InputError, match='no estimator "k4"'):
        sampled_kl(samples, samples, "k4")


def test_a_policy_is_at_no_distance_from_itself_and_its_samples_say_the_same_as_the_closed_form() -> None:
    net = SmallNet()
    chain = play(net, batch_of(torch.zeros(4000, 2, dtype=DOUBLE)), seed=2)
    example = example_of(chain, torch.zeros(4000, dtype=DOUBLE))
    assert policy_loss(net, SDE, example, reference=partial(chain_steps, net, SDE)).kl == 0
    reference = partial(chain_steps, moved(net, 0.05), SDE)
    closed, sampled = (
        policy_loss(net, SDE, example, PolicyConfig(kl=kl), reference=reference).kl.item() for kl in ("closed", "k3")
    )
    assert closed > 0.01
    assert sampled == pytest.approx(closed, rel=0.1)


def test_only_successful_episodes_teach_the_video() -> None:
    net = SmallNet()
    example = played(net, PolicyConfig())
    is_success = torch.tensor([False, True, False, False, False, True])
    flow = with_noise(example.chain.batch, torch.Generator().manual_seed(3))
    example = replace(example, flow=flow, is_success=is_success)
    found = success_video_loss(net, example)
    junk = replace(flow.target, video=torch.where(is_success[:, None, None, None, None], flow.target.video, 9.0))
    assert success_video_loss(net, replace(example, flow=replace(flow, target=junk))) == found > 0
    won = flow._map(lambda tensor: tensor[is_success])
    assert found.item() == pytest.approx(2 / 6 * flow_loss(net, won).video.item(), rel=1e-6)
    assert success_video_loss(net, replace(example, is_success=torch.zeros(6, dtype=torch.bool))) == 0
    found.backward()
    assert net.video.weight.grad is not None
    assert net.out.weight.grad is None or not net.out.weight.grad.any()


def test_a_value_head_learns_the_returns_of_what_it_sees() -> None:
    state = torch.randn(64, 2, dtype=DOUBLE)
    batch = batch_of(state)
    target = state.sum(dim=1).float()
    head = ValueHead(latent_channels=2, state_dim=2, text_dim=2, grid=2, width=16)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(150):
        loss = value_loss(head(batch), target).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


def test_a_clipped_value_pays_the_larger_error() -> None:
    value, target, old = (torch.tensor(row) for row in ([1.0, 0.1, 3.0], [1.0, 1.0, 2.0], [0.0, 0.0, 0.0]))
    found = value_loss(value, target, old, 0.2)
    assert found.tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 0.9**2, 0.5 * 1.8**2])
    with pytest.raises(InputError, match="give old_value"):
        value_loss(value, target, None, 0.2)


def test_missing_parts_are_named() -> None:
    net = SmallNet()
    example = played(net, PolicyConfig())
    with pytest.raises(InputError, match="reduce them by one LogProbConfig"):
        policy_loss(net, SDE, example, CONFIGS["a ratio a tick"])
    with pytest.raises(InputError, match="give value_target"):
        policy_loss(net, SDE, example, value_head=lambda batch: batch.state[:, 0, 0])
    with pytest.raises(InputError, match="give flow and is_success"):
        policy_loss(net, SDE, example, PolicyConfig(video_weight=1.0))
    with pytest.raises(InputError, match="above 1"):
        ClipConfig(dual=0.5)
