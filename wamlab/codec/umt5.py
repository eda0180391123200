"""The text encoder of Wan: umT5-xxl (arXiv 2304.09151), frozen, every distinct instruction encoded once."""

from __future__ import annotations

import html
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wamlab.codec.native_weights import Source, fingerprint_of, frozen, import_library, load_native, read_tensors
from wamlab.errors import InputError

MAX_CACHED = 4096  # instructions
MAX_TOKENS = 512  # of an instruction, its end mark included, in every published Wan network
DREAMZERO_PREFIX = "action_head.text_encoder."  # of the native keys inside a DreamZero checkpoint
UMT5_XXL = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "gated-gelu",
}
NAMES = {  # library: native, inside a block
    "layer.0.layer_norm": "norm1",
    "layer.0.SelfAttention.q": "attn.q",
    "layer.0.SelfAttention.k": "attn.k",
    "layer.0.SelfAttention.v": "attn.v",
    "layer.0.SelfAttention.o": "attn.o",
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.1.layer_norm": "norm2",
    "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1",
    "layer.1.DenseReluDense.wo": "ffn.fc2",
}
TOP_NAMES = {
    "shared": "token_embedding",
    "encoder.embed_tokens": "token_embedding",  # the library ties it to "shared"
    "encoder.final_layer_norm": "norm",
}


class Umt5TextEncoder:
    """Turns instructions into umT5 features.

    An instruction is encoded once and then read from a cache on the host, which keeps its true length only;
    ``num_encoded`` counts the work done. Tokens see no padding, so that a batch changes no feature.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Callable[..., Any],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_tokens: int = MAX_TOKENS,
        has_cache: bool = True,
    ) -> None:
        """Take over a ``transformers.UMT5EncoderModel``; ``dtype`` None means bfloat16 on CUDA, else float32.

        Without a cache every instruction is encoded each time, at its full padded length, as published training does.
        """
        import_library("ftfy")
        self.device = torch.device(device)
        self.model: Any = frozen(model, device, dtype)
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.num_encoded = 0
        self.has_cache = has_cache
        self._cache: dict[str, Tensor] = {}

    @cached_property
    def fingerprint(self) -> str:
        """Identify what this encoder computes."""
        return fingerprint_of(self.model, "umt5-1", next(self.model.parameters()).dtype, self.max_tokens)

    @torch.no_grad()
    def encode(self, instructions: Sequence[str]) -> Float[Tensor, "b n d"]:
        """Return float32 features, as many as the longest instruction has; places after an end mark are zero."""
        if not self.has_cache:
            self.num_encoded += len(instructions)
            return pad_sequence(self._encoded(instructions), batch_first=True).to(self.device).float()
        if new := [text for text in dict.fromkeys(instructions) if text not in self._cache]:
            self._cache |= dict(zip(new, self._encoded(new), strict=True))
            self.num_encoded += len(new)
        features = [self._cache[text] for text in instructions]
        while len(self._cache) > MAX_CACHED:
            self._cache.pop(next(iter(self._cache)))
        return pad_sequence(features, batch_first=True).to(self.device).float()

    def _encoded(self, instructions: Sequence[str]) -> list[Float[Tensor, "n d"]]:
        texts = [clean_text(text) for text in instructions]
        padding = True if self.has_cache else "max_length"
        tokens = self.tokenizer(
            texts, padding=padding, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        mask = tokens["attention_mask"]
        lengths = mask.sum(dim=1).tolist()
        if max(lengths) == self.max_tokens:
            full = instructions[lengths.index(self.max_tokens)]
            warnings.warn(f'"{full}" may lose words: only {self.max_tokens} tokens are used', stacklevel=4)
        inputs = {"input_ids": tokens["input_ids"].to(self.device), "attention_mask": mask.to(self.device)}
        features = self.model(**inputs).last_hidden_state.cpu()
        # a copy, or the cache would keep the whole padded batch alive
        return [row[:length].clone() for row, length in zip(features, lengths, strict=True)]


def clean_text(text: str) -> str:
    """Mend broken Unicode, undo HTML escapes and squeeze whitespace, as Wan does before its tokenizer."""
    text = import_library("ftfy").fix_text(text)
    text = html.unescape(html.unescape(text))
    return re.sub(r"\s+", " ", text).strip()


def umt5_sources(model: Any) -> dict[str, Source]:
    """Return where each tensor of a ``transformers.UMT5EncoderModel`` lies in a native checkpoint."""
    return {key: Source(_native_key(key), tuple(tensor.shape)) for key, tensor in model.state_dict().items()}


def _native_key(key: str) -> str:
    name = key.removesuffix(".weight")
    if name in TOP_NAMES:
        return f"{TOP_NAMES[name]}.weight"
    if (found := re.fullmatch(r"encoder\.block\.(\d+)\.(.+)", name)) and found[2] in NAMES:
        return f"blocks.{found[1]}.{NAMES[found[2]]}.weight"
    raise InputError(f"{key} is no tensor of a gated umT5 encoder: use the versions of the extra wan")


def load_native_umt5(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give a ``transformers.UMT5EncoderModel`` native tensors; raise InputError naming those that do not fit."""
    load_native(model, tensors, umt5_sources(model))
    model.set_input_embeddings(model.shared)  # loading made two parameters of the tied one


def empty_umt5(config: Mapping[str, Any] | None = None) -> Any:
    """Return a ``transformers.UMT5EncoderModel`` without memory, to be loaded; umT5-xxl unless told otherwise."""
    transformers = import_library("transformers")
    with torch.device("meta"):
        return transformers.UMT5EncoderModel(transformers.UMT5Config(**(config or UMT5_XXL)))


def read_umt5(
    path: Path | str,
    tokenizer: Path | str,
    *,
    prefix: str = "",
    config: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    max_tokens: int = MAX_TOKENS,
    has_cache: bool = True,
) -> Umt5TextEncoder:
    """Read native weights, and a tokenizer from its folder (Wan's checkpoints hold it as ``google/umt5-xxl``)."""
    model = empty_umt5(config)
    if not Path(tokenizer).is_dir():
        raise InputError(f"there is no tokenizer folder {tokenizer}: give Wan's google/umt5-xxl folder")
    words = import_library("transformers").AutoTokenizer.from_pretrained(str(tokenizer))
    load_native_umt5(model, read_tensors(path, prefix))
    return Umt5TextEncoder(model, words, device=device, dtype=dtype, max_tokens=max_tokens, has_cache=has_cache)
