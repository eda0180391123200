"""The video autoencoders of Wan 2.1 and 2.2 (arXiv 2503.20314), frozen, whole batches at a time.

The encoder is causal: the first latent is one frame, every later one a group of four, and the library carries the
last two frames of every convolution from group to group. A batch of clips goes through together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from wamlab.codec.native_weights import Source, fingerprint_of, frozen, import_library, load_native, read_tensors
from wamlab.codec.video import GROUP, to_video
from wamlab.errors import InputError

DREAMZERO_PREFIX = "action_head.vae.model."  # of the native keys inside a DreamZero checkpoint
# Feature maps as wide as the first stage and as large as its picture that are alive at the peak, caches included.
# Counted in diffusers 0.42, December 2026: 40 (2.1) and 52 (2.2) when encoding, 54 and 86 when decoding.
MAPS_ENCODING, MAPS_DECODING = 55, 90

WAN_2_1 = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "latents_mean": [
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    ],
    "latents_std": [
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
    ],
}  # fmt: skip
WAN_2_2 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
        -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
        -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
        -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
        0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
        0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
        0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
        0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
        0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}  # fmt: skip
VERSIONS = {"2.1": WAN_2_1, "2.2": WAN_2_2}
NAMES = {  # library: native, in the encoder or decoder outside its stages
    "conv_in": "conv1",
    "norm_out": "head.0",
    "conv_out": "head.2",
    "mid_block.resnets.0": "middle.0",
    "mid_block.attentions.0": "middle.1",
    "mid_block.resnets.1": "middle.2",
}
RESIDUAL_NAMES = {  # library: native, in a residual block
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}


class WanVideoCodec:
    """Encodes frames to normalised latents, the mean of the autoencoder's posterior, and decodes latents.

    Batches are split so that the activations of one part fit ``memory_gib``. The estimate for a clip is the number
    of first-stage feature maps alive at the peak; the length of a clip adds next to nothing, as groups of frames
    are encoded one after the other.
    """

    def __init__(
        self,
        vae: Any,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        memory_gib: int | float = 8,
        compile_backend: str | None = None,
    ) -> None:
        """Take over a ``diffusers.AutoencoderKLWan``.

        ``dtype`` None means bfloat16 on CUDA, else float32; ``compile_backend``, such as "inductor", compiles encoder
        and decoder, each to three to five graphs a shape: the first groups of frames find shorter caches.
        """
        self.device = torch.device(device)
        self.vae: Any = frozen(vae, device, dtype)
        self.dtype = next(vae.parameters()).dtype
        self.memory_gib = memory_gib
        config = vae.config
        self.channels, self.patch = config.z_dim, config.patch_size or 1
        self.stride = self.patch * 2 ** (len(config.dim_mult) - 1)
        self._mean = torch.tensor(config.latents_mean, device=self.device)[:, None, None, None]
        self._std = torch.tensor(config.latents_std, device=self.device)[:, None, None, None]
        self._widths = config.base_dim, config.decoder_base_dim or config.base_dim
        if compile_backend is not None:
            vae.encoder.compile(backend=compile_backend, dynamic=False)
            vae.decoder.compile(backend=compile_backend, dynamic=False)

    @cached_property
    def fingerprint(self) -> str:
        """Identify what this codec computes."""
        config = self.vae.config
        return fingerprint_of(self.vae, "wan-vae-1", self.dtype, config.latents_mean, config.latents_std)

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return (t, c, h, w) of the latents of a clip; refuse sizes that the autoencoder does not divide."""
        if num_frames < 1 or (num_frames - 1) % GROUP:
            raise InputError(f"a clip of {num_frames} frames cannot be encoded: give 1 + a multiple of {GROUP}")
        if height % self.stride or width % self.stride:
            raise InputError(f"frames of {height} x {width} px do not divide by {self.stride} px: resize them")
        return 1 + (num_frames - 1) // GROUP, self.channels, height // self.stride, width // self.stride

    def num_clips_at_once(self, height: int, width: int, *, is_decoding: bool = False) -> int:
        """Return how many clips of a frame size fit the memory, at least one."""
        num_maps = MAPS_DECODING if is_decoding else MAPS_ENCODING
        num_values = num_maps * self._widths[is_decoding] * height * width / self.patch**2
        return max(1, int(self.memory_gib * 2**30 / (num_values * self.dtype.itemsize)))

    @torch.no_grad()
    def encode(self, frames: UInt8[Tensor, "b t h w 3"]) -> Float[Tensor, "b n c y x"]:
        """Encode clips of one size to float32 latents."""
        return self._encoded(frames, to_video)

    @torch.no_grad()
    def encode_video(self, video: Float[Tensor, "b t h w 3"]) -> Float[Tensor, "b n c y x"]:
        """Encode clips given as float video in -1..1."""
        return self._encoded(video, Tensor.float)

    @torch.no_grad()
    def decode_video(self, latents: Float[Tensor, "b n c y x"]) -> Float[Tensor, "b t h w 3"]:
        """Decode latents to float32 video in -1..1; the library clamps it."""
        size = self.num_clips_at_once(*(self.stride * side for side in latents.shape[-2:]), is_decoding=True)
        clips = []
        for part in latents.split(size):
            values = part.to(self.device).float().movedim(2, 1) * self._std + self._mean
            clips.append(self.vae.decode(values.to(self.dtype)).sample.float().movedim(1, -1))
        return torch.cat(clips)

    def _encoded(self, clips: Tensor, to_float: Callable[[Tensor], Tensor]) -> Tensor:
        self.latent_shape(*clips.shape[1:4])
        latents = []
        for part in clips.split(self.num_clips_at_once(*clips.shape[2:4])):  # frames are widened part by part
            values = to_float(part.to(self.device)).movedim(-1, 1).to(self.dtype)
            means = self.vae.encode(values).latent_dist.mode().float()
            latents.append(((means - self._mean) / self._std).movedim(1, 2))
        return torch.cat(latents)


def wan_vae_sources(vae: Any) -> dict[str, Source]:
    """Return where each tensor of a ``diffusers.AutoencoderKLWan``, 2.1 or 2.2, lies in a native checkpoint."""
    config = vae.config
    return {
        key: Source(_native_key(key, config.num_res_blocks, is_nested=config.is_residual), tuple(tensor.shape))
        for key, tensor in vae.state_dict().items()
    }


def _native_key(key: str, num_res_blocks: int, *, is_nested: bool) -> str:
    """Return the native key; stages lie in one flat list in 2.1 and are lists of their own in 2.2 (``is_nested``)."""
    name, kind = key.rsplit(".", 1)
    if name in ("quant_conv", "post_quant_conv"):
        return f"{'conv1' if name == 'quant_conv' else 'conv2'}.{kind}"
    half, name = name.split(".", 1)
    for library, native in NAMES.items():
        if name == library or name.startswith(f"{library}."):
            return f"{half}.{native}{_inner(name.removeprefix(library))}.{kind}"
    stages = "downsamples" if half == "encoder" else "upsamples"
    if not is_nested and (found := re.fullmatch(r"down_blocks\.(\d+)(\..+)", name)):  # flat in the library too
        return f"encoder.downsamples.{found[1]}{_inner(found[2])}.{kind}"
    found = re.fullmatch(r"(?:down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)samplers?(?:\.0)?)(\..+)", name)
    if not found:
        raise InputError(f"{key} is no tensor of a Wan autoencoder: use the versions of the extra wan")
    num_blocks = num_res_blocks + (half == "decoder")  # residual blocks of a stage; its resampler comes after them
    stage, place = int(found[1]), num_blocks if found[2] is None else int(found[2])
    index = f"{stage}.{stages}.{place}" if is_nested else f"{stage * (num_blocks + 1) + place}"
    return f"{half}.{stages}.{index}{_inner(found[3])}.{kind}"


def _inner(name: str) -> str:
    """Return the native name of a part of a block, each with its dot in front, or none of both."""
    return f".{RESIDUAL_NAMES.get(name[1:], name[1:])}" if name else ""


def load_native_wan_vae(vae: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give a ``diffusers.AutoencoderKLWan`` native tensors; raise InputError naming those that do not fit."""
    load_native(vae, tensors, wan_vae_sources(vae))


def empty_wan_vae(version: str = "2.2", config: Mapping[str, Any] | None = None) -> Any:
    """Return a ``diffusers.AutoencoderKLWan`` without memory, to be loaded; of published size unless told otherwise."""
    if version not in VERSIONS:
        raise InputError(f'there is no Wan autoencoder "{version}": give one of {", ".join(VERSIONS)}')
    diffusers = import_library("diffusers")
    with torch.device("meta"):
        return diffusers.AutoencoderKLWan(**(config or VERSIONS[version]))


def read_wan_vae(
    path: Path | str,
    version: str = "2.2",
    *,
    prefix: str = "",
    config: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    memory_gib: int | float = 8,
    compile_backend: str | None = None,
) -> WanVideoCodec:
    """Read the native weights of an autoencoder."""
    vae = empty_wan_vae(version, config)
    load_native_wan_vae(vae, read_tensors(path, prefix))
    return WanVideoCodec(vae, device=device, dtype=dtype, memory_gib=memory_gib, compile_backend=compile_backend)
