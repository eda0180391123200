"""What the frozen encoders cost: operations, kernels and memory traffic of published sizes, tabulated and scaled.

The figures of the autoencoders were counted on meta tensors in diffusers 0.42 for a clip of 33 frames, December 2026
(``tests/test_encoder_flops.py`` counts them again). Operations and traffic grow with the picture, but for a share of
0.1 % that attention takes; the number of kernels does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from wamlab.codec.pretrained import ClipConfig, Umt5Config, WanVaeConfig
from wamlab.codec.video import GROUP
from wamlab.codec.wan_vae import VERSIONS


@dataclass(frozen=True)
class EncoderCost:
    """One pass of a frozen encoder over one sample."""

    flops: int | float
    bytes_moved: int | float = 0.0  # of everything but products and convolutions, run eagerly in bf16
    launches: int = 0  # kernels, however many samples a pass has
    products: int = 1  # matrix products or convolutions among them
    weight_bytes: int | float = 0.0  # in bf16


VAE_COSTS = {  # of 33 frames: (height, width, FLOPs, bytes moved, kernels, convolutions, parameters encoding)
    "2.1": (352, 640, 37.736e12, 290.6e9, 3001, 278, 53.6e6),
    "2.2": (160, 320, 5.958e12, 28.95e9, 3173, 278, 149.6e6),
}
VAE_FRAMES = 33


def video_cost(config: object, num_frames: int, height_px: int, width_px: int) -> EncoderCost:
    """Return the cost of encoding a clip once; that of the embedded codec is too small to count."""
    if not isinstance(config, WanVaeConfig):
        return EncoderCost(0.0)
    height, width, flops, moved, launches, products, parameters = VAE_COSTS[config.version]
    # Frame 0 alone is a group of a frame, every other group has four.
    frames = num_frames / VAE_FRAMES
    groups = (1 + (num_frames - 1) / GROUP) / (1 + (VAE_FRAMES - 1) / GROUP)
    share = frames * height_px * width_px / (height * width)
    width = config.settings["base_dim"] / VERSIONS[config.version]["base_dim"]  # of its maps, beside the published
    return EncoderCost(
        flops * share * width**2,
        moved * share * width,
        round(launches * groups),
        round(products * groups),
        2 * parameters * width**2,
    )


def text_cost(config: object, num_tokens: int) -> EncoderCost:
    """Return the cost of encoding an instruction of so many tokens, pads included."""
    if not isinstance(config, Umt5Config):
        return EncoderCost(0.0)
    s = config.settings
    dim, inner, ffn, layers = s["d_model"], s["d_kv"] * s["num_heads"], s["d_ff"], s["num_layers"]
    maps = layers * (4 * dim * inner + 3 * dim * ffn)
    flops = 2 * num_tokens * maps + layers * 4 * num_tokens**2 * inner
    passes = 30  # over the width, a layer: norms, gates, residuals, the bias of positions
    weights = 2.0 * (maps + s["vocab_size"] * dim)
    return EncoderCost(float(flops), passes * layers * num_tokens * dim * 2.0, 30 * layers, 7 * layers, weights)


def image_cost(config: object) -> EncoderCost:
    """Return the cost of encoding a first frame with all but CLIP's last block."""
    if not isinstance(config, ClipConfig):
        return EncoderCost(0.0)
    s = config.settings
    dim, ffn, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"] - 1
    tokens = (s["image_size"] // s["patch_size"]) ** 2 + 1
    maps = layers * (4 * dim * dim + 2 * dim * ffn)
    patches = 2 * (tokens - 1) * 3 * s["patch_size"] ** 2 * dim
    flops = 2 * tokens * maps + layers * 4 * tokens**2 * dim + patches
    return EncoderCost(float(flops), 25.0 * layers * tokens * dim * 2, 20 * layers, 6 * layers, 2.0 * maps)
