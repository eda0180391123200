"""Into tokens and out of them: patches, text, image, noise levels, states and actions.

Module and parameter names are those of the published checkpoints (spec 8).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    """Layer norm with weights in float32 even where they are gathered in bfloat16 (``speed/shard.py``)."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.weight is not None and self.bias is not None
        return F.layer_norm(input, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


def time_sinusoid(noise_level: Tensor, num_dims: int) -> Tensor:
    """Embed 1000 * noise_level as [cos | sin] in float64 (spec 1.2); appends an axis of ``num_dims``."""
    angles = _angles(noise_level, num_dims)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def action_sinusoid(noise_level: Tensor, num_dims: int) -> Tensor:
    """Embed 1000 * noise_level as [sin | cos], the other way round than the time embedding (spec 1.5)."""
    angles = _angles(noise_level, num_dims)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


def _angles(noise_level: Tensor, num_dims: int) -> Tensor:
    half = num_dims // 2
    rates = 10000.0 ** -(torch.arange(half, dtype=torch.float64, device=noise_level.device) / half)
    return 1000 * noise_level.double()[..., None] * rates


def patches(latents: Float[Tensor, "b t c h w"], size: int = 2) -> Float[Tensor, "b t l p"]:
    """Cut each latent frame into size x size patches, row by row, channel slowest; a ragged edge is dropped."""
    height, width = (length // size * size for length in latents.shape[-2:])
    cut = latents[..., :height, :width].unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return cut.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(2, 3)  # b t (y x) (c py px)


def unpatch(tokens: Float[Tensor, "b t l p"], height: int, width: int, size: int = 2) -> Tensor:
    """Put tokens of ``height`` x ``width`` patches together: p = (py px c), channel fastest (spec 1.4)."""
    grid = tokens.unflatten(2, (height, width)).unflatten(4, (size, size, -1))  # b t y x py px c
    return grid.permute(0, 1, 6, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


class CategoryLinear(nn.Module):
    """A bank of linear maps stored input x output; the released checkpoints hold one and always use it."""

    def __init__(self, num_categories: int, num_in: int, num_out: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(num_categories, num_in, num_out))
        self.b = nn.Parameter(torch.empty(num_categories, num_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.W[0].T, self.b[0])


class CategoryMlp(nn.Module):
    """Two category linears with a ReLU: the state encoder and the action decoder."""

    def __init__(self, num_categories: int, num_in: int, num_hidden: int, num_out: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(num_categories, num_in, num_hidden)
        self.layer2 = CategoryLinear(num_categories, num_hidden, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(F.relu(self.layer1(x)))


class ActionEncoder(nn.Module):
    """Noised actions and their noise level to tokens (the encoder of pi0)."""

    def __init__(self, num_categories: int, num_in: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.W1 = CategoryLinear(num_categories, num_in, dim)
        self.W2 = CategoryLinear(num_categories, 2 * dim, dim)
        self.W3 = CategoryLinear(num_categories, dim, dim)

    def forward(self, actions: Float[Tensor, "b a j"], noise_level: Float[Tensor, "b a"]) -> Tensor:
        hidden = self.W1(actions)
        level = action_sinusoid(noise_level, self.dim).type_as(hidden)
        return self.W3(F.silu(self.W2(torch.cat([hidden, level], dim=-1))))


class ImageEmbedding(nn.Module):
    """Image tokens to network width (note the eps of the norms and the exact GELU)."""

    def __init__(self, image_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            LayerNorm(image_dim),
            nn.Linear(image_dim, image_dim),
            nn.GELU(),
            nn.Linear(image_dim, dim),
            LayerNorm(dim),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.proj(image)


class VideoHead(nn.Module):
    """Final norm, modulation by the time embedding itself, and the map to latent patches."""

    def __init__(self, dim: int, patch_values: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.head = nn.Linear(dim, patch_values)
        self.modulation = nn.Parameter(torch.empty(1, 2, dim))

    def forward(self, tokens: Float[Tensor, "b t l d"], time: Float[Tensor, "b t d"]) -> Tensor:
        shift, scale = (self.modulation[:, None] + time[:, :, None]).unbind(2)
        hidden = F.layer_norm(tokens, tokens.shape[-1:], eps=self.eps)
        return self.head(hidden * (1 + scale[:, :, None]) + shift[:, :, None])


def preconditioned(found: Tensor, noised: Tensor, level: Tensor, spread: float) -> Tensor:
    """Add to what a network found the best guess of the velocity that needs no network.

    For latents of mean 0 and this spread, that guess is a multiple of the noised latents, and what it misses has a
    known size (the preconditioning of EDM, arXiv 2206.00364 section 5, in terms of flow velocities). A narrow
    network then need not carry the noise of a whole patch through its width, 4 x channels numbers a token.
    """
    height, width = found.shape[-2:]
    level = level[..., None, None, None].to(found.dtype)
    clean = (1 - level) * spread
    power = level.square() + clean.square()
    skip = (level - clean * spread) / power
    return skip * noised[..., :height, :width] + spread * power.rsqrt() * found
