"""What an iteration has played so far, segment by segment in a store: what a rollout resumes from after a crash.

Every segment is stored with its own chunks alone, under its iteration, episode and last chunk. Those that reach from
chunk 0 without a gap are the episode, so the store itself is the record of progress; no index can disagree with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from wamlab.errors import InputError
from wamlab.rl.jobs import GroupNotes, Job, JobKey, Order
from wamlab.rl.segments import (
    Segment,
    Setting,
    joined_segment,
    segment_from_tensors,
    segment_to_tensors,
    words_of_name,
)
from wamlab.rl.store import TieredStore


class Records:
    """The segments of one iteration's episodes."""

    def __init__(self, store: TieredStore, setting: Setting) -> None:
        self.store, self.setting = store, setting
        self.names: dict[JobKey, list[str]] = {}
        self._remembering: set[JobKey] = set()  # whose last segment holds what the policy remembers

    @property
    def has_tiers(self) -> bool:
        return len(self.store.tiers) > 1

    def resume(self, jobs: Sequence[Job]) -> dict[int, GroupNotes]:
        """Bring jobs to where the store has them; return what the finished ones tell of their groups.

        Raises InputError for segments of other weights or another sampler.
        """
        by_key = {job.key: job for job in jobs}
        notes: dict[int, GroupNotes] = {}
        found: dict[JobKey, list[tuple[int, str]]] = {}
        for name in self.store:
            words = words_of_name(name)
            if words is not None and words[0] == self.setting.iteration:
                _, group, member, num_chunks = words
                found.setdefault((group, member), []).append((num_chunks, name))
        for key, ends in found.items():
            job = by_key.get(key)
            if job is None:
                continue
            for num_chunks, name in sorted(ends):
                piece = self._read(name)
                if num_chunks - len(piece.chunks["num_ticks"]) != job.num_chunks or job.is_done:
                    continue
                self.names.setdefault(key, []).append(name)
                job.num_chunks, job.is_done = num_chunks, piece.is_done
                if piece.is_done:
                    own = notes.setdefault(job.group, GroupNotes(job.cap))
                    own.success_lengths += [num_chunks] if piece.is_success else []
                    own.num_failures += not piece.is_success
            job.is_waiting = not job.is_done
        return notes

    def add(self, piece: Segment) -> None:
        """Keep a segment; the one before it no longer needs what the policy remembered."""
        names = self.names.setdefault(piece.key, [])
        self.store.put(piece.name, segment_to_tensors(piece))
        if piece.key in self._remembering:
            before = self._read(names[-1])
            self.store.put(before.name, segment_to_tensors(replace(before, memory={})))
            self._remembering.remove(piece.key)
        if piece.memory:
            self._remembering.add(piece.key)
        names.append(piece.name)

    def start_of(self, order: Order) -> Segment | None:
        """Return what an order goes on from: with actions only where they must be replayed, else without chunks."""
        if not order.from_chunk:
            return None
        last = self._read(self.names[order.key][-1])
        if last.snapshot is not None:
            return replace(last, chunks={})
        actions = [self._read(name).chunks["actions"] for name in self.names[order.key]]
        return joined_segment([replace(last, chunks={"actions": rows}) for rows in actions])

    def whole(self, key: JobKey) -> Segment:
        """Return a finished episode."""
        return joined_segment([self._read(name) for name in self.names[key]])

    def forget(self, key: JobKey) -> None:
        """Free the room of an episode."""
        for name in self.names.pop(key):
            self.store.remove(name)

    def expect(self, keys: Iterable[JobKey]) -> None:
        """Tell the store which episodes come next, soonest first, and bring their states near."""
        if self.has_tiers:
            names = [self.names[key][-1] for key in keys if self.names.get(key)]
            self.store.expect(names)
            self.store.prefetch(len(names))

    def _read(self, name: str) -> Segment:
        piece = segment_from_tensors(self.store.get(name), name)
        if piece.name != name:
            raise InputError(f"the store holds {piece.name} under the name {name}: remove it to play it again")
        if (piece.policy_version, piece.sampler) != (self.setting.policy_version, self.setting.sampler):
            raise InputError(
                f'the store holds {name} of policy {piece.policy_version} with the sampler "{piece.sampler}", not of '
                f'policy {self.setting.policy_version} with "{self.setting.sampler}": use a store of its own'
            )
        return piece


def forget_before(store: TieredStore, iteration: int) -> int:
    """Remove the segments of earlier iterations, once a checkpoint holds what was learned from them; count them."""
    names = [name for name in store if (words := words_of_name(name)) is not None and words[0] < iteration]
    for name in names:
        store.remove(name)
    return len(names)
