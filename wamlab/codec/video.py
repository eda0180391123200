"""The embedded video codec: a truncated cosine transform of space-time patches, without weights.

It has the time structure of the Wan video VAE: the first latent is one frame, every later one a group of four, and
no latent looks ahead. Which coefficients are kept, and their mean and spread, are constants measured on robot video
(``dct_constants.json``; ``experiments/2026-12-01_codec_constants`` says how).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor

from wamlab.errors import InputError

GROUP = 4  # frames of every latent after the first
# Rows of an orthonormal opponent-colour transform: brightness, red against blue, green against both.
COLORS = [[3**-0.5] * 3, [2**-0.5, 0.0, -(2**-0.5)], [-(6**-0.5), 2 * 6**-0.5, -(6**-0.5)]]


@dataclass(frozen=True)
class DctConfig:
    """Size of the codec's patches and number of coefficients it keeps of each."""

    spatial_stride: int = 8  # pixels along each side of a patch: 8 or 16
    channels: int = 48  # kept coefficients, at most 128

    def __post_init__(self) -> None:
        limits = {int(stride): len(table["kept"]) for stride, table in read_constants().items()}
        if self.channels > limits.get(self.spatial_stride, 0) or self.channels < 1:
            known = " or ".join(f"{stride} with up to {limit} channels" for stride, limit in limits.items())
            raise InputError(
                f"video.spatial_stride {self.spatial_stride} with {self.channels} channels is not a codec: use {known}"
            )


@lru_cache(maxsize=1)
def read_constants() -> dict[str, dict]:
    """Return the measured constants by spatial stride."""
    return json.loads((files("wamlab.codec") / "dct_constants.json").read_text())


def cosines(length: int) -> Float[Tensor, "l l"]:
    """Return the orthonormal DCT-II basis, one row a frequency, in float64."""
    points = (torch.arange(length, dtype=torch.float64) + 0.5) / length
    basis = torch.cos(math.pi * torch.arange(length, dtype=torch.float64)[:, None] * points) * math.sqrt(2 / length)
    basis[0] /= math.sqrt(2)
    return basis


def basis_of(kept: list[list[int]], num_frames: int, stride: int) -> Float[Tensor, "p c"]:
    """Return the patch patterns of coefficients [time, color, vertical, horizontal] as columns, in float64."""
    time, space, color = cosines(num_frames), cosines(stride), torch.tensor(COLORS, dtype=torch.float64)
    columns = [torch.einsum("t,y,x,c->tyxc", time[t], space[v], space[h], color[c]).flatten() for t, c, v, h in kept]
    return torch.stack(columns, dim=1)


class DctCodec:
    """Encodes uint8 frames to latents of unit variance on average, coarse patterns louder than fine ones, and back."""

    def __init__(self, config: DctConfig | None = None, device: torch.device | str = "cpu") -> None:
        self.config = config = config or DctConfig()
        table = read_constants()[str(config.spatial_stride)]
        later = table["kept"][: config.channels]
        is_static = [time == 0 for time, *_ in later]
        # A later channel that is constant in time shows in the first latent as the same spatial pattern, twice as
        # strong, so that a still scene has the same value in both; the others' places take finer patterns.
        first = later_to_first(later, table["finer"])
        gain = torch.tensor([2.0 if static else 1.0 for static in is_static], dtype=torch.float64)
        stats = torch.tensor(table["mean_std"][: config.channels], dtype=torch.float64)
        finer = iter(torch.tensor(table["finer_mean_std"], dtype=torch.float64))
        first_stats = torch.stack([stats[i] if static else next(finer) for i, static in enumerate(is_static)])
        typical = stats[:, 1].mean()
        self._first = _Projection(basis_of(first, 1, config.spatial_stride), gain, first_stats, typical, device)
        self._later = _Projection(
            basis_of(later, GROUP, config.spatial_stride), torch.ones_like(gain), stats, typical, device
        )

    @property
    def fingerprint(self) -> str:
        """Identify what this codec computes."""
        content = json.dumps([vars(self.config), read_constants()[str(self.config.spatial_stride)]], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return (t, c, h, w) of the latents of a clip; refuse sizes that do not divide into patches."""
        stride = self.config.spatial_stride
        if num_frames < 1 or (num_frames - 1) % GROUP:
            raise InputError(f"a clip of {num_frames} frames cannot be encoded: give 1 + a multiple of {GROUP}")
        if height % stride or width % stride:
            raise InputError(f"frames of {height} x {width} px do not divide into patches of {stride} px: resize them")
        return 1 + (num_frames - 1) // GROUP, self.config.channels, height // stride, width // stride

    def encode(self, frames: UInt8[Tensor, "b t h w 3"]) -> Float[Tensor, "b n c y x"]:
        """Encode clips, all at once."""
        return self.encode_video(to_video(frames))

    def encode_video(self, video: Float[Tensor, "b t h w 3"]) -> Float[Tensor, "b n c y x"]:
        """Encode clips given as float video in -1..1."""
        self.latent_shape(*video.shape[1:4])
        latents = [self._first.forward(self._patches(video[:, :1], 1))]
        if video.shape[1] > 1:
            latents.append(self._later.forward(self._patches(video[:, 1:], GROUP)))
        return torch.cat(latents, dim=1).movedim(-1, 2)

    def decode(self, latents: Float[Tensor, "b n c y x"]) -> UInt8[Tensor, "b t h w 3"]:
        """Decode latents to frames."""
        return to_frames(self.decode_video(latents))

    def decode_video(self, latents: Float[Tensor, "b n c y x"]) -> Float[Tensor, "b t h w 3"]:
        """Decode latents to float video, about -1..1."""
        values = latents.float().movedim(2, -1)
        frames = [self._frames(self._first.backward(values[:, :1]), 1)]
        if values.shape[1] > 1:
            frames.append(self._frames(self._later.backward(values[:, 1:]), GROUP))
        return torch.cat(frames, dim=1)

    def _patches(self, video: Tensor, group: int) -> Float[Tensor, "b n y x p"]:
        stride = self.config.spatial_stride
        return rearrange(video, "b (n t) (y v) (x h) c -> b n y x (t v h c)", t=group, v=stride, h=stride)

    def _frames(self, patches: Tensor, group: int) -> Float[Tensor, "b t h w 3"]:
        stride = self.config.spatial_stride
        return rearrange(patches, "b n y x (t v h c) -> b (n t) (y v) (x h) c", t=group, v=stride, h=stride)


def to_frames(video: Float[Tensor, "b t h w 3"]) -> UInt8[Tensor, "b t h w 3"]:
    """Turn float video in -1..1 into frames."""
    return ((video + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def to_video(frames: UInt8[Tensor, "*b h w 3"]) -> Float[Tensor, "*b h w 3"]:
    """Turn frames into float video in -1..1."""
    return frames.float() / 127.5 - 1


def later_to_first(later: list[list[int]], finer: list[list[int]]) -> list[list[int]]:
    """Return the first latent's coefficient of each channel: the same pattern, or the next finer one."""
    source = iter(finer)
    return [[0, *pattern] if time == 0 else next(source) for time, *pattern in later]


class _Projection:
    """Patches to scaled coefficients and back: one matrix each way.

    A coefficient is divided by the square root of its spread, and all of them by one number that makes the mean
    variance 1. Dividing by the whole spread would make the finest, least predictable detail as loud as the picture
    itself, in the loss and in the noise that hides it.
    """

    def __init__(self, basis: Tensor, gain: Tensor, stats: Tensor, typical: Tensor, device: torch.device | str) -> None:
        mean, std = stats.unbind(1)
        scale = (std * typical).sqrt()
        self.analysis = (basis * gain / scale).float().to(device)
        self.synthesis = (basis * scale / gain).T.contiguous().float().to(device)
        self.shift = (mean / scale).float().to(device)

    def forward(self, patches: Tensor) -> Tensor:
        return patches @ self.analysis - self.shift

    def backward(self, values: Tensor) -> Tensor:
        return (values + self.shift) @ self.synthesis
