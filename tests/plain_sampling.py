"""The published sampling procedure written out plainly, as the oracle and the baseline of ``sample_block``.

One action chunk as DreamZero computes it (spec 6.1): every evaluation runs both guidance streams one after the other,
embeds text and image and projects their keys in every layer anew, and modulates every token by its own time. The one
difference is the state row, which sees itself alone as in training.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from wamlab.flow import solver_levels
from wamlab.model.plain import (
    plain_attention,
    plain_context,
    plain_cross,
    plain_norm,
    plain_patches,
    plain_rotate,
)
from wamlab.model.positions import axis_angles, video_angles
from wamlab.model.sampler import STATIC_SCHEDULES, UniPC
from wamlab.model.tokens import unpatch
from wamlab.model.wam import PATCH_PX, WorldActionModel

NUM_STEPS = 16


@dataclass
class PlainStream:
    """One guidance stream: its padded text, its image, and a layer's keys and values of the frames seen."""

    text: Tensor
    image: Tensor | None
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_frames: int = 0


def plain_pass(
    net: WorldActionModel,
    stream: PlainStream,
    latents: Tensor,
    condition: Tensor | None,
    level: float,
    actions: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Run the network on one block: without actions it fills the cache, with them it returns both velocities."""
    c = net.config
    num_frames = latents.shape[1]
    height, width = (length // PATCH_PX for length in latents.shape[-2:])
    parts = [plain_patches(net, latents, condition)]
    num_video = parts[0].shape[1]
    block = (stream.num_frames - 1) // c.latents_per_block if stream.num_frames else 0
    angles = [video_angles(stream.num_frames, num_frames, height, width, c.head_dim)]
    num_states = 0
    if actions is not None and state is not None:
        num_actions, num_states = actions.shape[1], state.shape[1]
        levels = torch.full(actions.shape[:2], level, dtype=torch.float64)
        parts += [net.action_encoder(actions, levels), net.state_encoder(state)]
        angles += [
            axis_angles(torch.arange(block * count, (block + 1) * count), c.head_dim)
            for count in (num_actions, num_states)
        ]
    tokens = torch.cat(parts, dim=1)
    time, modulation = net._time(torch.full(tokens.shape[:2], level, dtype=torch.float64))
    turns = torch.cat(angles)
    rotation = torch.polar(torch.ones_like(turns), turns)
    text, image = plain_context(net, stream.text, stream.image)
    cache = []
    for index, layer in enumerate(net.layers):
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (layer.modulation[:, None] + modulation).unbind(2)
        attention = layer.self_attn
        heads = (attention.num_heads, -1)
        hidden = F.layer_norm(tokens, tokens.shape[-1:], eps=layer.eps) * (1 + scale_a) + shift_a
        query = plain_rotate(plain_norm(attention.norm_q, attention.q(hidden)).unflatten(-1, heads), rotation)
        key = plain_rotate(plain_norm(attention.norm_k, attention.k(hidden)).unflatten(-1, heads), rotation)
        value = attention.v(hidden).unflatten(-1, heads)
        keys, values = key, value
        if stream.cache:
            keys, values = (torch.cat(pair, dim=1) for pair in zip(stream.cache[index], (key, value), strict=True))
        cache.append((keys, values))
        num_seeing = tokens.shape[1] - num_states
        seen = plain_attention(query[:, :num_seeing], keys, values)
        if num_states:
            seen = torch.cat([seen, value[:, num_seeing:]], dim=1)
        tokens = tokens + gate_a * attention.o(seen.flatten(2))
        tokens = tokens + plain_cross(layer.cross_attn, layer.norm3(tokens), text, image)
        hidden = F.layer_norm(tokens, tokens.shape[-1:], eps=layer.eps) * (1 + scale_f) + shift_f
        tokens = tokens + gate_f * layer.ffn(hidden)
    if actions is None:
        stream.cache, stream.num_frames = cache, stream.num_frames + num_frames
        return None
    shift, scale = (net.head.modulation[:, None] + time[:, :num_video, None]).unbind(2)
    found = net.head.head(F.layer_norm(tokens[:, :num_video], tokens.shape[-1:], eps=c.eps) * (1 + scale) + shift)
    video = unpatch(found.unflatten(1, (num_frames, -1)), height, width, PATCH_PX)
    return video, net.action_decoder(tokens[:, num_video : num_video + actions.shape[1]])


def plain_sample(
    net: WorldActionModel,
    streams: tuple[PlainStream, PlainStream],
    state: Tensor,
    noise: tuple[Tensor, Tensor],
    *,
    condition: Tensor | None = None,
    num_evaluations: int = 8,
    guidance_scale: float = 5.0,
) -> tuple[Tensor, Tensor]:
    """Sample one block with UniPC over 16 steps; streams are with the instruction and with the negative one."""
    levels = solver_levels(NUM_STEPS).tolist()
    latents, actions = noise
    solvers = UniPC(levels), UniPC(levels)
    velocity = None
    for index in range(NUM_STEPS):
        if velocity is None or index in STATIC_SCHEDULES[num_evaluations]:
            level = int(1000 * levels[index]) / 1000
            wanted, unwanted = (plain_pass(net, s, latents, condition, level, actions, state) for s in streams)
            assert wanted is not None and unwanted is not None
            velocity = (unwanted[0] + guidance_scale * (wanted[0] - unwanted[0]), wanted[1])
        latents = solvers[0].step(index, latents, velocity[0])
        actions = solvers[1].step(index, actions, velocity[1])
    return latents, actions
