"""The nouns of scheduling: an episode to play, an order to a worker, what is known of a group, a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

JobKey = tuple[int, int]  # group, member


@dataclass(eq=False, slots=True)
class Job:
    """One episode to play, and how far it is. Progress is counted in chunks of actions."""

    group: int
    member: int
    cap: int  # chunks after which the environment gives up
    state_bytes: int = 0  # what it holds on a worker before its first chunk
    chunk_bytes: int = 0  # what each chunk adds
    true_length: int | None = None  # known to the oracle rule only
    num_chunks: int = 0
    num_moves: int = 0
    worker: int | None = None  # where it last ran
    is_waiting: bool = True
    is_done: bool = False
    stamp: int = 0  # of its newest entry in a queue; older entries are void

    @property
    def key(self) -> JobKey:
        return self.group, self.member

    def bytes_after(self, num_chunks: int) -> int:
        """Return what it holds once ``num_chunks`` are played."""
        return self.state_bytes + self.chunk_bytes * num_chunks


@dataclass(frozen=True, slots=True)
class Order:
    """Play an episode from a chunk on, at most so many chunks, and send back what became of it."""

    group: int
    member: int
    from_chunk: int
    max_chunks: int
    hold_chunks: int = 0  # keep its place so many rounds even if it ends before (padded lock-step)
    is_move: bool = False  # its state was last on another worker

    @property
    def key(self) -> JobKey:
        return self.group, self.member


@dataclass(slots=True)
class GroupNotes:
    """What the finished members of a group tell about the others."""

    cap: int
    success_lengths: list[int] = field(default_factory=list)
    num_failures: int = 0

    @property
    def num_finished(self) -> int:
        return len(self.success_lengths) + self.num_failures

    @property
    def longest(self) -> int:
        """The longest finished member, the cap while there is none (Seer's estimate)."""
        if self.num_failures or not self.success_lengths:
            return self.cap
        return max(self.success_lengths)

    def expected_left(self, num_chunks: int, *, prior_success: float = 0.5, prior_weight: float = 1.0) -> int | float:
        """Return the expected chunks left to a member that has played ``num_chunks``.

        Beta-Bernoulli posterior of success times the mean success length; one who is 1.25 times past it will fail.
        """
        left = self.cap - num_chunks
        if not self.success_lengths:
            return left
        mean = sum(self.success_lengths) / len(self.success_lengths)
        if num_chunks > 1.25 * mean:
            return left
        successes = len(self.success_lengths) + prior_success * prior_weight
        failing = 1 - successes / (self.num_finished + prior_weight)
        return failing * left + (1 - failing) * max(1.0, mean - num_chunks)


Score = tuple[int | float, ...]  # smaller is sooner


@dataclass(frozen=True)
class Rule:
    """Who goes next: the waiting episode with the smallest score. Equal scores prefer the worker that has the state."""

    name: str
    score: Callable[[Job, GroupNotes], Score]
    is_divided: bool = True  # episodes go back to the queue after each segment
    is_pinned: bool = False  # a group stays on one worker
    is_padded: bool = False  # a worker's batch runs until its largest cap, finished episodes included
    learns: bool = False  # a finished member changes its siblings' scores


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker can hold."""

    num_slots: int = 8  # episodes at a time
    memory_bytes: int | float = float("inf")  # of episode states, reserved to the end of their segments


def jobs_of(
    caps: Sequence[int],
    group_size: int,
    *,
    true_lengths: Sequence[Sequence[int]] | None = None,
    state_bytes: int = 0,
    chunk_bytes: int = 0,
) -> list[Job]:
    """Return the jobs of groups of equal size, one group a cap."""
    return [
        Job(g, m, int(cap), state_bytes, chunk_bytes, None if true_lengths is None else int(true_lengths[g][m]))
        for g, cap in enumerate(caps)
        for m in range(group_size)
    ]
