"""Who may look at whom: the teacher-forced mask, and attention that never builds it.

Token order of a training window: ``[clean video | noisy video | actions | states]``. Latent frame 0 is block -1;
block ``b`` holds ``latents_per_block`` frames, their actions and one state row (spec 1.7).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Layout:
    """How many tokens of which kind a training window has, in order."""

    num_blocks: int
    frame_tokens: int  # tokens of one latent frame
    latents_per_block: int
    actions_per_block: int  # 0 in a window without actions
    states_per_block: int

    @property
    def num_frames(self) -> int:
        return 1 + self.num_blocks * self.latents_per_block

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the numbers of clean, noisy, action and state tokens."""
        video = self.num_frames * self.frame_tokens
        return video, video, self.num_blocks * self.actions_per_block, self.num_blocks * self.states_per_block

    @property
    def block_tokens(self) -> int:
        """Return the video tokens of one block."""
        return self.latents_per_block * self.frame_tokens

    def prefix_tokens(self, block: int) -> int:
        """Return the clean tokens before a block."""
        return (1 + block * self.latents_per_block) * self.frame_tokens


def block_mask(layout: Layout) -> Bool[Tensor, "q k"]:
    """Return the dense mask, True where a query (row) may look at a key (column): the one statement of the rule."""
    num_clean, num_noisy, num_actions, num_states = layout.sizes
    frames = torch.arange(layout.num_frames).repeat_interleave(layout.frame_tokens)
    video_block = torch.div(frames - 1, layout.latents_per_block, rounding_mode="floor")  # frame 0 is block -1
    blocks = torch.arange(layout.num_blocks)
    block = torch.cat(
        [
            video_block,
            video_block,
            blocks.repeat_interleave(layout.actions_per_block),
            blocks.repeat_interleave(layout.states_per_block),
        ]
    )
    kinds = torch.arange(4).repeat_interleave(torch.tensor([num_clean, num_noisy, num_actions, num_states]))
    is_clean, is_state = kinds == 0, kinds == 3
    same_block = block[:, None] == block[None]
    sees_clean = is_clean[None] & torch.where(
        is_clean[:, None], block[None] <= block[:, None], block[None] < block[:, None]
    )
    sees_own = ~is_clean[:, None] & ~is_clean[None] & same_block
    mask = sees_clean | sees_own
    mask[is_state] = torch.eye(len(kinds), dtype=torch.bool)[is_state]
    return mask


def teacher_forced_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Attend as ``block_mask`` says with one maskless call per block and half; axes (b, heads, tokens, head_dim).

    The noisy frames and the actions of a block have the same keys, so they share a call; a state row sees
    itself alone, so its output is its value.
    """
    clean_q, noisy_q, action_q, _ = query.split(layout.sizes, dim=2)
    clean_k, noisy_k, action_k, state_k = key.split(layout.sizes, dim=2)
    clean_v, noisy_v, action_v, state_v = value.split(layout.sizes, dim=2)
    first, size = layout.frame_tokens, layout.block_tokens
    clean = [attend(clean_q[:, :, :first], clean_k[:, :, :first], clean_v[:, :, :first])]
    noisy = [attend(noisy_q[:, :, :first], noisy_k[:, :, :first], noisy_v[:, :, :first])]
    actions = []
    num_actions, num_states = layout.actions_per_block, layout.states_per_block
    for block in range(layout.num_blocks):
        start = layout.prefix_tokens(block)
        video = slice(start, start + size)
        action = slice(block * num_actions, (block + 1) * num_actions)
        state = slice(block * num_states, (block + 1) * num_states)
        seen = slice(0, start + size)
        clean.append(attend(clean_q[:, :, video], clean_k[:, :, seen], clean_v[:, :, seen]))
        keys, values = (
            torch.cat([c[:, :, :start], n[:, :, video], a[:, :, action], s[:, :, state]], dim=2)
            for c, n, a, s in ((clean_k, noisy_k, action_k, state_k), (clean_v, noisy_v, action_v, state_v))
        )
        both = attend(torch.cat([noisy_q[:, :, video], action_q[:, :, action]], dim=2), keys, values)
        noisy.append(both[:, :, :size])
        actions.append(both[:, :, size:])
    return torch.cat([*clean, *noisy, *actions, state_v], dim=2)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to every key; axes (b, heads, tokens, head_dim)."""
    return scaled_dot_product_attention(query, key, value)


def rotate(tokens: Tensor, rotation: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last axis: tokens (b, l, heads, head_dim), rotation complex (l, head_dim / 2).

    Angles come from float64 and are applied in float32.
    """
    if torch.compiler.is_compiling():  # the compiler cannot fuse complex numbers
        even, odd = tokens.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = rotation.real[:, None], rotation.imag[:, None]
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return turned.flatten(-2).type_as(tokens)
    pairs = torch.view_as_complex(tokens.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2).type_as(tokens)


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


def rotation_of(angles: Tensor, device: torch.device) -> Tensor:
    """Turn float64 angles into the complex64 factors that ``rotate`` takes."""
    with torch.inference_mode(False):  # the result is cached: one made in inference mode could never train
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)
