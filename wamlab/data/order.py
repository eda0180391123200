"""In which order samples come: epoch after epoch without end, decided by a seed and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int

from wamlab.errors import InputError

NEVER = 2**62  # a position that no run reaches


@dataclass(frozen=True)
class Draw:
    """One place of the endless stream."""

    position: int
    sample: int
    seed: int  # of its augmentation; one an epoch
    group: tuple[int, int]  # epoch and number of the group
    members: tuple[int, ...]  # the samples of its group in their order, this one among them


@dataclass(frozen=True)
class _Epoch:
    samples: np.ndarray  # [n] in order of groups
    starts: np.ndarray  # [groups] first place of each group in ``samples``
    lane_starts: np.ndarray  # [lanes] first place of each lane in ``samples``
    seed: int


class SampleOrder:
    """A permutation of all samples an epoch, exactly or by groups of one episode.

    With ``pool`` K, up to K samples of an episode form a group, whose frames can be decoded together. Groups are
    shuffled and laid end to end along ``num_lanes`` lanes, one for each place of a (global) batch: a batch takes one
    sample from each lane, hence from as many groups, and K batches use a group up. With K = 1 it is an exact shuffle.
    Every sample comes once an epoch either way. The stream depends on the lanes, not on ranks or threads.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        *,
        is_shuffled: bool = True,
        pool: int = 1,
        num_lanes: int = 1,
        episodes: Int[np.ndarray, " samples"] | None = None,
    ):
        """Take the episode of each sample for a pool.

        Raises InputError for no samples, a pool below 1, and one without episodes or without shuffling.
        """
        if num_samples < 1:
            raise InputError("there is no sample to read")
        if pool < 1:
            raise InputError(f"pool is {pool}, need at least 1")
        if pool > 1 and (episodes is None or not is_shuffled):
            lacking = "come in order" if episodes is not None else "have no episodes"
            raise InputError(f"pool is {pool}, but these clips {lacking}: give 1")
        self.num_samples, self.seed, self.is_shuffled = num_samples, seed, is_shuffled
        self.pool, self.num_lanes, self._episodes = pool, num_lanes, episodes
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)  # a batch may lie across two
        self._uses = lru_cache(maxsize=2)(self._list_uses)

    def draw(self, position: int) -> Draw:
        """Return what comes at a place of the stream, without anything before it."""
        number, place = divmod(position, self.num_samples)
        epoch = self._epoch(number)
        place = int(self._place(place, epoch))
        group = int(np.searchsorted(epoch.starts, place, side="right")) - 1
        end = epoch.starts[group + 1] if group + 1 < len(epoch.starts) else self.num_samples
        members = epoch.samples[epoch.starts[group] : end] if self.pool > 1 else epoch.samples[place : place + 1]
        return Draw(position, int(epoch.samples[place]), epoch.seed, (number, group), tuple(members.tolist()))

    def next_use(self, episode: int, after: int) -> int:
        """Return the first position above ``after`` where frames of the episode are decoded, NEVER if none is.

        A group's frames are decoded at its first sample.
        """
        first = max(0, (after + 1) // self.num_samples)
        for number in (first, first + 1):
            positions = self._uses(number).get(episode)
            if positions is None:
                return NEVER
            index = int(np.searchsorted(positions, after, side="right"))
            if index < len(positions):
                return int(positions[index])
        return NEVER

    def _place(self, place: Any, epoch: _Epoch) -> Any:
        """Turn positions within an epoch into those of its ``samples``: row by row across the lanes."""
        if self.pool == 1:
            return place
        row, lane = np.divmod(place, self.num_lanes)
        return epoch.lane_starts[lane] + row

    def _make_epoch(self, number: int) -> _Epoch:
        rng = np.random.default_rng([self.seed, number])
        every = np.arange(self.num_samples)
        samples = rng.permutation(self.num_samples) if self.is_shuffled else every
        seed = int(rng.integers(2**63))
        if self.pool == 1:
            return _Epoch(samples, every, every[:1], seed)
        assert self._episodes is not None
        samples = samples[np.argsort(self._episodes[samples], kind="stable")]  # by episode, in random order within
        episodes = self._episodes[samples]
        first = np.flatnonzero(np.diff(episodes, prepend=episodes[0] - 1))
        within = every - np.repeat(first, np.diff(first, append=self.num_samples))
        starts = np.flatnonzero(within % self.pool == 0)
        sizes = np.diff(starts, append=self.num_samples)
        shuffled = rng.permutation(len(starts))
        starts, sizes = starts[shuffled], sizes[shuffled]
        ends = np.cumsum(sizes)
        samples = samples[np.repeat(starts - (ends - sizes), sizes) + every]
        lanes = np.arange(self.num_lanes)
        each, rest = divmod(self.num_samples, self.num_lanes)
        lane_starts = lanes * each + np.minimum(lanes, rest)
        cuts = np.union1d(ends - sizes, lane_starts[lane_starts < self.num_samples])
        return _Epoch(samples, cuts, lane_starts, seed)

    def _list_uses(self, number: int) -> dict[int, np.ndarray]:
        """Return the sorted positions of each episode in an epoch where its frames are decoded."""
        if self._episodes is None:
            return {}
        epoch = self._epoch(number)
        places = self._place(np.arange(self.num_samples), epoch)
        positions = np.flatnonzero(np.isin(places, epoch.starts))
        episodes = self._episodes[epoch.samples[places[positions]]]
        order = np.argsort(episodes, kind="stable")
        found, first = np.unique(episodes[order], return_index=True)
        parts: Sequence[np.ndarray] = np.split(positions[order] + number * self.num_samples, first[1:])
        return dict(zip(found.tolist(), parts, strict=True))
