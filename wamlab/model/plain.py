"""The world action model written out plainly, as the oracle and the baseline of everything done for speed.

``PlainWorldActionModel`` trains so; ``plain_forward`` takes the parameters of any ``WorldActionModel``. Both compute
what the published training step computes, in its order: modulation spread over every token, rotations in complex
double precision, text padded to its full length, image and text keys projected anew in every layer, fifteen attention
calls a layer at four blocks, and every token through every layer whether or not its result is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wamlab.errors import InputError
from wamlab.model.block import Block, CrossAttention, RmsNorm
from wamlab.model.positions import axis_angles, video_angles
from wamlab.model.tokens import patches, unpatch
from wamlab.model.wam import PATCH_PX, WAMConfig, WorldActionModel
from wamlab.types import Batch, Noised, Velocity


class PlainBlock(Block):
    """A block whose training form is the plain one; cached inference is that of ``Block``."""

    def forward(self, *args: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return plain_block(self, *args)


class PlainWorldActionModel(WorldActionModel):
    """The network as published training computes it; its parameters, losses and gradients are those of the fast one."""

    block_type = PlainBlock

    def __init__(self, config: WAMConfig) -> None:
        if config.video_spread or config.drops_noisy_first or config.position_scale:
            raise InputError(
                "the plain network is the published one: model.video_spread, model.drops_noisy_first and "
                "model.position_scale must be off"
            )
        super().__init__(config)

    def forward(self, batch: Batch, noised: Noised) -> Velocity:
        """Predict every noised block of a window, including noised frame 0."""
        return plain_forward(self, batch, noised, lambda block, *args: block(*args))


def plain_forward(
    net: WorldActionModel, batch: Batch, noised: Noised, run_block: Callable[..., Tensor] | None = None
) -> Velocity:
    """Predict every noised block of a window, including noised frame 0."""
    run_block = run_block or plain_block
    c = net.config
    num_blocks, num_frames = batch.state.shape[1], batch.latents.shape[1]
    num_actions = noised.actions.shape[1] // num_blocks
    clean, noisy = (plain_patches(net, latents, batch.condition) for latents in (batch.latents, noised.latents))
    frame_tokens = clean.shape[1] // num_frames
    actions = net.action_encoder(noised.actions, noised.action_noise_level)
    state_level = noised.action_noise_level[:, ::num_actions].repeat_interleave(c.states_per_block, dim=1)
    video_level = noised.video_noise_level.repeat_interleave(frame_tokens, dim=1)
    level = torch.cat([torch.zeros_like(video_level), video_level, noised.action_noise_level, state_level], dim=1)
    time, modulation = net._time(level)  # one of each a token
    height, width = (length // PATCH_PX for length in batch.latents.shape[-2:])
    video = video_angles(0, num_frames, height, width, c.head_dim)
    angles = torch.cat(
        [
            video,
            video,
            axis_angles(torch.arange(num_blocks * num_actions), c.head_dim),
            axis_angles(torch.arange(num_blocks * c.states_per_block), c.head_dim),
        ]
    )
    rotation = torch.polar(torch.ones_like(angles), angles)
    text, image = plain_context(net, batch.text, batch.image)
    tokens = torch.cat([clean, noisy, actions, net.state_encoder(batch.state)], dim=1)
    groups = query_groups(num_blocks, frame_tokens, c.latents_per_block, num_actions, c.states_per_block)
    for block in net.layers:
        tokens = run_block(block, tokens, modulation, rotation, text, image, groups)
    num_video = num_frames * frame_tokens
    found = tokens[:, num_video : 2 * num_video]
    shift, scale = (net.head.modulation[:, None] + time[:, num_video : 2 * num_video, None]).unbind(2)
    found = net.head.head(F.layer_norm(found, found.shape[-1:], eps=c.eps) * (1 + scale) + shift)
    velocity = unpatch(found.unflatten(1, (num_frames, frame_tokens)), height, width, PATCH_PX)
    end = 2 * num_video + num_blocks * num_actions
    return Velocity(video=velocity.float(), actions=net.action_decoder(tokens[:, 2 * num_video : end]).float())


def plain_patches(net: WorldActionModel, latents: Tensor, condition: Tensor | None) -> Tensor:
    """Return one token (b, l, d) a patch."""
    joined = latents if condition is None else torch.cat([latents, condition], dim=2)
    weight, bias = net.patch_embedding.weight.flatten(1), net.patch_embedding.bias
    return F.linear(patches(joined, PATCH_PX), weight, bias).flatten(1, 2)


def plain_context(net: WorldActionModel, text: Tensor, image: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Embed the text at its full padded length, and the image."""
    padded = F.pad(text, (0, 0, 0, net.config.text_len - text.shape[1]))
    has_image = image is not None and net.config.has_image
    return net.text_embedding(padded), net.img_emb(image) if has_image else None


def query_groups(
    num_blocks: int, frame_tokens: int, latents_per_block: int, num_actions: int, num_states: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the (query, key) positions of each attention call, in the order of the tokens."""
    size = latents_per_block * frame_tokens
    num_video = frame_tokens + num_blocks * size
    action_start = 2 * num_video
    state_start = action_start + num_blocks * num_actions

    def span(start: int, length: int) -> Tensor:
        return torch.arange(start, start + length)

    own = [
        torch.cat(
            [
                span(0, frame_tokens + b * size),
                span(num_video + frame_tokens + b * size, size),
                span(action_start + b * num_actions, num_actions),
                span(state_start + b * num_states, num_states),
            ]
        )
        for b in range(num_blocks)
    ]
    clean = [(span(0, frame_tokens), span(0, frame_tokens))]
    clean += [(span(frame_tokens + b * size, size), span(0, frame_tokens + (b + 1) * size)) for b in range(num_blocks)]
    noisy = [(span(num_video, frame_tokens), span(num_video, frame_tokens))]
    noisy += [(span(num_video + frame_tokens + b * size, size), own[b]) for b in range(num_blocks)]
    actions = [(span(action_start + b * num_actions, num_actions), own[b]) for b in range(num_blocks)]
    states = [(span(state_start + i, 1), span(state_start + i, 1)) for i in range(num_blocks * num_states)]
    return [*clean, *noisy, *actions, *states]


def plain_block(
    block: Block,
    tokens: Tensor,
    modulation: Tensor,
    rotation: Tensor,
    text: Tensor,
    image: Tensor | None,
    groups: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Run one block; ``modulation`` is (b, l, 6, d)."""
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (block.modulation[:, None] + modulation).unbind(2)
    attention = block.self_attn
    hidden = F.layer_norm(tokens, tokens.shape[-1:], eps=block.eps) * (1 + scale_a) + shift_a
    query, key, value = (
        x.unflatten(-1, (attention.num_heads, -1))
        for x in (plain_norm(attention.norm_q, attention.q(hidden)), plain_norm(attention.norm_k, attention.k(hidden)),
                  attention.v(hidden))
    )  # fmt: skip
    query, key = plain_rotate(query, rotation), plain_rotate(key, rotation)
    seen = torch.cat([plain_attention(query[:, q], key[:, k], value[:, k]) for q, k in groups], dim=1)
    tokens = tokens + gate_a * attention.o(seen.flatten(2))
    tokens = tokens + plain_cross(block.cross_attn, block.norm3(tokens), text, image)
    hidden = F.layer_norm(tokens, tokens.shape[-1:], eps=block.eps) * (1 + scale_f) + shift_f
    return tokens + gate_f * block.ffn(hidden)


def plain_norm(norm: RmsNorm, x: Tensor) -> Tensor:
    """Return the root-mean-square norm over the whole width."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + norm.eps)).type_as(x) * norm.weight


def plain_rotate(tokens: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs in complex double precision; axes (b, l, heads, head_dim)."""
    pairs = torch.view_as_complex(tokens.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2).type_as(tokens)


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with axes (b, l, heads, head_dim)."""
    found = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return found.transpose(1, 2)


def plain_cross(cross: CrossAttention, tokens: Tensor, text: Tensor, image: Tensor | None) -> Tensor:
    """Attend to text and image, projecting both anew."""
    heads = (cross.num_heads, -1)
    query = plain_norm(cross.norm_q, cross.q(tokens)).unflatten(-1, heads)
    key, value = (x.unflatten(-1, heads) for x in (plain_norm(cross.norm_k, cross.k(text)), cross.v(text)))
    found = plain_attention(query, key, value)
    if image is not None:
        key, value = (
            x.unflatten(-1, heads) for x in (plain_norm(cross.norm_k_img, cross.k_img(image)), cross.v_img(image))
        )
        found = found + plain_attention(query, key, value)
    return cross.o(found.flatten(2))
