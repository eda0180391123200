"""Play an iteration's episodes and yield groups as they finish; trajectories do not depend on who plays them when."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

from wamlab.errors import InputError, check_range
from wamlab.rl.batch_curve import BatchCurve
from wamlab.rl.crew import Crew, Heard, LocalCrew
from wamlab.rl.episode import MakeEnv
from wamlab.rl.jobs import Job, JobKey, WorkerLimits
from wamlab.rl.records import Records
from wamlab.rl.rules import RULES
from wamlab.rl.schedule import ScheduleConfig, Scheduler
from wamlab.rl.segments import Act, Group, Segment, Setting
from wamlab.rl.simulate import Timeline
from wamlab.rl.store import DeviceTier, TieredStore
from wamlab.rl.worker import Ended, Given

LISTEN_S = 0.1  # between looks at who is silent
NUM_EXPECTED = 32  # waiting episodes whose states the store is told of
LEAST_ROUNDS = 3  # of a worker, before its pace counts


@dataclass(frozen=True)
class PlayConfig:
    """Who goes next, and what workers can hold."""

    rule: str = "context"  # a name of wamlab.rl.rules.RULES
    num_members: int = 8  # episodes of a group
    num_slots: int = 8  # episodes that a worker plays at a time; for crews that play makes itself
    num_workers: int = 1  # likewise
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    memory_bytes: int | float = float("inf")  # of a worker, for episode states
    state_bytes: int = 0  # of an episode before its first chunk
    chunk_bytes: int = 0  # added by each chunk

    def __post_init__(self) -> None:
        check_range("play", self, 1, float("inf"), "num_members", "num_slots", "num_workers")
        if self.rule not in RULES or self.rule == "oracle":
            raise InputError(f'play.rule is "{self.rule}": give one of {", ".join(r for r in RULES if r != "oracle")}')


@dataclass(frozen=True)
class PlayedGroup:
    """A group all of whose episodes have ended."""

    group: Group
    segments: tuple[Segment, ...]  # the whole trajectory of each member, in their order

    @property
    def success(self) -> float:
        """The share of members that succeeded."""
        return sum(segment.is_success for segment in self.segments) / len(self.segments)


def play(
    groups: Sequence[Group],
    setting: Setting,
    act: Act,
    make_env: MakeEnv,
    *,
    config: PlayConfig | None = None,
    store: TieredStore | None = None,
    curve: BatchCurve | None = None,
) -> Rollout:
    """Play in this process: an iterator of PlayedGroups as they finish, with a timeline.

    ``curve`` carries what calls of the policy took from one iteration to the next, for ``Setting.is_batch_chosen``.

    ``make_env(task)`` returns an environment of one place. With a store that was used before, the episodes of this
    iteration go on from where they are in it.
    """
    config = config or PlayConfig()
    crew = LocalCrew(act, make_env, num_slots=config.num_slots, num_workers=config.num_workers, curve=curve)
    return Rollout(groups, setting, crew, config=config, store=store)


class Pace(NamedTuple):
    """What one round took."""

    worker: int
    num_rows: int
    cycle_s: float  # since the worker's round before, or since it had something to do again
    took_s: float  # of that in the worker itself
    played_s: float  # of that in what any loop would do
    policy_s: float  # of that in the policy


class Rollout(Iterator[PlayedGroup]):
    """An iteration of episodes on any crew: iterate it for the groups, ask it for the timeline at any moment.

    Whatever moves the states between processes, the scheduler and this loop are the same.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        setting: Setting,
        crew: Crew,
        *,
        config: PlayConfig | None = None,
        store: TieredStore | None = None,
    ) -> None:
        self.config = config or PlayConfig()
        self.groups = {group.number: group for group in groups}
        if len(self.groups) < len(groups):
            raise InputError("two groups have the same number")
        self.setting, self.crew, self.has_own_store = setting, crew, store is None
        self.records = Records(store or TieredStore([DeviceTier(float("inf"))]), setting)
        limits = WorkerLimits(crew.num_slots, self.config.memory_bytes)
        sizes = self.config.state_bytes, self.config.chunk_bytes
        jobs = [Job(g.number, member, g.cap, *sizes) for g in groups for member in range(self.config.num_members)]
        notes = self.records.resume(jobs)
        rule = RULES[self.config.rule]
        self.scheduler = Scheduler(jobs, [limits] * crew.num_workers, rule, self.config.schedule, notes=notes)
        self.deaths: list[str] = []  # why workers died
        self.num_reissued = 0
        self.paces: list[Pace] = []  # of every round
        self._left = Counter(job.group for job in jobs if not job.is_done)
        self._held: list[dict[JobKey, float]] = [{} for _ in range(crew.num_workers)]  # since when, as given
        self._relieved: set[int] = set()  # slow or silent ones, until what they hold has come
        self._num_rounds = [0] * crew.num_workers
        self._since_s = [0.0] * crew.num_workers  # it was answered, or had something to do again
        self._start_s = time.perf_counter()
        self._busy_s = [0.0] * crew.num_workers
        self._finish_s: dict[JobKey, float] = {}
        self._bars: list[tuple[int, JobKey, int, float, float]] = []
        self._num_chunks = self._num_moves = 0
        self._is_stopped = False
        self._found = in_thread(self._play(), self.stop) if crew.is_remote else self._play()

    def __next__(self) -> PlayedGroup:
        return next(self._found)

    def stop(self) -> None:
        """Let the loop end where it is; a store keeps what has been played."""
        self._is_stopped = True

    def close(self) -> None:
        """Stop, and wait until nothing runs here any more; the crew stays."""
        self.stop()
        self._found.close()

    @property
    def timeline(self) -> Timeline:
        """How it has gone so far, in seconds since it began."""
        finish_s, bars = dict(self._finish_s), list(self._bars)
        return Timeline(self.crew.num_workers, finish_s, list(self._busy_s), self._num_chunks, self._num_moves, bars)

    def _play(self) -> Generator[PlayedGroup]:
        scheduler = self.scheduler
        yield from [self._group(number) for number in self.groups if not self._left[number]]
        if scheduler.is_finished:
            return
        alive = self.crew.begin(self.groups, self.setting)
        self._start_s = time.perf_counter()
        scheduler.lost.update(set(range(self.crew.num_workers)).difference(alive))
        for worker in alive:
            self._fill(worker)
        while not scheduler.is_finished and not self._is_stopped:
            is_alive = len(scheduler.lost) < self.crew.num_workers
            if is_alive and not any(self._held) and scheduler.num_waiting:
                raise InputError(f"{scheduler.num_left} episodes need more memory than any worker has")
            for heard in self.crew.hear(LISTEN_S):
                yield from [self._group(number) for number in self._take(heard)]
            self._relieve()
            for worker in range(self.crew.num_workers):
                if scheduler.num_waiting and not self._held[worker]:
                    self._fill(worker)

    def _take(self, heard: Heard) -> list[int]:
        """Note what came from a worker and give it more to do; return the groups that are finished now."""
        worker, now_s = heard.worker, time.perf_counter() - self._start_s
        if heard.is_back:
            self.scheduler.revive(worker)
            self._fill(worker)
            return []
        if heard.round is None:
            self.deaths.append(heard.why)
            self.num_reissued += self.scheduler.lose(worker, is_dead=not heard.will_return)
            self.scheduler.lost.add(worker)
            self._held[worker].clear()
            self._relieved.discard(worker)
            return []
        found = heard.round
        self._busy_s[worker] += found.took_s
        self._num_chunks += found.num_chunks
        cycle_s = now_s - self._since_s[worker]
        self.paces.append(Pace(worker, found.num_rows, cycle_s, found.took_s, found.played_s, found.policy_s))
        self._since_s[worker] = now_s
        self._num_rounds[worker] += 1
        pace_s = found.took_s if self._num_rounds[worker] >= LEAST_ROUNDS else None
        self.scheduler.hear(worker, now_s, pace_s)
        for key in found.finished:
            self._finish_s.setdefault(key, now_s)
        groups = []
        for ended in found.ended:
            groups += self._end(worker, ended, now_s)
        if not self._held[worker]:
            self._relieved.discard(worker)
        if found.ended:
            self._fill(worker, is_awaited=True)
        else:
            self.crew.give(worker, [])
        return groups

    def _end(self, worker: int, ended: Ended, now_s: float) -> list[int]:
        order, piece = ended.order, ended.piece
        since_s = self._held[worker].pop(order.key, now_s)
        counts = self.scheduler.end(worker, order, piece.num_chunks, is_done=piece.is_done, is_success=piece.is_success)
        if not counts:  # another worker was sooner
            return []
        self._bars.append((worker, order.key, order.from_chunk, since_s, now_s))
        self.records.add(piece)
        self._left[order.group] -= piece.is_done
        return [order.group] if not self._left[order.group] else []

    def _fill(self, worker: int, *, is_awaited: bool = False) -> None:
        """Give a worker what fills its places; one that has told of an end waits for an answer."""
        given = []
        if worker not in self._relieved and self.scheduler.num_waiting:
            now_s = time.perf_counter() - self._start_s
            if not is_awaited:
                self._since_s[worker] = now_s
            for order in self.scheduler.fill(worker):
                self._held[worker][order.key] = now_s
                self._num_moves += order.is_move
                given.append(Given(order, self.records.start_of(order)))
            if given:
                self.scheduler.hear(worker, now_s)  # its silence counts from here
                self.records.expect(self.scheduler.upcoming(NUM_EXPECTED) if self.records.has_tiers else ())
        if given or is_awaited:
            self.crew.give(worker, given)

    def _relieve(self) -> None:
        """Give to others what a silent worker holds, and, where others have nothing to do, what a slow one holds.

        Neither is interrupted: whoever ends a segment first has played it, and both play the same.
        """
        now_s = time.perf_counter() - self._start_s
        is_idle = not self.scheduler.num_waiting and any(
            not held and worker not in self.scheduler.lost for worker, held in enumerate(self._held)
        )
        for worker in self.scheduler.stragglers(now_s):
            if worker not in self._relieved and (is_idle or self.scheduler.is_silent(worker, now_s)):
                self._relieved.add(worker)
                self.num_reissued += self.scheduler.lose(worker, is_dead=False)

    def _group(self, number: int) -> PlayedGroup:
        keys = [(number, member) for member in range(self.config.num_members)]
        played = PlayedGroup(self.groups[number], tuple(self.records.whole(key) for key in keys))
        if self.has_own_store:
            for key in keys:
                self.records.forget(key)
        return played


def in_thread(found: Generator[PlayedGroup], stop: Callable[[], None]) -> Generator[PlayedGroup]:
    """Run a loop beside whoever takes what it yields, so that workers do not wait while a trainer learns."""
    yielded: SimpleQueue[PlayedGroup | BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            for group in found:
                yielded.put(group)
            yielded.put(None)
        except BaseException as error:  # raised again where the groups are taken
            yielded.put(error)

    thread = Thread(target=run, name="rollout", daemon=True)
    thread.start()
    try:
        while (group := yielded.get()) is not None:
            if isinstance(group, BaseException):
                raise group
            yield group
    finally:
        stop()
        thread.join()
