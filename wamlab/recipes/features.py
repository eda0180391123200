"""Which features a run trains on: those its encoders make, or those a store holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wamlab.codec.features import FeatureStore, window_key
from wamlab.data.clips import ClipReader
from wamlab.errors import InputError
from wamlab.recipes.config import Recipe
from wamlab.types import Clip


class StoredClips:
    """A ``ClipSource`` whose clips have no frames where a store holds their features, so no video is decoded."""

    def __init__(self, reader: ClipReader, store: FeatureStore) -> None:
        self.reader, self.store = reader, store
        self._windows = reader.windows

    @property
    def num_samples(self) -> int:
        return self.reader.num_samples

    def read(self, sample_index: int, seed: int) -> Clip:
        """Read a clip, with frames only if it must be encoded."""
        episode, first_row, num_blocks = self._windows[sample_index].tolist()
        key = window_key(episode, first_row, num_blocks, self.reader.augmentation_seed(seed))
        return self.reader.read(sample_index, seed, has_frames=key not in self.store.windows)


def list_variants(recipe: Recipe, reader: ClipReader) -> range:
    """Return the augmentation seeds that a store keeps of each window; refuse a recipe that draws without end."""
    if not reader.num_variants:
        raise InputError(
            f"recipe {recipe.name} crops or recolours every clip anew: give features.num_variants of at least 1, "
            "the number of versions of each window to store"
        )
    return range(reader.num_variants)


def unique_windows(reader: ClipReader) -> np.ndarray:
    """Return every window once, [n 3]: episode, first row, number of blocks, in this order."""
    return np.unique(reader.windows, axis=0)


def list_missing(recipe: Recipe, reader: ClipReader, store: FeatureStore) -> Iterator[str]:
    """Yield the keys of all windows a run may ask for that a store lacks."""
    variants = list_variants(recipe, reader)
    for episode, first_row, num_blocks in unique_windows(reader).tolist():
        keys = [window_key(episode, first_row, num_blocks, seed) for seed in variants]
        yield from (key for key in keys if key not in store.windows)


def check_complete(recipe: Recipe, reader: ClipReader, store: FeatureStore) -> None:
    """Refuse a store that lacks a window or an instruction of a recipe, in one sentence that says what to run."""
    num_missing = sum(1 for _ in list_missing(recipe, reader, store))
    num_missing += sum(instruction not in store.text for instruction in reader.instructions)
    if num_missing:
        raise InputError(
            f'features.mode is "cached" and {store.root} lacks {num_missing:,} windows or instructions of this run: '
            f"run `wamlab encode {recipe.name}` with the same options, or give features.mode cached-if-present"
        )
