"""A discrete-event twin of the rollout engine: the same schedulers, drawn episode lengths, modelled service times."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wamlab.errors import InputError
from wamlab.rl.jobs import JobKey, Order, Rule, WorkerLimits, jobs_of
from wamlab.rl.length_models import Lengths
from wamlab.rl.schedule import ScheduleConfig, Scheduler
from wamlab.rl.service import Service


@dataclass(frozen=True)
class Timeline:
    """How one iteration of rollouts went, simulated or real."""

    num_workers: int
    finish_s: Mapping[JobKey, float]  # since the iteration's start
    busy_s: Sequence[float]  # of each worker
    num_chunks: int  # played, those of finished episodes in padded batches not counted
    num_moves: int
    bars: Sequence[tuple[int, JobKey, int, float, float]] = field(
        default=(), repr=False
    )  # worker, key, chunk, from, to

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s.values())

    @property
    def episodes_per_s(self) -> float:
        return len(self.finish_s) / self.makespan_s

    @property
    def tail_s(self) -> float:
        """Time with only the last tenth of the episodes left."""
        times_s = sorted(self.finish_s.values())
        return times_s[-1] - times_s[int(np.ceil(0.9 * len(times_s))) - 1]

    @property
    def utilisation(self) -> float:
        """The share of worker time that was busy."""
        return sum(self.busy_s) / (self.num_workers * self.makespan_s)


def least_makespan_s(lengths: Lengths, service: Service, num_workers: int, num_slots: int) -> float:
    """Return what no schedule can beat: all work at the best batch, or the longest episode alone."""
    per_chunk_s = min(service.policy_s(b) / b for b in range(1, num_slots + 1))
    work_s = int(lengths.lengths.sum()) * per_chunk_s / num_workers
    return max(work_s, int(lengths.lengths.max()) * service.policy_s(1))


def env_times_s(lengths: Lengths, service: Service, seed: int) -> dict[JobKey, list[float]]:
    """Draw every chunk's time in its environment, up to the cap; the same under every rule."""
    times_s: dict[JobKey, list[float]] = {}
    for group, row in enumerate(lengths.lengths):
        generator = np.random.default_rng((seed, group))
        shape = (len(row), int(lengths.caps[group]))
        drawn = service.env_s * np.exp(service.env_spread * generator.standard_normal(shape))
        times_s |= {(group, member): values for member, values in enumerate(drawn.tolist())}
    return times_s


def simulate(
    lengths: Lengths,
    rule: Rule,
    service: Service,
    *,
    num_workers: int = 8,
    workers: Sequence[WorkerLimits] | None = None,
    config: ScheduleConfig | None = None,
    sizes: Mapping[str, int] | None = None,
    slowness: Mapping[int, float] | None = None,
    deaths_s: Mapping[int, float] | None = None,
    seed: int = 0,
) -> Timeline:
    """Play one iteration in simulated time; the same arguments give the same timeline.

    ``sizes`` are the ``state_bytes`` and ``chunk_bytes`` of an episode, ``slowness`` factors of single workers,
    ``deaths_s`` when workers die. Raises RuntimeError where episodes are left that no living worker can hold.
    """
    limits = list(workers or [WorkerLimits()] * num_workers)
    jobs = jobs_of(
        lengths.caps.tolist(), lengths.lengths.shape[1], true_lengths=lengths.lengths.tolist(), **(sizes or {})
    )
    scheduler = Scheduler(jobs, limits, rule, config)
    twin = _Twin(scheduler, lengths, service, env_times_s(lengths, service, seed), slowness or {})
    return twin.run(deaths_s or {})


class _Twin:
    """The simulated workers."""

    def __init__(
        self,
        scheduler: Scheduler,
        lengths: Lengths,
        service: Service,
        env_s: dict[JobKey, list[float]],
        slowness: Mapping[int, float],
    ) -> None:
        self.scheduler, self.service, self.env_s = scheduler, service, env_s
        self.lengths, self.is_success = lengths.lengths.tolist(), lengths.is_success.tolist()
        number = len(scheduler.workers)
        self.rows: list[list[list]] = [[] for _ in range(number)]  # order, chunks played, rounds here, from when
        self.factors = [slowness.get(worker, 1.0) for worker in range(number)]
        self.policy_s = [0.0] + [service.policy_s(b) for b in range(1, max(w.num_slots for w in scheduler.workers) + 1)]
        self.events: list[tuple[float, int, int]] = []
        self.num_events = self.num_chunks = self.num_moves = 0
        self.busy_s = [0.0] * number
        self.finish_s: dict[JobKey, float] = {}
        self.bars: list[tuple[int, JobKey, int, float, float]] = []
        self.idle: set[int] = set()

    def run(self, deaths_s: Mapping[int, float]) -> Timeline:
        for worker, death_s in deaths_s.items():
            self._push(death_s, -1 - worker)
        for worker in range(len(self.rows)):
            self._start_round(worker, 0.0)
        while self.events and not self.scheduler.is_finished:
            now_s, _, worker = heapq.heappop(self.events)
            if worker < 0:
                self.scheduler.lose(-1 - worker)
                self.rows[-1 - worker] = []
                self.idle.discard(-1 - worker)
            elif worker not in self.scheduler.lost:
                self._end_round(worker, now_s)
                self._start_round(worker, now_s)
            if self.idle and self.scheduler.num_waiting:
                for idle in sorted(self.idle):
                    if self.scheduler.num_waiting:
                        self._start_round(idle, now_s)
        if not self.scheduler.is_finished:
            raise InputError(f"{self.scheduler.num_left} episodes need more memory than any worker has")
        return Timeline(len(self.rows), self.finish_s, self.busy_s, self.num_chunks, self.num_moves, self.bars)

    def _push(self, at_s: float, worker: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (at_s, self.num_events, worker))

    def _end_round(self, worker: int, now_s: float) -> None:
        kept = []
        for row in self.rows[worker]:
            order: Order = row[0]
            group, member = order.group, order.member
            length = self.lengths[group][member]
            row[2] += 1
            if row[1] < length:
                row[1] += 1
                self.num_chunks += 1
                if row[1] == length and order.hold_chunks:
                    self.finish_s[order.key] = now_s
            is_done = row[1] == length
            if row[2] < order.hold_chunks or (not is_done and row[1] - order.from_chunk < order.max_chunks):
                kept.append(row)
                continue
            self.bars.append((worker, order.key, order.from_chunk, row[3], now_s))
            is_success = is_done and self.is_success[group][member]
            counts = self.scheduler.end(worker, order, row[1], is_done=is_done, is_success=is_success)
            if counts and is_done:
                self.finish_s.setdefault(order.key, now_s)
        self.rows[worker] = kept

    def _start_round(self, worker: int, now_s: float) -> None:
        rows, took_s = self.rows[worker], 0.0
        if self.scheduler.num_waiting:
            for order in self.scheduler.fill(worker):
                rows.append([order, order.from_chunk, 0, now_s])
                if order.is_move:
                    took_s += self.service.move_s
                    self.num_moves += 1
        if not rows:
            self.idle.add(worker)
            return
        self.idle.discard(worker)
        # a padded batch goes on drawing the times of finished episodes, up to their caps
        env_s = [
            times_s[min(row[0].from_chunk + row[2], len(times_s) - 1)]
            for row in rows
            for times_s in (self.env_s[row[0].key],)
        ]
        took_s += self.policy_s[len(rows)] + (max(env_s) if self.service.has_parallel_envs else sum(env_s))
        took_s *= self.factors[worker]
        self.busy_s[worker] += took_s
        self._push(now_s + took_s, worker)
