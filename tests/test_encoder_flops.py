"""The tabulated costs of the frozen encoders are what counting them on meta tensors finds."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from wamlab.codec.flops import VAE_COSTS, image_cost, text_cost, video_cost
from wamlab.codec.pretrained import ClipConfig, Umt5Config, WanVaeConfig
from wamlab.codec.video import DctConfig


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_the_autoencoders_cost_what_is_tabulated(version: str) -> None:
    pytest.importorskip("diffusers")
    from wamlab.codec.wan_vae import empty_wan_vae

    vae, (height, width, flops, *_) = empty_wan_vae(version), VAE_COSTS[version]
    for scale in (1, 2):  # operations grow with the picture
        pixels = torch.empty(1, 3, 33, height // scale, width // scale, device="meta")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            vae.encode(pixels)
        cost = video_cost(WanVaeConfig(version=version), 33, height // scale, width // scale)
        assert counter.get_total_flops() == pytest.approx(cost.flops, rel=0.005)
    assert flops == pytest.approx({"2.1": 37.7e12, "2.2": 6.0e12}[version], rel=0.01)  # DreamZero's, as reported


def test_text_and_image_encoders_cost_what_was_measured() -> None:
    assert text_cost(Umt5Config(), 512).flops == pytest.approx(4.84e12, rel=0.005)
    assert image_cost(ClipConfig()).flops == pytest.approx(0.31e12, rel=0.06)
    assert video_cost(DctConfig(), 33, 64, 64).flops == 0
