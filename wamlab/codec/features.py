"""The feature store: what frozen encoders made of windows and instructions, made once and then read.

A window's features belong to its encoder, its transform (dataset, views, frame rate) and its key: episode, first row,
number of blocks, augmentation seed. Text features belong to the text encoder and the instruction alone.
Stored features equal those of an encoder that gives a clip the same bits alone and in any batch, as the embedded codec
does on a CPU; others equal theirs to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wamlab.codec.clips import ClipEncoder, check_shapes
from wamlab.codec.feature_files import RecordFolder
from wamlab.errors import InputError
from wamlab.types import Batch, Clip

MAX_CACHED = 4096  # instructions in memory


@dataclass(frozen=True)
class FeatureReport:
    """How much a store holds, and how much of what was asked for it had."""

    num_windows: int  # each augmentation of a window counts
    num_instructions: int
    size_gib: float
    num_hits: int  # windows read from the store by this process
    num_misses: int  # windows encoded instead

    @property
    def hit_rate(self) -> float:
        """Return hits per window asked for; 1 where none was."""
        asked = self.num_hits + self.num_misses
        return self.num_hits / asked if asked else 1.0

    def __str__(self) -> str:
        size = f"{self.size_gib:.2f} GiB" if self.size_gib >= 0.1 else f"{self.size_gib * 1024:.1f} MiB"
        held = f"{self.num_windows:,} windows and {self.num_instructions:,} instructions, {size}"
        asked = self.num_hits + self.num_misses
        return f"{held}; {self.hit_rate:.1%} of {asked:,} windows were read from it" if asked else held


def window_key(episode: int, first_row: int, num_blocks: int, augmentation_seed: int) -> str:
    """Return the key of a window's features."""
    return f"{episode}/{first_row}/{num_blocks}/{augmentation_seed}"


def clip_key(clip: Clip) -> str:
    """Return the key of a clip's features; it has one state a block."""
    return window_key(clip.episode, clip.first_row, len(clip.state), clip.augmentation_seed)


class FeatureStore:
    """The features that one encoder makes of the windows of one transform, and of instructions."""

    def __init__(self, root: Path, encoder: ClipEncoder, transform: str, *, shard_mib: int | float = 64.0) -> None:
        """Take ``root`` and the transform's fingerprint; nothing is written before something is added."""
        self.root, self.encoder = root, encoder
        about = {"encoder": encoder.fingerprint, "transform": transform}
        self.windows = RecordFolder(root / "windows", about, shard_mib=shard_mib)
        self.text = RecordFolder(root / "text", {"encoder": encoder.text.fingerprint}, shard_mib=shard_mib)
        self.num_hits = self.num_misses = 0
        self._read_text = lru_cache(maxsize=MAX_CACHED)(lambda instruction: self.text.read(instruction)["text"])

    def add_windows(self, keys: Sequence[str], frames: UInt8[np.ndarray, "b t h w 3"]) -> dict[str, Tensor]:
        """Encode windows, keep their features and return them, each [b ...]."""
        features = self.encoder.encode_window(frames)
        for i, key in enumerate(keys):
            self.windows.add(key, {name: tensor[i] for name, tensor in features.items()})
        return features

    def add_instructions(self, instructions: Sequence[str]) -> None:
        """Encode the instructions that are not held, each alone, so that its true length is kept."""
        for instruction in dict.fromkeys(instructions):
            if instruction not in self.text:
                self.text.add(instruction, {"text": self.encoder.encode_text([instruction])[0]})

    def read_text(self, instructions: Sequence[str]) -> Float[Tensor, "b n d"]:
        """Return stored features, as many as the longest instruction has; places after a last token are zero."""
        return pad_sequence([self._read_text(instruction) for instruction in instructions], batch_first=True)

    def refresh(self) -> None:
        """Take note of what other processes have finished since."""
        self.windows.refresh()
        self.text.refresh()

    def flush(self) -> None:
        """Write all that was added."""
        self.text.flush()
        self.windows.flush()

    def sweep(self) -> None:
        """Delete what killed processes left unfinished."""
        self.text.sweep()
        self.windows.sweep()

    def verify(self) -> None:
        """Check every finished shard against its hash; raise ``InputError`` naming the first damaged file."""
        self.text.verify()
        self.windows.verify()

    def report(self) -> FeatureReport:
        """Return what is held and the hit rate so far."""
        size_gib = (self.windows.num_bytes + self.text.num_bytes) / 2**30
        return FeatureReport(len(self.windows), len(self.text), size_gib, self.num_hits, self.num_misses)


class StoredEncoder:
    """An ``Encode`` that reads what the store holds, and encodes and keeps the rest, saying so once."""

    def __init__(self, store: FeatureStore) -> None:
        self.store = store
        self._has_told = False

    def __call__(self, clips: Sequence[Clip]) -> Batch:
        """Return the batch that the store's encoder would; raise ``InputError`` for damaged features."""
        check_shapes(clips)
        store, keys = self.store, [clip_key(clip) for clip in clips]
        missing = [i for i, key in enumerate(keys) if key not in store.windows]
        store.num_hits += len(keys) - len(missing)
        store.num_misses += len(missing)
        if missing:
            self._tell()
            if blind := [keys[i] for i in missing if not len(clips[i].frames)]:
                raise InputError(f"{store.windows.folder} lost window {blind[0]}: run `wamlab encode` again")
            store.add_windows([keys[i] for i in missing], np.stack([clips[i].frames for i in missing]))
        instructions = [clip.instruction for clip in clips]
        store.add_instructions(instructions)
        records = [store.windows.read(key) for key in keys]
        features = {name: torch.stack([record[name] for record in records]) for name in records[0]}
        return store.encoder.batch_of(clips, features, store.read_text(instructions))

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                f"{self.store.root} lacks some windows of this run: they are encoded now and kept there; "
                "`wamlab encode` does it beforehand",
                stacklevel=3,
            )
