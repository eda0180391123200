"""Which worker plays which episode next; the same objects drive real workers and the simulator.

A driver calls ``fill(worker)`` whenever a worker has a free place and ``end(worker, order, ...)`` when an order's
segment has ended; ``lose(worker)`` gives back what a dead or silent worker held. No clock, no process, no state here:
an order names the episode and the chunk to go on from, so that a segment played twice is the same segment.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from wamlab.errors import InputError, check_range
from wamlab.rl.jobs import GroupNotes, Job, JobKey, Order, Rule, Score, WorkerLimits

Entry = tuple[Score, int, Job]  # of a queue; the number of its arrival is the job's stamp
MAX_TIES = 8  # waiting episodes of equal score that are looked at for one whose state is here
MAX_LOOKED_AT = 32  # waiting episodes that are tried for one that fits into memory


@dataclass(frozen=True)
class ScheduleConfig:
    """How episodes are divided and moved."""

    segment_chunks: int = 8  # an episode goes back to the queue after so many
    tail_chunks: int = 2  # and after so many once nobody waits, so that the last ones spread over the workers
    can_move: bool = True  # False where environments cannot be restored: started episodes stay
    max_moves: int | None = None  # of one episode
    oldest_every: int = 0  # every n-th pick takes the one that waits longest; 0 never
    num_deviations: float = 3.0  # a worker slower by so many median absolute deviations is a straggler
    silent_s: float = 60.0  # one that says nothing for so long has died

    def __post_init__(self) -> None:
        check_range("schedule", self, 1, float("inf"), "segment_chunks", "tail_chunks")
        check_range("schedule", self, 0, float("inf"), "oldest_every", "num_deviations", "silent_s")


class Scheduler:
    """Queue of episodes and who plays what."""

    def __init__(
        self,
        jobs: Sequence[Job],
        workers: Sequence[WorkerLimits],
        rule: Rule,
        config: ScheduleConfig | None = None,
        *,
        notes: Mapping[int, GroupNotes] | None = None,  # of episodes that are done already, by group
    ) -> None:
        if not workers or not jobs:
            raise InputError(f"a schedule needs episodes and workers, got {len(jobs)} and {len(workers)}")
        self.rule, self.config = rule, config or ScheduleConfig()
        self.workers = list(workers)
        self.jobs = {job.key: job for job in jobs}
        if len(self.jobs) < len(jobs):
            raise InputError("two episodes have the same group and member")
        self.groups = {job.group: GroupNotes(job.cap) for job in jobs} | dict(notes or {})
        self.running: list[dict[JobKey, Order]] = [{} for _ in workers]
        self.lost: set[int] = set()
        self.num_left = sum(not job.is_done for job in jobs)
        self.num_waiting = 0
        self._num_slots = sum(limits.num_slots for limits in workers)
        self._reserved: list[dict[JobKey, int]] = [{} for _ in workers]
        self._members: dict[int, list[Job]] = {}
        for job in jobs:
            self._members.setdefault(job.group, []).append(job)
        self._queues: list[list[Entry]]
        self._queues = [[] for _ in (workers if rule.is_pinned else (0,))]
        self._oldest: deque[Job] = deque()
        self._num_entries = self._num_picks = 0
        self._chunk_s: dict[int, float] = {}
        self._last_heard_s: dict[int, float] = {}
        for job in jobs:
            if not job.is_done:
                self._wait(job)

    @property
    def is_finished(self) -> bool:
        return self.num_left == 0

    def fill(self, worker: int) -> list[Order]:
        """Return the orders that fill the worker's free places now."""
        if worker in self.lost or (self.rule.is_padded and self.running[worker]):
            return []
        orders: list[Order] = []
        target = self._target(worker)
        while len(self.running[worker]) < target:
            job = self._pick(worker)
            if job is None:
                break
            orders.append(self._order(job, worker))
        if self.rule.is_padded and orders:
            hold = max(self.jobs[order.key].cap for order in orders)
            orders = [Order(o.group, o.member, o.from_chunk, o.max_chunks, hold, o.is_move) for o in orders]
            self.running[worker] = {order.key: order for order in orders}
        return orders

    def end(self, worker: int, order: Order, num_chunks: int, *, is_done: bool, is_success: bool = False) -> bool:
        """Take back an order after which the episode has played ``num_chunks``; say whether it counts.

        A segment that was given to another worker meanwhile counts for whoever ends it first.
        """
        if self.running[worker].get(order.key) == order:  # not a newer one for the same episode
            del self.running[worker][order.key]
            del self._reserved[worker][order.key]
        job = self.jobs[order.key]
        if job.is_done or job.num_chunks != order.from_chunk:
            return False
        job.num_chunks, job.worker = num_chunks, worker
        job.num_moves += order.is_move
        if not is_done:
            self._wait(job)
            return True
        job.is_done = True
        self._unwait(job)
        self.num_left -= 1
        notes = self.groups[job.group]
        if is_success:
            notes.success_lengths.append(num_chunks)
        else:
            notes.num_failures += 1
        if self.rule.learns:
            for sibling in self._members[job.group]:
                if sibling.is_waiting:
                    self._wait(sibling)
        return True

    def lose(self, worker: int, *, is_dead: bool = True) -> int:
        """Give back the orders of a worker that died or is too slow; return how many."""
        orders = list(self.running[worker])
        self.running[worker].clear()
        self._reserved[worker].clear()
        if is_dead:
            self.lost.add(worker)
            if len(self.lost) == len(self.workers) and self.num_left:
                raise RuntimeError(
                    f"all {len(self.workers)} workers have died, {self.num_left} episodes are not played"
                )
        for key in orders:
            job = self.jobs[key]
            if not job.is_done and not any(key in held for held in self.running):
                self._wait(job)
        return len(orders)

    def revive(self, worker: int) -> None:
        """Let a worker that was lost and started again take orders."""
        self.lost.discard(worker)

    def hear(self, worker: int, now_s: float, chunk_s: float | None = None) -> None:
        """Note that a worker has spoken, and what a chunk took it lately."""
        self._last_heard_s[worker] = now_s
        if chunk_s is not None:
            self._chunk_s[worker] = chunk_s

    def is_silent(self, worker: int, now_s: float) -> bool:
        """Say whether a worker has said nothing for too long."""
        return now_s - self._last_heard_s.get(worker, 0.0) > self.config.silent_s

    def stragglers(self, now_s: float) -> list[int]:
        """Return workers with orders that are silent, or slower than the others by the configured deviations.

        A deviation counts as at least a tenth of the median, or equal workers would blame each other for noise.
        """
        found = []
        times_s = list(self._chunk_s.values())
        middle_s = median(times_s) if times_s else 0.0
        deviation_s = max(median(abs(t - middle_s) for t in times_s) if times_s else 0.0, 0.1 * middle_s)
        for worker, held in enumerate(self.running):
            if not held or worker in self.lost:
                continue
            slow_s = middle_s + self.config.num_deviations * deviation_s
            if self.is_silent(worker, now_s) or (len(times_s) > 2 and self._chunk_s.get(worker, 0.0) > slow_s):
                found.append(worker)
        return found

    def upcoming(self, number: int) -> list[JobKey]:
        """Return the next waiting episodes in the order of their scores, for prefetching their states."""
        entries = heapq.nsmallest(number, (entry for queue in self._queues for entry in queue if self._is_valid(entry)))
        return [job.key for *_, job in entries]

    def _target(self, worker: int) -> int:
        slots = self.workers[worker].num_slots
        if self.rule.is_pinned or self.rule.is_padded:
            return slots
        return min(slots, math.ceil(self.num_left / (len(self.workers) - len(self.lost))))

    def _wait(self, job: Job) -> None:
        """Put a job into its queue, or again with its new score."""
        if not job.is_waiting or job.stamp == 0:
            self.num_waiting += 1
            self._oldest.append(job)
        job.is_waiting = True
        self._num_entries += 1
        job.stamp = self._num_entries
        entry = (self.rule.score(job, self.groups[job.group]), job.stamp, job)
        heapq.heappush(self._queue_of(job), entry)

    def _unwait(self, job: Job) -> None:
        self.num_waiting -= job.is_waiting
        job.is_waiting = False

    def _queue_of(self, job: Job) -> list[Entry]:
        return self._queues[job.group % len(self._queues)]

    @staticmethod
    def _is_valid(entry: Entry) -> bool:
        return entry[2].is_waiting and entry[2].stamp == entry[1]

    def _pick(self, worker: int) -> Job | None:
        self._num_picks += 1
        if self.config.oldest_every and self._num_picks % self.config.oldest_every == 0 and not self.rule.is_pinned:
            job = self._pick_oldest(worker)
            if job is not None:
                return job
        queue = self._queues[worker if self.rule.is_pinned else 0]
        looked_at = []
        best, best_rank = None, (3, 0)
        while queue and len(looked_at) < MAX_LOOKED_AT:
            if not self._is_valid(queue[0]):
                heapq.heappop(queue)
                continue
            if best is not None and (queue[0][0] > best[0] or len(looked_at) >= MAX_TIES):
                break
            entry = heapq.heappop(queue)
            looked_at.append(entry)
            job = entry[2]
            if not self._is_allowed(job, worker):
                continue
            rank = (0 if job.worker == worker else 1 if job.worker is None else 2, entry[1])
            if rank < best_rank:
                best, best_rank = entry, rank
        for entry in looked_at:
            if entry is not best:
                heapq.heappush(queue, entry)
        return None if best is None else best[2]

    def _pick_oldest(self, worker: int) -> Job | None:
        while self._oldest:
            job = self._oldest[0]
            if job.is_waiting:
                return job if self._is_allowed(job, worker) else None
            self._oldest.popleft()
        return None

    def _is_allowed(self, job: Job, worker: int) -> bool:
        is_move = job.worker is not None and job.worker != worker and job.worker not in self.lost
        if is_move and not self.config.can_move:
            return False
        if is_move and self.config.max_moves is not None and job.num_moves >= self.config.max_moves:
            return False
        needed = job.bytes_after(job.num_chunks + self._segment_chunks(job))
        return sum(self._reserved[worker].values()) + needed <= self.workers[worker].memory_bytes

    def _segment_chunks(self, job: Job) -> int:
        left = job.cap - job.num_chunks
        if not self.rule.is_divided or not self.config.can_move:
            return left
        is_tail = self.num_left < self._num_slots
        return min(left, self.config.tail_chunks if is_tail else self.config.segment_chunks)

    def _order(self, job: Job, worker: int) -> Order:
        self._unwait(job)
        max_chunks = self._segment_chunks(job)
        is_move = job.worker is not None and job.worker != worker
        order = Order(job.group, job.member, job.num_chunks, max_chunks, is_move=is_move)
        self.running[worker][job.key] = order
        self._reserved[worker][job.key] = job.bytes_after(job.num_chunks + max_chunks)
        return order
