"""Who plays: several episodes at a time, a chunk of each a round, the policy asked once for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from wamlab.rl.batch_curve import BatchCurve
from wamlab.rl.episode import Episode, MakeEnv, plan_next, step_each
from wamlab.rl.jobs import JobKey, Order
from wamlab.rl.segments import Act, Arrays, Group, Segment, Setting
from wamlab.types import Env

ENVS_A_SLOT = 4  # kept: one plays, others rest, and those of other tasks are dear to make (a tabletop takes 12 ms)


@dataclass(frozen=True)
class Given:
    """An order, and the segment to go on from: None at an episode's start."""

    order: Order
    start: Segment | None = None


@dataclass(frozen=True)
class Ended:
    """An order that was played, and its segment with the chunks of this order alone."""

    order: Order
    piece: Segment


@dataclass(frozen=True)
class Round:
    """What a worker did between two looks at its orders."""

    ended: tuple[Ended, ...]
    finished: tuple[JobKey, ...]  # episodes that reached their end in it
    num_rows: int  # episodes in the policy's batch
    num_chunks: int  # played; less than the rows where finished episodes are held
    took_s: float  # wall time of all of it
    played_s: float  # of that in beginning episodes, in the policy and in environments: any loop would spend it
    policy_s: float  # of that in the policy


@dataclass
class _Place:
    episode: Episode
    order: Order
    num_rounds: int = 0
    ended: Ended | None = None  # of a finished episode whose place is held

    @property
    def is_over(self) -> bool:
        if self.num_rounds < self.order.hold_chunks:
            return False
        return self.episode.is_done or self.episode.num_chunks - self.order.from_chunk >= self.order.max_chunks


class Worker:
    """Plays orders of one iteration at a time, in any process."""

    def __init__(self, act: Act, make_env: MakeEnv, num_slots: int, curve: BatchCurve | None = None) -> None:
        """Take what plans and what is played in; workers of one process may share what they measure of calls."""
        self.curve = curve or BatchCurve()
        self.act, self.make_env, self.num_slots = act, make_env, num_slots
        self.places: dict[JobKey, _Place] = {}
        self._resting: dict[JobKey, Episode] = {}  # went back to the queue; goes on here without restoring
        self._free: dict[str, list[Env]] = {}
        self._num_envs = 0
        self._given_s = self._begun_s = 0.0  # spent on new orders since the last round

    def begin(self, groups: Mapping[int, Group], setting: Setting) -> None:
        """Begin an iteration; what was played of another is forgotten."""
        self.drop(list(self.places))
        for key in list(self._resting):
            self._rest(key)
        self.groups, self.setting = groups, setting

    def give(self, given: Iterable[Given]) -> None:
        """Take orders; their episodes are part of the next round."""
        first_s = time.perf_counter()
        for item in given:
            start_s = time.perf_counter()
            key = item.order.key
            self.drop([key])  # a later order for it makes an earlier one void
            episode = self._resting.pop(key, None)
            if episode is None or episode.num_chunks != item.order.from_chunk:
                if episode is not None:
                    self._put_back(episode)
                group = self.groups[item.order.group]
                episode = Episode(self._env(group.task), group, item.order.member, self.setting, item.start)
            self.places[key] = _Place(episode, item.order)
            if item.start is None:
                self._begun_s += time.perf_counter() - start_s
        self._given_s += time.perf_counter() - first_s

    def drop(self, keys: Sequence[JobKey]) -> None:
        """Stop playing some episodes, without a word about them."""
        for key in keys:
            place = self.places.pop(key, None)
            if place is not None:
                self._put_back(place.episode)

    def play_round(self) -> Round:
        """Play one chunk of every episode held; say which orders have ended."""
        start_s, places = time.perf_counter(), list(self.places.values())
        plans = [plan for batch in self._batches(places) for plan in self._planned([p.episode for p in batch])]
        policy_s = time.perf_counter() - start_s
        ended, finished, num_chunks, played_s = [], [], 0, policy_s + self._begun_s
        before_s = time.perf_counter()
        live = [
            (place.episode, plan[0]) for place, plan in zip(places, plans, strict=True) if not place.episode.is_done
        ]
        results = iter(step_each(*zip(*live, strict=True), is_joint=not self.setting.is_exact) if live else ())
        played_s += time.perf_counter() - before_s
        for place, plan in zip(places, plans, strict=True):
            episode = place.episode
            place.num_rounds += 1
            if not episode.is_done:
                episode.note(*plan, next(results))
                num_chunks += 1
                if episode.is_done:
                    finished.append(episode.key)
                    place.ended = Ended(place.order, episode.cut())
            if place.is_over:
                ended.append(place.ended or Ended(place.order, episode.cut()))
                del self.places[episode.key]
                if episode.is_done:
                    self._put_back(episode)
                else:
                    self._resting[episode.key] = episode
        while len(self._resting) > self.num_slots:
            self._rest(next(iter(self._resting)))
        took_s = time.perf_counter() - start_s + self._given_s
        self._given_s = self._begun_s = 0.0
        return Round(tuple(ended), tuple(finished), len(places), num_chunks, took_s, played_s, policy_s)

    def _batches(self, places: list[_Place]) -> list[list[_Place]]:
        """Cut a round into calls of the policy."""
        if self.setting.is_exact or not places:
            return [[place] for place in places]
        if not self.setting.is_batch_chosen:
            return [places]
        rest = iter(places)
        return [list(islice(rest, size)) for size in self.curve.cut(len(places))]

    def _planned(self, episodes: list[Episode]) -> list[tuple[np.ndarray, Arrays, Arrays]]:
        start_s = time.perf_counter()
        plans = plan_next(self.act, episodes)
        if self.setting.is_batch_chosen:
            self.curve.add(len(episodes), time.perf_counter() - start_s)
        return plans

    def _rest(self, key: JobKey) -> None:
        self._put_back(self._resting.pop(key))

    def _put_back(self, episode: Episode) -> None:
        self._free.setdefault(episode.group.task, []).append(episode.env)

    def _env(self, task: str) -> Env:
        """Return an environment that nobody plays in; those of other tasks make room where there are many."""
        if self._free.get(task):
            return self._free[task].pop()
        if self._num_envs >= ENVS_A_SLOT * self.num_slots:
            for free in self._free.values():
                if free:
                    close = getattr(free.pop(), "close", None)
                    if close is not None:
                        close()
                    self._num_envs -= 1
                    break
        self._num_envs += 1
        return self.make_env(task)
