"""What is measured: networks of published geometry with random weights, their windows, and tiny stand-ins."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from wamlab.flow import with_noise
from wamlab.model.flops import Window
from wamlab.model.presets import tiny, wan21_14b, wan22_5b
from wamlab.model.wam import MASK_CHANNELS, WAMConfig, WorldActionModel
from wamlab.types import Batch, FlowExample


@dataclass(frozen=True)
class Size:
    """A network, what it sees, and what is tried."""

    config: WAMConfig
    window: Window
    micro_batches: tuple[int, ...]
    image_tokens: int = 257


TINY = tiny(dim=32, layers=4, heads=2, ffn_dim=64, mlp_dim=16, latent_channels=4, text_dim=8, text_len=6)
SIZES = {
    # DROID as published: 33 frames of 3 cameras on one canvas, 176 x 320 px and 352 x 640 px.
    "5b": Size(wan22_5b(), Window(4, 10, 20, 24, text_tokens=40), (1, 8, 32)),
    "14b": Size(wan21_14b(), Window(4, 44, 80, 24, text_tokens=40), (1,)),
    "laws": Size(
        tiny(dim=256, layers=3, heads=4, ffn_dim=1024, text_dim=64, has_image=True, image_dim=64),
        Window(2, 8, 16, 8, text_tokens=10),
        (2,),
        image_tokens=17,
    ),
    "tiny": Size(TINY, Window(1, 4, 4, 8, text_tokens=3), (1,)),
}


def open_net(config: WAMConfig, device: torch.device) -> WorldActionModel:
    """Return a network of float32 weights, made on the device, none of whose gradients is zero."""
    torch.manual_seed(0)
    with torch.device(device):
        net = WorldActionModel(config)
    for p in net.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.02)
    return net


def example_of(size: Size, num_samples: int, device: torch.device, seed: int = 0) -> FlowExample:
    c, window = size.config, size.window
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(num_samples, *shape, generator=generator, device=device)

    num_frames = 1 + window.num_blocks * c.latents_per_block
    picture = (window.latent_height, window.latent_width)
    num_actions = window.num_blocks * window.actions_per_block
    batch = Batch(
        latents=drawn(num_frames, c.latent_channels, *picture),
        actions=drawn(num_actions, c.max_action_dim).clamp(-1, 1),
        action_mask=torch.ones(num_samples, num_actions, c.max_action_dim, dtype=torch.bool, device=device),
        state=drawn(window.num_blocks, c.max_state_dim),
        text=drawn(window.text_tokens or c.text_len, c.text_dim),
        condition=drawn(num_frames, MASK_CHANNELS + c.latent_channels, *picture) if c.has_condition else None,
        image=drawn(size.image_tokens, c.image_dim) if c.has_image else None,
    )
    return with_noise(batch, generator)


def with_layers(size: Size, num_layers: int) -> Size:
    return replace(size, config=replace(size.config, layers=num_layers))
