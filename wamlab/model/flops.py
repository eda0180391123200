"""Floating-point operations of the network, counted from its sizes: what the mask lets be seen, and no more.

Products count two operations a multiply-add; norms, rotations, softmax and gates count none, as everywhere in the
field. A backward pass counts twice its forward products, one for inputs and one for weights, less the inputs that
need no gradient. A FlashAttention kernel computes its scores again and so executes 2.5 times its forward pass
backward, which utilisation by convention does not count (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wamlab.errors import InputError
from wamlab.model.attention import Layout
from wamlab.model.wam import PATCH_PX, WAMConfig, WorldActionModel

IMAGE_TOKENS = 257  # CLIP ViT-H/14: 16 x 16 patches and a class token


@dataclass(frozen=True)
class Window:
    """What one sample of training shows the network."""

    num_blocks: int
    latent_height: int
    latent_width: int
    actions_per_block: int
    text_tokens: int | None = None  # real ones: pads share one more; None: text_len tokens, as published

    @property
    def frame_tokens(self) -> int:
        return (self.latent_height // PATCH_PX) * (self.latent_width // PATCH_PX)


@dataclass(frozen=True)
class NetworkFlops:
    """FLOPs of one sample; ``forward`` is of the whole network, the parts add up to it."""

    tokens: int
    block_linear: int | float  # one block's maps, context's included
    block_attention: int | float  # one block's self- and cross-attention
    saved_last: int | float  # what the last block leaves out as nobody reads it
    outside: int | float  # embeddings, noise levels and heads
    without_gradient: int | float  # input gradients that no parameter needs, of the first maps
    num_layers: int

    @property
    def block(self) -> float:
        return self.block_linear + self.block_attention

    @property
    def attention(self) -> float:
        """Return what attention takes of the forward pass, the last block counted whole."""
        return self.num_layers * self.block_attention

    @property
    def forward(self) -> float:
        return self.num_layers * self.block - self.saved_last + self.outside

    @property
    def train(self) -> float:
        """Return forward and backward of training every parameter: what MFU counts."""
        return 3 * self.forward - self.without_gradient

    def executed(self, num_recomputed: int = 0, *, has_frozen_weights: bool = False) -> float:
        """Return ``train`` with the forward pass of so many blocks done twice: what HFU counts.

        Frozen weights need no gradient (LoRA), so the backward pass counts once its forward pass; adapters of a low
        rank are left out.
        """
        if not 0 <= num_recomputed <= self.num_layers:
            raise InputError(f"{num_recomputed} of {self.num_layers} blocks cannot be recomputed: give 0 to all")
        saved = self.forward if has_frozen_weights else 0.0
        return self.train - saved + num_recomputed * self.block


def layout_of(config: WAMConfig, window: Window, *, is_published: bool) -> Layout:
    """Return the tokens of a training window; the published form keeps those that nobody reads."""
    return Layout(
        window.num_blocks,
        window.frame_tokens,
        config.latents_per_block,
        window.actions_per_block,
        config.states_per_block,
        has_last_clean=is_published,
        has_first_noisy=not config.drops_noisy_first,
    )


def visible_pairs(layout: Layout, *, live_only: bool = False) -> int:
    """Count the (query, key) pairs that the teacher-forced mask lets through, states apart, which see themselves.

    ``live_only`` leaves out the queries of clean tokens, as the last block does.
    """
    frame, size = layout.frame_tokens, layout.block_tokens
    pairs = frame * frame if layout.has_first_noisy else 0
    own = size + layout.actions_per_block
    for block in range(layout.num_blocks):
        before = layout.prefix_tokens(block)
        pairs += own * (before + own + layout.states_per_block)
    if not live_only:
        pairs += frame * frame
        num_clean_blocks = layout.num_blocks - (0 if layout.has_last_clean else 1)
        pairs += sum(size * (layout.prefix_tokens(block) + size) for block in range(num_clean_blocks))
    return pairs


def count_flops(config: WAMConfig, window: Window, *, is_published: bool = False) -> NetworkFlops:
    """Count the training forward pass of one sample.

    ``is_published`` counts the network as it was published, but for the noise levels, which it embeds once a token
    (5.8 TFLOP a sample of 14 B) and this one once a frame.
    """
    c, dim = config, config.dim
    layout = layout_of(c, window, is_published=is_published)
    clean, noisy, actions, states = layout.sizes
    tokens, live = sum(layout.sizes), noisy + actions
    num_text = c.text_len
    if not is_published and window.text_tokens is not None:
        num_text = min(window.text_tokens + 1, c.text_len)
    num_image = IMAGE_TOKENS if c.has_image else 0
    context = num_text + num_image
    per_token = 2 * (6 * dim * dim + 2 * dim * c.ffn_dim)  # self q k v o, cross q o, feed-forward
    block_linear = tokens * per_token + context * 2 * 2 * dim * dim
    pairs = visible_pairs(layout) + (states if is_published else 0)
    block_attention = 4 * dim * (pairs + tokens * context)
    saved_last = 0.0
    if not is_published:  # clean and state tokens are keys and values of the last block and nothing else
        dead = tokens - live
        saved_last = dead * (per_token - 2 * 2 * dim * dim)
        saved_last += 4 * dim * (pairs - visible_pairs(layout, live_only=True) + dead * context)
    patch, head = PATCH_PX**2 * c.in_channels, PATCH_PX**2 * c.latent_channels
    slots = 1 + layout.num_noisy + (layout.num_blocks if actions else 0) + layout.num_blocks
    first = 2 * ((clean + noisy) * patch * dim + num_text * c.text_dim * dim + slots * c.freq_dim * dim)
    first += 2 * (states * c.max_state_dim * c.mlp_dim + actions * c.max_action_dim * dim)
    rest = 2 * (num_text * dim * dim + slots * 7 * dim * dim + noisy * head * dim + states * c.mlp_dim * dim)
    rest += 2 * actions * (3 * dim * dim + dim * c.mlp_dim + c.mlp_dim * c.max_action_dim)
    if c.has_image:  # its first map needs its input's gradient, as a norm with weights stands before it
        rest += 2 * num_image * (c.image_dim**2 + c.image_dim * dim)
    return NetworkFlops(
        tokens, float(block_linear), float(block_attention), float(saved_last), float(first + rest), float(first),
        c.layers,
    )  # fmt: skip


def count_parameters(config: WAMConfig) -> int:
    """Return the number of parameters, from a network made without memory."""
    with torch.device("meta"):
        net = WorldActionModel(config)
    return sum(p.numel() for p in net.parameters())
