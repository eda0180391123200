"""FLOPs counted from sizes equal those counted while running, and the published figures."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wamlab.errors import InputError
from wamlab.model import presets
from wamlab.model.attention import Layout, block_mask
from wamlab.model.flops import Window, count_flops, count_parameters, visible_pairs
from wamlab.model.plain import plain_forward
from wamlab.model.wam import WorldActionModel
from wamlab.types import Batch, Noised

DROID_5B, DROID_14B = Window(4, 10, 20, 24), Window(4, 44, 80, 24)


def test_published_networks_take_the_published_operations():
    small = count_flops(presets.wan22_5b(), DROID_5B, is_published=True)
    large = count_flops(presets.wan21_14b(), DROID_14B, is_published=True)
    assert (small.tokens, large.tokens) == (1000, 15_940)
    assert small.train == pytest.approx(30.2e12, rel=0.01)
    assert large.train == pytest.approx(1374e12, rel=0.01)
    assert small.executed(30) == pytest.approx(40.3e12, rel=0.015)
    assert large.executed(40) == pytest.approx(1832e12, rel=0.01)


def test_pairs_are_those_of_the_mask():
    for is_whole in (True, False):
        layout = Layout(3, 5, 2, 4, 1, has_last_clean=is_whole, has_first_noisy=is_whole)
        assert visible_pairs(layout) + layout.sizes[3] == int(block_mask(layout).sum())


def sample(config, num_real: int):
    frames = 1 + 2 * config.latents_per_block
    latents = torch.randn(1, frames, config.latent_channels, 4, 6)
    actions = torch.randn(1, 2 * config.actions_per_block, config.max_action_dim)
    extra = config.in_channels - config.latent_channels
    batch = Batch(
        latents=latents,
        actions=actions,
        action_mask=torch.ones_like(actions, dtype=torch.bool),
        state=torch.randn(1, 2, config.max_state_dim),
        text=torch.randn(1, num_real, config.text_dim),
        condition=torch.randn(1, frames, extra, 4, 6) if extra else None,
        image=torch.randn(1, 257, config.image_dim) if config.has_image else None,
    )
    levels = torch.full((1, frames), 0.5, dtype=torch.float64)
    return batch, Noised(latents, actions, levels, torch.full(actions.shape[:2], 0.5, dtype=torch.float64))


@pytest.mark.parametrize("changes", [{}, {"has_image": True, "has_condition": True}, {"drops_noisy_first": True}])
def test_counting_while_running_finds_the_same(changes):
    """Plain products stand for attention: the counter knows no fused kernel of a CPU, and those of CUDA at 2.5 times
    the forward pass backward, as they compute scores again."""
    config = presets.tiny(**changes)
    net, (batch, noised) = WorldActionModel(config), sample(config, 7)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        velocity = net(batch, noised)
    flops = count_flops(config, Window(2, 4, 6, config.actions_per_block, text_tokens=7))
    assert counter.get_total_flops() == flops.forward
    with counter:
        (velocity.video.sum() + velocity.actions.sum()).backward()
    assert counter.get_total_flops() == flops.train - flops.forward


def test_counting_the_published_form_while_running_adds_the_noise_levels_of_every_token():
    config = presets.tiny(has_image=True)
    net, (batch, noised) = WorldActionModel(config), sample(config, 7)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        plain_forward(net, batch, noised)
    window = Window(2, 4, 6, config.actions_per_block)
    flops = count_flops(config, window, is_published=True)
    slots = 1 + 5 + 2 + 2
    levels = 2 * (flops.tokens - slots) * (config.freq_dim * config.dim + 7 * config.dim**2)
    assert counter.get_total_flops() == flops.forward + levels


def test_recomputed_blocks_are_done_twice_and_frozen_weights_need_no_gradient():
    flops = count_flops(presets.tiny(), Window(2, 4, 6, 8))
    assert flops.executed(4) - flops.executed(1) == pytest.approx(3 * flops.block)
    assert flops.executed(has_frozen_weights=True) == pytest.approx(flops.train - flops.forward)
    with pytest.raises(InputError, match="5 of 4 blocks"):
        flops.executed(5)


def test_parameters_are_the_published_ones():
    assert count_parameters(presets.wan21_14b()) == 16_484_292_448
