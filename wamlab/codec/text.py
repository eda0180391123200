"""The embedded text encoder: every word is a fixed pseudo-random vector; the network learns what to make of it."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wamlab.errors import check_range

MAX_CACHED = 4096  # instructions


@dataclass(frozen=True)
class HashTextConfig:
    """Width of a word's vector and number of words kept."""

    dim: int = 64
    max_tokens: int = 24  # the longest tabletop instruction has 22 words

    def __post_init__(self) -> None:
        check_range("text", self, 1, 65536, "dim", "max_tokens")


class HashTextEncoder:
    """Turns instructions into token features of about unit variance, the same on every machine.

    An instruction is encoded once and then read from the cache; ``num_encoded`` counts the work done.
    """

    def __init__(self, config: HashTextConfig | None = None) -> None:
        self.config = config or HashTextConfig()
        self.num_encoded = 0
        self._cache: dict[str, Tensor] = {}

    @property
    def fingerprint(self) -> str:
        """Identify what this encoder computes."""
        return f"hash-text-1-{self.config.dim}-{self.config.max_tokens}"

    def encode(self, instructions: Sequence[str]) -> Float[Tensor, "b n d"]:
        """Return token features, as many as the longest instruction has; places after a last word are zero."""
        return pad_sequence([self._encoded(instruction) for instruction in instructions], batch_first=True)

    def _encoded(self, instruction: str) -> Tensor:
        if instruction not in self._cache:
            if len(self._cache) >= MAX_CACHED:
                self._cache.pop(next(iter(self._cache)))
            self._cache[instruction] = self._encode(instruction)
        return self._cache[instruction]

    def _encode(self, instruction: str) -> Tensor:
        self.num_encoded += 1
        words = split_words(instruction)
        dim, max_tokens = self.config.dim, self.config.max_tokens
        if len(words) > max_tokens:
            warnings.warn(
                f'"{instruction}" has {len(words)} words; only {max_tokens} are used (text.max_tokens)', stacklevel=4
            )
        features = torch.zeros(min(len(words), max_tokens), dim)
        for place, word in enumerate(words[:max_tokens]):
            features[place] = torch.from_numpy(word_vector(word, dim)) + place_vector(place, dim)
        return features


def split_words(instruction: str) -> list[str]:
    """Return lower-case words and punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", instruction.lower())


def word_vector(word: str, dim: int) -> Float[np.ndarray, " d"]:
    """Return unit-variance numbers that depend on the word alone."""
    digest = hashlib.shake_256(word.encode()).digest(2 * dim)
    numbers = np.frombuffer(digest, dtype="<u2").astype(np.float64)
    return ((numbers / 65535 * 2 - 1) * math.sqrt(3)).astype(np.float32)


def place_vector(place: int, dim: int) -> Float[Tensor, " d"]:
    """Return the sinusoidal code of a word's place, half as strong as the word itself."""
    rates = 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
    code = torch.cat([torch.sin(place * rates), torch.cos(place * rates)])
    return 0.5 * torch.nn.functional.pad(code, (0, dim - len(code)))
