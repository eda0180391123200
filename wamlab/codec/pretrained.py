"""Which frozen encoders a run has: the embedded ones, or published ones by the path of their weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wamlab.codec.clip_image import CLIP_VIT_H, read_clip
from wamlab.codec.clips import ImageEncoder, TextEncoder, VideoCodec
from wamlab.codec.text import HashTextConfig, HashTextEncoder
from wamlab.codec.umt5 import UMT5_XXL, read_umt5
from wamlab.codec.video import DctCodec, DctConfig
from wamlab.codec.wan_vae import VERSIONS, read_wan_vae
from wamlab.errors import InputError, check_range

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}  # auto: bfloat16 on CUDA, else float32


@dataclass(frozen=True)
class WanVaeConfig:
    """A Wan video autoencoder: 2.1 (16 channels, 8 px) or 2.2 (48 channels, 16 px)."""

    version: str = "2.2"
    path: Path = Path("weights/Wan2.2_VAE.pth")
    prefix: str = ""  # of its keys, inside a bundle
    sizes: Path | None = None  # JSON file of sizes other than the published ones
    memory_gib: int | float = 8.0  # for activations; batches are split to fit
    dtype: str = "auto"  # "float32" or "bfloat16"; auto takes bfloat16 on CUDA

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            raise InputError(f'video.version is "{self.version}": give one of {", ".join(VERSIONS)}')
        check_range("video", self, 1e-3, 1e6, "memory_gib")
        _check_dtype("video", self.dtype)

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the library's autoencoder is made with."""
        return VERSIONS[self.version] | _read_sizes(self.sizes)

    @property
    def channels(self) -> int:
        return self.settings["z_dim"]

    @property
    def spatial_stride(self) -> int:
        return self.settings.get("patch_size", 1) * 2 ** (len(self.settings["dim_mult"]) - 1)


@dataclass(frozen=True)
class Umt5Config:
    """The umT5-xxl text encoder and its tokenizer."""

    path: Path = Path("weights/models_t5_umt5-xxl-enc-bf16.pth")
    tokenizer: Path = Path("weights/google/umt5-xxl")  # folder
    prefix: str = ""
    sizes: Path | None = None
    max_tokens: int = 512
    dtype: str = "auto"  # as of the autoencoder

    def __post_init__(self) -> None:
        check_range("text", self, 1, 65536, "max_tokens")
        _check_dtype("text", self.dtype)

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the library's encoder is made with."""
        return UMT5_XXL | _read_sizes(self.sizes)

    @property
    def dim(self) -> int:
        return self.settings["d_model"]


@dataclass(frozen=True)
class ClipConfig:
    """The image tower of CLIP ViT-H/14, for first frames."""

    path: Path = Path("weights/models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth")
    prefix: str = ""
    sizes: Path | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the library's tower is made with."""
        return CLIP_VIT_H | _read_sizes(self.sizes)

    @property
    def dim(self) -> int:
        return self.settings["hidden_size"]


def make_video_codec(
    config: DctConfig | WanVaeConfig, device: torch.device, *, is_compiled: bool = False
) -> VideoCodec:
    """Build a video codec, reading its weights if it has any."""
    if isinstance(config, DctConfig):
        return DctCodec(config, device)
    return read_wan_vae(  # pyright: ignore[reportReturnType]  # takes cached_property for no property
        config.path,
        config.version,
        prefix=config.prefix,
        config=config.settings,
        device=device,
        dtype=DTYPES[config.dtype],
        memory_gib=config.memory_gib,
        compile_backend="inductor" if is_compiled else None,
    )


def make_text_encoder(
    config: HashTextConfig | Umt5Config, device: torch.device, *, has_cache: bool = True
) -> TextEncoder:
    """Build a text encoder, reading its weights if it has any."""
    if isinstance(config, HashTextConfig):
        return HashTextEncoder(config)
    return read_umt5(  # pyright: ignore[reportReturnType]
        config.path,
        config.tokenizer,
        prefix=config.prefix,
        config=config.settings,
        device=device,
        dtype=DTYPES[config.dtype],
        max_tokens=config.max_tokens,
        has_cache=has_cache,
    )


def make_image_encoder(config: ClipConfig | None, device: torch.device) -> ImageEncoder | None:
    """Build the encoder of first frames, if a run has one."""
    if config is None:
        return None
    return read_clip(  # pyright: ignore[reportReturnType]
        config.path, prefix=config.prefix, config=config.settings, device=device
    )


def _check_dtype(where: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise InputError(f'{where}.dtype is "{dtype}": give one of {", ".join(DTYPES)}')


def _read_sizes(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        sizes = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}): give a file of an encoder's sizes") from error
    if not isinstance(sizes, dict):
        raise InputError(f"{path} holds no mapping of sizes: give a file like a library's config.json")
    return sizes
