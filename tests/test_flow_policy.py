"""Denoising as a policy: what the rollout drew, the trainer finds as probable again, through the real network."""

import math
from functools import partial

import pytest
import torch
from small_network import batch_of, open_net
from torch import Tensor

from wamlab.errors import InputError
from wamlab.flow import solver_levels
from wamlab.model.sampler import SamplerConfig, sample_block
from wamlab.model.wam import WorldActionModel
from wamlab.rl.chain import Chain, SampledChunk, StepPolicy, chain_of, sample_chunk
from wamlab.rl.flow_policy import (
    FlowNoise,
    FlowSde,
    LogProbConfig,
    chain_steps,
    degenerate_share,
    entropy,
    log_prob,
    played_log_prob,
)
from wamlab.rl.objectives import PolicyExample, policy_loss
from wamlab.types import Batch

NUM_STEPS = 4
LEVELS = solver_levels(NUM_STEPS).tolist()
SDE = FlowSde(level_cap=LEVELS[1], noise_scale=0.7)


def draw(index: int, shape: tuple[int, ...] = (3, 8, 8)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + index))


def played(
    net: WorldActionModel,
    policy: StepPolicy,
    steps: list[int] | None = None,
    *,
    num_blocks: int = 1,
    video_policy: StepPolicy | None = None,
) -> tuple[Batch, SampledChunk]:
    """Denoise the last block of three windows with the network's own cache of the frames before it."""
    batch = batch_of(torch.Generator().manual_seed(1), 3, num_blocks)
    with torch.no_grad():
        history = net.start(batch.text)
        for start, end in [(0, 1), *((1 + 2 * i, 3 + 2 * i) for i in range(num_blocks - 1))]:
            history = net.observe(history, batch.latents[:, start:end])
        state = batch.state[:, -1:]

        def denoise(latents: Tensor, actions: Tensor, video_level: float, action_level: float):
            levels = (torch.full((3,), level, dtype=torch.float64) for level in (video_level, action_level))
            return net.denoise(history, latents, actions, state, *levels)

        noise = draw(-1, (3, 2, 4, 4, 4)), draw(-2)
        sampled = sample_chunk(
            denoise, state, noise, policy, LEVELS, draw, steps=steps, video_policy=video_policy,
            draw_video=partial(draw, shape=(3, 2, 4, 4, 4)) if video_policy else None,
        )  # fmt: skip
        wanted = sample_block(net, history, state, noise, SamplerConfig(num_steps=NUM_STEPS))
    if isinstance(policy, FlowSde) and not policy.noise_scale:
        assert torch.allclose(sampled.actions, wanted[1], atol=1e-5)
        assert torch.allclose(sampled.latents, wanted[0], atol=1e-5)
    return batch, sampled


def executed(chain: Chain) -> Tensor:
    """Return a mask of ticks and dimensions that leaves out some of each, and all blocks but the last."""
    mask = torch.zeros(chain.batch.actions.shape, dtype=torch.bool)
    mask[:, -8:-2, :6] = True
    return mask


def test_without_noise_a_chunk_is_the_sampler_s_and_its_ratio_is_flagged() -> None:
    net = open_net(2)
    batch, sampled = played(net, FlowSde(level_cap=LEVELS[1], noise_scale=0.0))
    chain = chain_of(batch, sampled)
    steps = chain_steps(net, FlowSde(level_cap=LEVELS[1], noise_scale=0.0), chain)
    assert not log_prob(chain, steps, executed(chain)).any()
    assert degenerate_share(steps, executed(chain)) == 1


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("steps", [None, [2], [0]], ids=["all steps", "one step", "first step"])
def test_the_trainer_finds_the_rollout_s_log_probability(steps: list[int] | None, num_blocks: int) -> None:
    """Cached denoising and teacher forcing are one network, so that ratios are 1 before the first update."""
    net = open_net(2)
    batch, sampled = played(net, SDE, steps, num_blocks=num_blocks)
    chain = chain_of(batch, sampled)
    mask = executed(chain)
    again = chain_steps(net, SDE, chain)
    assert chain.next_actions.shape[1] == (NUM_STEPS if steps is None else 1)
    assert degenerate_share(again, mask) == 0
    assert torch.allclose(log_prob(chain, again, mask), played_log_prob(chain, mask), atol=2e-3)
    assert log_prob(chain, again, mask).abs().min() > 1
    with torch.no_grad():
        next(iter(net.action_decoder.parameters())).mul_(1.5)
    other = log_prob(chain, chain_steps(net, SDE, chain), mask)
    assert (other - played_log_prob(chain, mask)).abs().min() > 5e-3


def test_the_policy_loss_of_the_real_network_starts_at_ratio_one_and_reaches_its_action_weights() -> None:
    net = open_net(2)
    chain = chain_of(*played(net, SDE))
    mask, ones = executed(chain), torch.ones(3)
    example = PolicyExample(chain, mask, played_log_prob(chain, mask), torch.tensor([1.0, -0.5, 0.2]), ones)
    terms = policy_loss(net, SDE, example)
    assert terms.ratio_error < 2e-3
    assert terms.action.item() == pytest.approx(-0.7 / 3, abs=1e-3)
    terms.total.backward()
    for weights in (net.action_decoder, net.action_encoder, net.blocks):
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in weights.parameters())
        assert any(p.grad is not None and p.grad.any() for p in weights.parameters())


def test_a_chain_repeats_itself_from_counted_noise() -> None:
    net = open_net(1)
    first, second = (played(net, SDE)[1] for _ in range(2))
    assert torch.equal(first.next_actions, second.next_actions)
    assert torch.equal(first.actions, first.next_actions[:, -1])
    assert torch.equal(first.seen_actions[:, 1:], first.next_actions[:, :-1])


def test_only_the_video_of_a_joint_policy_is_drawn() -> None:
    net = open_net(2)
    _, plain = played(net, SDE)
    batch, joint = played(net, SDE, video_policy=SDE)
    chain = chain_of(batch, joint)
    assert plain.next_latents is None
    assert not torch.allclose(plain.latents, joint.latents, atol=1e-2)
    mask = executed(chain)
    both, alone = (log_prob(chain, chain_steps(net, SDE, chain, video), mask) for video in (SDE, None))
    assert chain.next_latents is not None
    video = chain_steps(net, SDE, chain, SDE).video
    assert video is not None
    normal = torch.distributions.Normal(video.mean[:, :, 1:].double(), video.std[:, :, 1:].double())
    wanted = normal.log_prob(chain.next_latents[:, :, 1:].double()).flatten(1).sum(dim=1)
    assert torch.allclose((both - alone).double(), wanted, atol=1e-3)
    with pytest.raises(InputError, match="video was deterministic"):
        chain_steps(net, SDE, chain_of(batch, plain), SDE)
    with pytest.raises(InputError, match="no ticks"):
        log_prob(chain, chain_steps(net, SDE, chain, SDE), mask, LogProbConfig(per="tick"))


def test_reductions_say_over_what_they_sum() -> None:
    net = open_net(1)
    chain = chain_of(*played(net, SDE))
    mask = executed(chain)
    steps = chain_steps(net, SDE, chain)

    def found(**options) -> Tensor:
        return log_prob(chain, steps, mask, LogProbConfig(**options))

    assert torch.allclose(found(entries="mean") * mask[0].sum(), found(), rtol=1e-4)
    assert torch.allclose(found(steps="mean") * NUM_STEPS, found(), rtol=1e-4)
    assert torch.allclose(found(steps="each").sum(dim=1), found(), rtol=1e-4)
    ticks = found(per="tick")
    assert ticks.shape == (3, 8)
    assert not ticks[:, 6:].any()
    assert torch.allclose(ticks.sum(dim=1), found(), rtol=1e-4)
    assert found(per="tick", steps="each").shape == (3, NUM_STEPS, 8)
    start = torch.where(mask, torch.distributions.Normal(0, 1).log_prob(chain.seen.actions[:, 0]), 0).sum(dim=(1, 2))
    assert torch.allclose(found(has_start=True) - found(), start, atol=1e-3)
    with pytest.raises(InputError, match="give one of sum, mean"):
        LogProbConfig(entries="total")


def test_learned_noise_stays_in_its_bounds_and_learns_from_log_probabilities() -> None:
    net, policy = open_net(1), FlowNoise(8, 8, least_std=0.1, most_std=0.4)
    chain = chain_of(*played(net, policy, num_blocks=2))
    mask = executed(chain)
    steps = chain_steps(net, policy, chain)
    own = steps.actions.std[:, :, 8:]
    assert torch.allclose(own, torch.full_like(own, 0.2))  # a new one stands in the middle of the log-variances
    assert not steps.actions.std[:, :, :8].any()
    assert torch.allclose(log_prob(chain, steps, mask), played_log_prob(chain, mask), atol=1e-3)
    assert entropy(steps, mask).tolist() == pytest.approx([0.5 * math.log(2 * math.pi * math.e * 0.04)] * 3, abs=1e-5)
    log_prob(chain, steps, mask).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.body[-1].parameters())
    with torch.no_grad():
        policy.body[-1].bias.fill_(50.0)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert chain_steps(net, policy, chain).actions.std.max().item() == pytest.approx(0.4, abs=1e-5)


def test_wrong_steps_are_refused() -> None:
    with pytest.raises(InputError, match=r"stochastic steps are \[4\]: give some of 0 to 3"):
        played(open_net(1), SDE, [4])
