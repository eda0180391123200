"""Several sources of clips as one, in fixed proportions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wamlab.data.loader import ClipSource
from wamlab.errors import InputError
from wamlab.types import Clip


@dataclass(frozen=True)
class Mixture:
    """Clips of several sources by one number; ``mix`` makes it."""

    sources: tuple[ClipSource, ...]
    ends: tuple[int, ...]  # of each source's share of the numbers

    @property
    def num_samples(self) -> int:
        return self.ends[-1]

    def read(self, sample_index: int, seed: int) -> Clip:
        """Read a clip; a source that repeats within an epoch shows each repeat augmented anew."""
        place = int(np.searchsorted(self.ends, sample_index, side="right"))
        offset = sample_index - (self.ends[place - 1] if place else 0)
        repeat, index = divmod(offset, self.sources[place].num_samples)
        return self.sources[place].read(index, seed + repeat)


def mix(sources: Sequence[ClipSource], weights: Sequence[float]) -> Mixture:
    """Mix sources so that each gives its weight's share of the samples, to the nearest sample.

    An epoch of the mixture is as long as it takes to show every sample of every source; the others repeat.
    """
    if len(sources) != len(weights) or not sources or min(weights, default=0) <= 0:
        raise InputError(f"mix needs a weight above 0 for each of {len(sources)} sources, got {list(weights)}")
    sizes = np.array([source.num_samples for source in sources])
    epochs = sizes / np.array(weights)
    counts = np.maximum(np.round(np.array(weights) * epochs.max()).astype(int), sizes)
    return Mixture(tuple(sources), tuple(np.cumsum(counts).tolist()))
