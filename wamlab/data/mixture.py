"""Several sources of clips as one, in fixed proportions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from wamlab.data.eviction import NextUse
from wamlab.data.reading import ClipSource, DecodedSource
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
        source, index, repeat = self._place(sample_index)
        return source.read(index, seed + repeat)

    def _place(self, sample_index: int) -> tuple[Any, int, int]:
        """Return the source of a number, the number there, and how often the source has begun again."""
        place = int(np.searchsorted(self.ends, sample_index, side="right"))
        offset = sample_index - (self.ends[place - 1] if place else 0)
        repeat, index = divmod(offset, self.sources[place].num_samples)
        return self.sources[place], index, repeat

    @property
    def _counts(self) -> list[int]:
        return np.diff(self.ends, prepend=0).tolist()


class DecodedMixture(Mixture):
    """A mixture of sources that decode in one step and use the frames in another."""

    @cached_property
    def sample_episodes(self) -> np.ndarray:
        """Return the episode of every number; those of different sources differ."""
        episodes = zip(self._own_episodes, self._offsets, self._counts, strict=True)
        return np.concatenate([offset + np.resize(own, count) for own, offset, count in episodes])

    @property
    def _own_episodes(self) -> list[np.ndarray]:
        return [source.sample_episodes for source in self.sources if isinstance(source, DecodedSource)]

    @cached_property
    def _offsets(self) -> list[int]:
        """Return what is added to the episodes of each source."""
        sizes = [int(own.max()) + 1 for own in self._own_episodes]
        return [0, *np.cumsum(sizes[:-1]).tolist()]

    def follow(self, next_use: NextUse) -> None:
        """Tell each source's cache when the stream of the whole mixture comes to an episode of its own again."""
        for source in self.sources:
            offsets = [offset for other, offset in zip(self.sources, self._offsets, strict=True) if other is source]
            if hasattr(source, "follow"):
                source.follow(partial(_soonest, next_use, offsets))  # pyright: ignore[reportAttributeAccessIssue]

    def decode(self, samples: Sequence[int], position: int, new: Callable[..., np.ndarray] | None = None) -> Any:
        """Decode the frames of samples of one episode."""
        places = [self._place(sample) for sample in samples]
        return places[0][0].decode([index for _, index, _ in places], position, new)

    def clip(self, sample_index: int, seed: int, decoded: Any, new: Callable[..., np.ndarray]) -> Clip:
        """Make a number's clip of decoded frames."""
        source, index, repeat = self._place(sample_index)
        return source.clip(index, seed + repeat, decoded, new)


def _soonest(next_use: NextUse, offsets: Sequence[int], episode: int, after: int) -> int:
    """Return when an episode comes again of a source that may be in a mixture more than once."""
    return min(next_use(offset + episode, after) for offset in offsets)


def mix(sources: Sequence[ClipSource], weights: Sequence[float] | None = None, *, balance: float = 1.0) -> Mixture:
    """Mix sources so that each gives its weight's share of the samples, to the nearest sample.

    Without weights a source's share goes with its number of samples to the power of ``balance``: 1 leaves the mixture
    as the data are, 0 gives all sources the same share, whatever their lengths. An epoch of the mixture is as long as
    it takes to show every sample of every source; the others repeat.
    """
    sizes = np.array([source.num_samples for source in sources])
    if weights is None:
        if not 0 <= balance <= 1:
            raise InputError(f"balance is {balance}, need 0 (equal shares) to 1 (by size)")
        weights = [float(size) ** balance for size in sizes]
    if len(sources) != len(weights) or not sources or min(weights, default=0) <= 0:
        raise InputError(f"mix needs a weight above 0 for each of {len(sources)} sources, got {list(weights)}")
    epochs = sizes / np.array(weights)
    counts = np.maximum(np.round(np.array(weights) * epochs.max()).astype(int), sizes)
    kind = DecodedMixture if all(isinstance(source, DecodedSource) for source in sources) else Mixture
    return kind(tuple(sources), tuple(np.cumsum(counts).tolist()))
