"""Published sizes, and one that trains on a laptop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wamlab.model.wam import WAMConfig


def tiny(**changes: Any) -> WAMConfig:
    """Return about 1.4 M parameters for the embedded codec and text encoder; any field can be changed."""
    config = WAMConfig(
        dim=128,
        layers=4,
        heads=4,
        ffn_dim=512,
        latent_channels=48,
        text_dim=64,
        text_len=24,
        freq_dim=64,
        latents_per_block=2,
        actions_per_block=8,
        max_blocks=2,
        max_action_dim=8,
        max_state_dim=8,
        mlp_dim=256,
    )
    return replace(config, **changes)


def wan22_5b(**changes: Any) -> WAMConfig:
    """Return DreamZero on Wan2.2-TI2V-5B: 5 606 692 832 parameters."""
    config = WAMConfig(
        dim=3072,
        layers=30,
        heads=24,
        ffn_dim=14336,
        latent_channels=48,
        text_dim=4096,
        text_len=512,
        has_image=True,
    )
    return replace(config, **changes)


def wan21_14b(**changes: Any) -> WAMConfig:
    """Return DreamZero on Wan2.1-I2V-14B: 16 484 292 448 parameters."""
    config = WAMConfig(
        dim=5120,
        layers=40,
        heads=40,
        ffn_dim=13824,
        latent_channels=16,
        text_dim=4096,
        text_len=512,
        has_image=True,
        has_condition=True,
    )
    return replace(config, **changes)
