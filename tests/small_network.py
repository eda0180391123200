"""A network of a few thousand weights and batches for it, for the laws that run in processes of their own."""

import torch
from torch import nn

from wamlab.model.presets import tiny
from wamlab.model.wam import WorldActionModel
from wamlab.types import Batch


def open_net(num_layers: int) -> WorldActionModel:
    """Return a network none of whose parameters is zero, so that gradients reach everything."""
    torch.manual_seed(0)
    config = tiny(dim=32, layers=num_layers, heads=2, ffn_dim=64, mlp_dim=16, latent_channels=4, text_dim=8, text_len=6)
    net = WorldActionModel(config)
    for p in net.parameters():  # heads start at zero
        if not p.any():
            nn.init.normal_(p, std=0.02)
    return net


def batch_of(generator: torch.Generator, num_samples: int, num_blocks: int = 1) -> Batch:
    """Draw a batch of windows of 2 latents and 8 actions a block."""
    return Batch(
        latents=torch.randn(num_samples, 1 + 2 * num_blocks, 4, 4, 4, generator=generator),
        actions=torch.rand(num_samples, 8 * num_blocks, 8, generator=generator),
        action_mask=torch.ones(num_samples, 8 * num_blocks, 8, dtype=torch.bool),
        state=torch.randn(num_samples, num_blocks, 8, generator=generator),
        text=torch.randn(num_samples, 3, 8, generator=generator),
    )
