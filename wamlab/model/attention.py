"""Who may look at whom: the teacher-forced mask, and attention that never builds it.

Token order of a training window: ``[clean video | noisy video | actions | states]``. Latent frame 0 is block -1;
block ``b`` holds ``latents_per_block`` frames, their actions and one state row (spec 1.7). A window may leave out
what nobody needs: the last clean block, which no other token sees, and noisy frame 0, which sees only itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Layout:
    """How many tokens of which kind a training window has, in order."""

    num_blocks: int
    frame_tokens: int  # tokens of one latent frame
    latents_per_block: int
    actions_per_block: int  # 0 in a window without actions
    states_per_block: int
    has_last_clean: bool = True  # the clean copy of the last block
    has_first_noisy: bool = True  # the noised copy of frame 0

    @property
    def num_frames(self) -> int:
        return 1 + self.num_blocks * self.latents_per_block

    @property
    def num_clean(self) -> int:
        """Return the number of clean frames."""
        return self.num_frames - (0 if self.has_last_clean else self.latents_per_block)

    @property
    def num_noisy(self) -> int:
        """Return the number of noised frames."""
        return self.num_frames - (0 if self.has_first_noisy else 1)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the numbers of clean, noisy, action and state tokens."""
        return (
            self.num_clean * self.frame_tokens,
            self.num_noisy * self.frame_tokens,
            self.num_blocks * self.actions_per_block,
            self.num_blocks * self.states_per_block,
        )

    @property
    def block_tokens(self) -> int:
        """Return the video tokens of one block."""
        return self.latents_per_block * self.frame_tokens

    def prefix_tokens(self, block: int) -> int:
        """Return the clean tokens before a block."""
        return (1 + block * self.latents_per_block) * self.frame_tokens


def block_mask(layout: Layout) -> Bool[Tensor, "q k"]:
    """Return the dense mask, True where a query (row) may look at a key (column): the one statement of the rule."""
    num_clean, num_noisy, *_ = layout.sizes
    frames = torch.arange(layout.num_frames).repeat_interleave(layout.frame_tokens)
    video_block = torch.div(frames - 1, layout.latents_per_block, rounding_mode="floor")  # frame 0 is block -1
    blocks = torch.arange(layout.num_blocks)
    block = torch.cat(
        [
            video_block[:num_clean],
            video_block[-num_noisy:],
            blocks.repeat_interleave(layout.actions_per_block),
            blocks.repeat_interleave(layout.states_per_block),
        ]
    )
    kinds = torch.arange(4).repeat_interleave(torch.tensor(layout.sizes))
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
    itself alone, so its output is its value. A query of noisy and action tokens alone gives their rows alone.
    """
    sizes = layout.sizes
    clean_k, noisy_k, action_k, state_k = key.split(sizes, dim=2)
    clean_v, noisy_v, action_v, state_v = value.split(sizes, dim=2)
    is_whole = query.shape[2] == key.shape[2]
    clean_q, noisy_q, action_q, _ = query.split(sizes if is_whole else (0, *sizes[1:3], 0), dim=2)
    first, size = layout.frame_tokens, layout.block_tokens
    own = first if layout.has_first_noisy else 0  # noisy tokens before block 0
    clean, noisy, actions = [], [], []
    if is_whole:
        clean.append(attend(clean_q[:, :, :first], clean_k[:, :, :first], clean_v[:, :, :first]))
    if own:
        noisy.append(attend(noisy_q[:, :, :own], noisy_k[:, :, :own], noisy_v[:, :, :own]))
    for block in range(layout.num_blocks):
        start = layout.prefix_tokens(block)
        seen = slice(start, start + size)
        if is_whole and (layout.has_last_clean or block < layout.num_blocks - 1):
            known = slice(0, start + size)
            clean.append(attend(clean_q[:, :, seen], clean_k[:, :, known], clean_v[:, :, known]))
        video = slice(own + block * size, own + (block + 1) * size)
        action = slice(block * layout.actions_per_block, (block + 1) * layout.actions_per_block)
        state = slice(block * layout.states_per_block, (block + 1) * layout.states_per_block)
        keys, values = (
            torch.cat([c[:, :, :start], n[:, :, video], a[:, :, action], s[:, :, state]], dim=2)
            for c, n, a, s in ((clean_k, noisy_k, action_k, state_k), (clean_v, noisy_v, action_v, state_v))
        )
        both = attend(torch.cat([noisy_q[:, :, video], action_q[:, :, action]], dim=2), keys, values)
        noisy.append(both[:, :, :size])
        actions.append(both[:, :, size:])
    return torch.cat([*clean, *noisy, *actions, *([state_v] if is_whole else [])], dim=2)


@lru_cache(maxsize=8)
def flex_attention_of(layout: Layout, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return ``block_mask`` as one FlexAttention call, for compiled networks on CUDA; axes (b, heads, l, head_dim)."""
    dense = block_mask(layout).to(device)

    num_tokens = len(dense)
    blocks = create_block_mask(
        lambda batch, head, query, key: dense[query, key], None, None, num_tokens, num_tokens, device=device
    )

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = flex_attention(query, key, value, block_mask=blocks)
        assert isinstance(found, Tensor)
        return found

    return attention


EXPLICIT_UP_TO = 2048  # keys; the scores of longer sequences take too much memory


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attend to every key; axes (b, heads, tokens, head_dim). ``bias`` (keys) or (b, keys) is added to the logits.

    Compiled for a CPU, plain products and a softmax that keep the scores train faster than the fused kernel, whose
    backward pass computes them again.
    """
    bias = None if bias is None else bias.to(query.dtype)
    is_explicit = torch.compiler.is_compiling() and torch.is_grad_enabled() and key.shape[2] <= EXPLICIT_UP_TO
    if is_explicit and query.device.type == "cpu":
        scores = (query * query.shape[-1] ** -0.5) @ key.mT
        return (scores if bias is None else scores + bias[..., None, None, :]).softmax(dim=-1) @ value
    mask = None if bias is None else bias.expand(query.shape[2], -1) if bias.ndim == 1 else bias[:, None, None]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)
