"""One block of the diffusion transformer: self-attention, cross-attention, feed-forward (spec 1.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wamlab.model.attention import Layout, attend, rotate, teacher_forced_attention

Runs = tuple[tuple[int, int], ...]  # consecutive groups of (slots, tokens of each slot); a slot shares its modulation


@dataclass(frozen=True)
class CrossKeys:
    """Keys and values of constant context in one block, each (b, heads, tokens, head_dim)."""

    text_key: Tensor
    text_value: Tensor
    image_key: Tensor | None = None
    image_value: Tensor | None = None


def spread(values: Tensor, tokens: Tensor, runs: Runs) -> Sequence[tuple[Tensor, Tensor]]:
    """Pair each run of tokens, as (b, slots, tokens, d), with its slots' values, as (b, slots, 1, d)."""
    parts = tokens.split([slots * size for slots, size in runs], dim=1)
    shares = values.split([slots for slots, _ in runs], dim=1)
    return [(part.unflatten(1, run), share[:, :, None]) for part, share, run in zip(parts, shares, runs, strict=True)]


def modulated(tokens: Tensor, shift: Tensor, scale: Tensor, runs: Runs) -> Tensor:
    """Scale and shift every token by its slot's values: once per frame, never once per token."""
    shifts = shift.split([slots for slots, _ in runs], dim=1)
    parts = [
        torch.addcmul(s[:, :, None], part, 1 + share).flatten(1, 2)
        for (part, share), s in zip(spread(scale, tokens, runs), shifts, strict=True)
    ]
    return torch.cat(parts, dim=1)


def gated(tokens: Tensor, gate: Tensor, runs: Runs) -> Tensor:
    """Multiply every token by its slot's gate."""
    return torch.cat([(part * share).flatten(1, 2) for part, share in spread(gate, tokens, runs)], dim=1)


class RmsNorm(nn.Module):
    """Root-mean-square norm over the whole width, before it is split into heads, in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).type_as(x)


class SelfAttention(nn.Module):
    """Projections and norms of self-attention; who sees whom is decided outside."""

    def __init__(self, dim: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RmsNorm(dim, eps), RmsNorm(dim, eps)

    def project(self, tokens: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, each (b, heads, tokens, head_dim)."""
        query, key, value = (
            x.unflatten(-1, (self.num_heads, -1))
            for x in (self.norm_q(self.q(tokens)), self.norm_k(self.k(tokens)), self.v(tokens))
        )
        return (
            rotate(query, rotation).transpose(1, 2),
            rotate(key, rotation).transpose(1, 2),
            value.transpose(1, 2),
        )


class CrossAttention(nn.Module):
    """Attention to text, plus attention to image tokens where the variant has them; no rotation, no mask."""

    def __init__(self, dim: int, num_heads: int, eps: float, *, has_image: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.has_image = has_image
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RmsNorm(dim, eps), RmsNorm(dim, eps)
        if has_image:
            self.k_img, self.v_img = nn.Linear(dim, dim), nn.Linear(dim, dim)
            self.norm_k_img = RmsNorm(dim, eps)

    def keys(self, text: Tensor, image: Tensor | None) -> CrossKeys:
        """Project the context once; it stays the same over all steps of a sampling call."""
        found = CrossKeys(self._heads(self.norm_k(self.k(text))), self._heads(self.v(text)))
        if image is None or not self.has_image:
            return found
        return CrossKeys(
            found.text_key,
            found.text_value,
            self._heads(self.norm_k_img(self.k_img(image))),
            self._heads(self.v_img(image)),
        )

    def forward(self, tokens: Tensor, keys: CrossKeys) -> Tensor:
        query = self._heads(self.norm_q(self.q(tokens)))
        out = attend(query, keys.text_key, keys.text_value)
        if keys.image_key is not None and keys.image_value is not None:
            out = out + attend(query, keys.image_key, keys.image_value)
        return self.o(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """One transformer block over all tokens, whatever they stand for."""

    def __init__(self, dim: int, num_heads: int, ffn_dim: int, eps: float, *, has_image: bool) -> None:
        super().__init__()
        self.eps = eps
        self.modulation = nn.Parameter(torch.empty(1, 6, dim))
        self.self_attn = SelfAttention(dim, num_heads, eps)
        self.norm3 = nn.LayerNorm(dim, eps=eps)
        self.cross_attn = CrossAttention(dim, num_heads, eps, has_image=has_image)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))

    def forward(
        self,
        tokens: Tensor,
        slots: Tensor,
        rotation: Tensor,
        text: Tensor,
        image: Tensor | None,
        layout: Layout,
        runs: Runs,
    ) -> Tensor:
        """Run the teacher-forced form: tokens (b, l, d), slots (b, slots, 6, d), rotation (l, head_dim / 2)."""
        parts = self._parts(slots)
        query, key, value = self._project(tokens, parts, rotation, runs)
        seen = teacher_forced_attention(query, key, value, layout)
        return self._finish(tokens, seen, self.cross_attn.keys(text, image), parts, runs)

    def step(
        self,
        tokens: Tensor,
        slots: Tensor,
        rotation: Tensor,
        cross: CrossKeys,
        past: tuple[Tensor, Tensor] | None,
        num_states: int,
        runs: Runs,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the cached form: the last ``num_states`` tokens see themselves, all others the past and every token.

        Returns the tokens and their own rotated keys and values.
        """
        parts = self._parts(slots)
        query, key, value = self._project(tokens, parts, rotation, runs)
        keys, values = (
            (key, value) if past is None else (torch.cat(pair, dim=2) for pair in zip(past, (key, value), strict=True))
        )
        num_seeing = tokens.shape[1] - num_states
        seen = attend(query[:, :, :num_seeing], keys, values)
        seen = torch.cat([seen, value[:, :, num_seeing:]], dim=2) if num_states else seen
        return self._finish(tokens, seen, cross, parts, runs), (key, value)

    def _parts(self, slots: Tensor) -> tuple[Tensor, ...]:
        return (self.modulation[:, None] + slots).unbind(2)

    def _project(
        self, tokens: Tensor, parts: tuple[Tensor, ...], rotation: Tensor, runs: Runs
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden = modulated(self._norm(tokens), parts[0], parts[1], runs)
        return self.self_attn.project(hidden, rotation)

    def _finish(self, tokens: Tensor, seen: Tensor, cross: CrossKeys, parts: tuple[Tensor, ...], runs: Runs) -> Tensor:
        tokens = tokens + gated(self.self_attn.o(seen.transpose(1, 2).flatten(2)), parts[2], runs)
        tokens = tokens + self.cross_attn(self.norm3(tokens), cross)
        hidden = modulated(self._norm(tokens), parts[3], parts[4], runs)
        return tokens + gated(self.ffn(hidden), parts[5], runs)

    def _norm(self, tokens: Tensor) -> Tensor:
        return F.layer_norm(tokens, tokens.shape[-1:], eps=self.eps)
