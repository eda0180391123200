"""One block of the diffusion transformer: self-attention, cross-attention, feed-forward (spec 1.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wamlab.model.attention import Layout, attend, teacher_forced_attention
from wamlab.model.positions import rotate
from wamlab.model.tokens import LayerNorm

EVERY = slice(None)
Runs = tuple[tuple[int, int], ...]  # consecutive groups of (slots, tokens of each slot); a slot shares its modulation


@dataclass(frozen=True)
class Context:
    """What every token reads in cross-attention, at network width: text (b, n, d), image (b, m, d) if there is one.

    Text is padded with equal tokens that are all attended. They can share one token whose logit is raised by the
    logarithm of their number; ``text_bias`` (n) is what is added to the logits then, None where no pad is folded.
    """

    text: Tensor
    image: Tensor | None = None
    text_bias: Tensor | None = None


@dataclass(frozen=True)
class CrossKeys:
    """Keys and values of constant context in one block, each (b, heads, tokens, head_dim)."""

    text_key: Tensor
    text_value: Tensor
    text_bias: Tensor | None = None  # (tokens), or (b, tokens) of sessions whose texts differ in length
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
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).type_as(x)


class SelfAttention(nn.Module):
    """Projections and norms of self-attention; who sees whom is decided outside."""

    def __init__(self, dim: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RmsNorm(dim, eps), RmsNorm(dim, eps)

    def project(self, tokens: Tensor, rotation: Tensor, live: slice = EVERY) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries of the ``live`` tokens, rotated keys and values, each (b, heads, l, head_dim)."""
        query, key, value = (
            x.unflatten(-1, (self.num_heads, -1))
            for x in (self.norm_q(self.q(tokens[:, live])), self.norm_k(self.k(tokens)), self.v(tokens))
        )
        return (
            rotate(query, rotation[..., live, :, :]).transpose(1, 2),
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

    def keys(self, context: Context) -> CrossKeys:
        """Project the context once; it stays the same over all steps of a sampling call."""
        found = CrossKeys(
            self._heads(self.norm_k(self.k(context.text))), self._heads(self.v(context.text)), context.text_bias
        )
        if context.image is None or not self.has_image:
            return found
        return replace(
            found,
            image_key=self._heads(self.norm_k_img(self.k_img(context.image))),
            image_value=self._heads(self.v_img(context.image)),
        )

    def forward(self, tokens: Tensor, keys: CrossKeys) -> Tensor:
        query = self._heads(self.norm_q(self.q(tokens)))
        out = attend(query, keys.text_key, keys.text_value, keys.text_bias)
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
        self.norm3 = LayerNorm(dim, eps=eps)
        self.cross_attn = CrossAttention(dim, num_heads, eps, has_image=has_image)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))

    def forward(
        self,
        tokens: Tensor,
        slots: Tensor,
        rotation: Tensor,
        context: Context,
        layout: Layout,
        runs: Runs,
        *,
        is_last: bool = False,
    ) -> Tensor:
        """Run the teacher-forced form: tokens (b, l, d), slots (b, slots, 6, d), rotation (l, head_dim / 2, 2).

        After the last block nobody reads the clean and the state tokens: it returns the noisy and action ones alone.
        """
        parts = self._parts(slots)
        hidden = modulated(self._norm(tokens), parts[0], parts[1], runs)
        if is_last:
            num_clean, *read, _ = layout.sizes
            live = slice(num_clean, num_clean + sum(read))
            tokens, parts, runs = tokens[:, live], tuple(part[:, 1 : -runs[-1][0]] for part in parts), runs[1:-1]
        else:
            live = EVERY
        query, key, value = self.self_attn.project(hidden, rotation, live)
        seen = teacher_forced_attention(query, key, value, layout)
        return self._finish(tokens, seen, self.cross_attn.keys(context), parts, runs)

    def step(
        self,
        tokens: Tensor,
        slots: Tensor,
        rotation: Tensor,
        cross: CrossKeys,
        past: tuple[Tensor, Tensor] | None,
        num_states: int,
        runs: Runs,
        *,
        is_last: bool = False,
        num_streams: int = 1,
        past_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the cached form: the last ``num_states`` tokens see themselves, all others the past and every token.

        ``past_bias`` (b, past tokens) hides what fills up the pasts of shorter sessions.

        Returns the tokens and their own rotated keys and values. ``is_last`` says that nobody reads the tokens: then
        only keys and values are computed. Tokens that read ``num_streams`` contexts, one after another in ``cross``,
        are the same until they read them: they come once and return once for each.
        """
        parts = self._parts(slots)
        live = slice(0, 0) if is_last else EVERY
        hidden = modulated(self._norm(tokens), parts[0], parts[1], runs)
        query, key, value = self.self_attn.project(hidden, rotation, live)
        if is_last:
            return tokens, (key, value)
        keys, values = (
            (key, value) if past is None else (torch.cat(pair, dim=2) for pair in zip(past, (key, value), strict=True))
        )
        num_seeing = tokens.shape[1] - num_states
        bias = None if past_bias is None else F.pad(past_bias, (0, key.shape[2]))
        seen = attend(query[:, :, :num_seeing], keys, values, bias)
        seen = torch.cat([seen, value[:, :, num_seeing:]], dim=2) if num_states else seen
        return self._finish(tokens, seen, cross, parts, runs, num_streams), (key, value)

    def cross_keys(self, context: Context) -> CrossKeys:
        """Project the context for ``step``."""
        return self.cross_attn.keys(context)

    def _parts(self, slots: Tensor) -> tuple[Tensor, ...]:
        return (self.modulation[:, None] + slots).unbind(2)

    def _finish(
        self,
        tokens: Tensor,
        seen: Tensor,
        cross: CrossKeys,
        parts: tuple[Tensor, ...],
        runs: Runs,
        num_streams: int = 1,
    ) -> Tensor:
        tokens = tokens + gated(self.self_attn.o(seen.transpose(1, 2).flatten(2)), parts[2], runs)
        if num_streams > 1:
            tokens = tokens.repeat(num_streams, 1, 1)
            parts = tuple(part.repeat(num_streams, 1, 1) for part in parts)
        tokens = tokens + self.cross_attn(self.norm3(tokens), cross)
        hidden = modulated(self._norm(tokens), parts[3], parts[4], runs)
        return tokens + gated(self.ffn(hidden), parts[5], runs)

    def _norm(self, tokens: Tensor) -> Tensor:
        return F.layer_norm(tokens, tokens.shape[-1:], eps=self.eps)
