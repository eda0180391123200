"""Where tokens stand: rotary angles of video, actions and states (spec 1.6), and a code of places on the canvas."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from wamlab.model.attention import Layout


def rotate(tokens: Tensor, rotation: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last axis: tokens (b, l, heads, head_dim), rotation (l, head_dim / 2, 2).

    A rotation may also lead with the batch axis. Angles come from float64 and are applied in float32.
    """
    pairs = tokens.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # the compiler cannot fuse complex numbers
        even, odd = pairs.unbind(-1)
        cos, sin = rotation[..., None, :, :].unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation)[..., None, :])
    return turned.flatten(-2).type_as(tokens)


def axis_angles(positions: Tensor, num_dims: int) -> Tensor:
    """Return float64 angles (l, num_dims / 2) of positions (l) along one axis with ``num_dims`` dimensions."""
    exponents = torch.arange(0, num_dims, 2, dtype=torch.float64, device=positions.device) / num_dims
    return positions.double()[:, None] * 10000.0**-exponents


def video_angles(first_frame: int, num_frames: int, height: int, width: int, head_dim: int) -> Tensor:
    """Return angles (frames * height * width, head_dim / 2); time takes head_dim - 4 * (head_dim // 6) dims."""
    spatial = 2 * (head_dim // 6)
    grid = torch.meshgrid(
        torch.arange(first_frame, first_frame + num_frames),
        torch.arange(height),
        torch.arange(width),
        indexing="ij",
    )
    dims = (head_dim - 2 * spatial, spatial, spatial)
    return torch.cat([axis_angles(axis.flatten(), n) for axis, n in zip(grid, dims, strict=True)], dim=1)


def time_shift_angles(num_frames: int, head_dim: int) -> Tensor:
    """Return the angles (1, head_dim / 2) that move video keys in time by ``num_frames`` and leave their place."""
    num_time = head_dim - 4 * (head_dim // 6)
    angles = axis_angles(torch.tensor([num_frames]), num_time)
    return torch.cat([angles, angles.new_zeros(1, head_dim // 2 - angles.shape[1])], dim=1)


def rotation_of(angles: Tensor, device: torch.device) -> Tensor:
    """Turn float64 angles (l, n) into the float32 cosines and sines (l, n, 2) that ``rotate`` takes."""
    with torch.inference_mode(False):  # the result is cached: one made in inference mode could never train
        return torch.stack([angles.cos(), angles.sin()], dim=-1).float().to(device)


@lru_cache(maxsize=8)
def place_code(height: int, width: int, dim: int, device: torch.device) -> Tensor:
    """Return a fixed code (height * width, dim) of where on the canvas a patch lies.

    The rotary angles tell patches apart only relative to one another, so that a network must learn absolute places
    before it can name one to its action tokens; published weights have learnt it, a run of minutes has no time to.
    """
    with torch.inference_mode(False):  # cached, as the rotations are
        rates = torch.pi * 1.5 ** torch.arange(-(-dim // 4), device=device).remainder(8)
        places = [(torch.arange(n, device=device) + 0.5) / n for n in (height, width)]
        row_and_column = torch.stack(torch.meshgrid(*places, indexing="ij"), dim=-1).flatten(0, 1)
        angles = row_and_column[..., None] * rates
        return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :dim]


@lru_cache(maxsize=32)
def window_rotation(layout: Layout, height: int, width: int, head_dim: int, device: torch.device) -> Tensor:
    """Return rotations (l, head_dim / 2, 2) of a training window; both copies of a frame have the same ones."""
    video = video_angles(0, layout.num_frames, height, width, head_dim)
    actions = axis_angles(torch.arange(layout.num_blocks * layout.actions_per_block), head_dim)
    states = axis_angles(torch.arange(layout.num_blocks * layout.states_per_block), head_dim)
    num_clean, num_noisy, *_ = layout.sizes
    return rotation_of(torch.cat([video[:num_clean], video[-num_noisy:], actions, states]), device)


@lru_cache(maxsize=64)
def step_rotation(
    first_frame: int,
    num_frames: int,
    height: int,
    width: int,
    head_dim: int,
    latents_per_block: int,
    num_actions: int,
    num_states: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return rotations of the block that starts at a latent frame: with actions and state, and video alone."""
    block = math.ceil((first_frame - 1) / latents_per_block)
    video = video_angles(first_frame, num_frames, height, width, head_dim)
    actions = axis_angles(torch.arange(block * num_actions, (block + 1) * num_actions), head_dim)
    states = axis_angles(torch.arange(block * num_states, (block + 1) * num_states), head_dim)
    both = rotation_of(torch.cat([video, actions, states]), device)
    return both, both[: len(video)]
