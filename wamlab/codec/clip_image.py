"""The first-frame encoder of Wan's image-to-video networks: the image tower of CLIP ViT-H/14, frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from wamlab.codec.native_weights import Source, fingerprint_of, frozen, import_library, load_native, read_tensors
from wamlab.codec.video import to_video
from wamlab.errors import InputError

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of red, green, blue in 0..1 (CLIP, arXiv 2103.00020)
STD = (0.26862954, 0.26130258, 0.27577711)
DREAMZERO_PREFIX = "action_head.image_encoder.model."  # of the native keys inside a DreamZero checkpoint
UNUSED = r"visual\.head$|log_scale$|textual\."  # native keys of the contrastive loss and of the text tower
CLIP_VIT_H = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
NAMES = {  # library: native, inside a block; the three projections of attention lie in one native tensor
    "layer_norm1": ("norm1", 0, 1),
    "self_attn.q_proj": ("attn.to_qkv", 0, 3),
    "self_attn.k_proj": ("attn.to_qkv", 1, 3),
    "self_attn.v_proj": ("attn.to_qkv", 2, 3),
    "self_attn.out_proj": ("attn.proj", 0, 1),
    "layer_norm2": ("norm2", 0, 1),
    "mlp.fc1": ("mlp.0", 0, 1),
    "mlp.fc2": ("mlp.2", 0, 1),
}
TOP_NAMES = {  # library: (native, axes of length 1 that the native tensor has in front)
    "embeddings.class_embedding": ("cls_embedding", 2),
    "embeddings.position_embedding.weight": ("pos_embedding", 1),
    "embeddings.patch_embedding.weight": ("patch_embedding.weight", 0),
    "pre_layrnorm.weight": ("pre_norm.weight", 0),
    "pre_layrnorm.bias": ("pre_norm.bias", 0),
    "post_layernorm.weight": ("post_norm.weight", 0),
    "post_layernorm.bias": ("post_norm.bias", 0),
}


class ClipImageEncoder:
    """Turns first frames into image tokens: all but the last block of CLIP, without its last normalisation."""

    def __init__(self, model: Any, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> None:
        """Take over a whole ``transformers.CLIPVisionModel``, whose last block is dropped."""
        self.device = torch.device(device)
        self.model: Any = frozen(model, device, dtype)
        self.dtype = next(model.parameters()).dtype
        encoder = tower(model).encoder
        encoder.layers = nn.ModuleList(list(encoder.layers)[: model.config.num_hidden_layers - 1])
        self.size = model.config.image_size
        self._mean = torch.tensor(MEAN, device=self.device)[:, None, None]
        self._std = torch.tensor(STD, device=self.device)[:, None, None]

    @cached_property
    def fingerprint(self) -> str:
        """Identify what this encoder computes."""
        return fingerprint_of(self.model, "clip-1", self.dtype)

    @torch.no_grad()
    def encode(self, frames: UInt8[Tensor, "b h w 3"]) -> Float[Tensor, "b n d"]:
        """Return float32 tokens, [b 257 1280] at full size: the class token, then the patches row by row."""
        pixels = self.pixels_of(frames.to(self.device)).to(self.dtype)
        return self.model(pixel_values=pixels).last_hidden_state.float()

    def pixels_of(self, frames: UInt8[Tensor, "b h w 3"]) -> Float[Tensor, "b 3 y x"]:
        """Resize frames to CLIP's square, whatever their aspect, and normalise them; bicubic overshoot is kept."""
        video = to_video(frames).movedim(-1, 1)
        video = nn.functional.interpolate(video, (self.size, self.size), mode="bicubic", align_corners=False)
        return ((video + 1) / 2 - self._mean) / self._std


def tower(model: Any) -> Any:
    """Return the module that has the blocks; transformers below 5 wraps it once more."""
    return getattr(model, "vision_model", model)


def clip_sources(model: Any) -> dict[str, Source]:
    """Return where each tensor of a ``transformers.CLIPVisionModel`` lies in a native checkpoint."""
    return {key: _source_of(key, tuple(tensor.shape)) for key, tensor in model.state_dict().items()}


def _source_of(key: str, shape: tuple[int, ...]) -> Source:
    name = key.removeprefix("vision_model.")
    if name in TOP_NAMES:
        native, num_axes = TOP_NAMES[name]
        return Source(f"visual.{native}", (1,) * num_axes + shape)
    if (found := re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)) and found[2] in NAMES:
        native, part, num_parts = NAMES[found[2]]
        shape = (num_parts * shape[0], *shape[1:])
        return Source(f"visual.transformer.{found[1]}.{native}.{found[3]}", shape, part, num_parts)
    raise InputError(f"{key} is no tensor of a CLIP image tower: use the versions of the extra wan")


def load_native_clip(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give a whole ``transformers.CLIPVisionModel`` native tensors; raise InputError naming those that do not fit."""
    load_native(model, tensors, clip_sources(model), unused=UNUSED)
    embeddings = tower(model).embeddings
    num_places = embeddings.position_embedding.num_embeddings
    embeddings.position_ids = torch.arange(num_places)[None]  # no checkpoint holds it, and a model to load has none


def empty_clip(config: Mapping[str, Any] | None = None) -> Any:
    """Return a ``transformers.CLIPVisionModel`` without memory, to be loaded; ViT-H/14 unless told otherwise."""
    transformers = import_library("transformers")
    with torch.device("meta"):
        return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**(config or CLIP_VIT_H)))


def read_clip(
    path: Path | str,
    *,
    prefix: str = "",
    config: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> ClipImageEncoder:
    """Read native weights, with or without the text tower beside them."""
    model = empty_clip(config)
    load_native_clip(model, read_tensors(path, prefix))
    return ClipImageEncoder(model, device=device, dtype=dtype)
