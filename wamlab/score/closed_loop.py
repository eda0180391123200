"""Closed-loop episodes: a policy asked chunk after chunk, or ahead of time while the last chunk is played."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wamlab.errors import InputError
from wamlab.score.success import wilson_interval
from wamlab.types import Env, Observation, Policy

Films = Sequence[Mapping[str, np.ndarray]]  # a row each: camera -> [t h w 3]


@dataclass(frozen=True)
class PlayedEpisode:
    """How one episode ended."""

    seed: int
    task: str
    instruction: str
    is_success: bool
    num_ticks: int  # executed
    num_calls: int  # of the policy


@dataclass(frozen=True)
class ClosedLoop:
    """Played episodes with what the policy cost; ``num_executed`` ticks of every chunk were played."""

    episodes: tuple[PlayedEpisode, ...]
    num_executed: int
    is_asynchronous: bool
    latencies_s: tuple[float, ...]  # of every policy call, for as many sessions as still played
    waits_s: tuple[float, ...]  # that the environment stood still before each chunk

    @cached_property
    def num_successes(self) -> int:
        return sum(episode.is_success for episode in self.episodes)

    @property
    def rate(self) -> float:
        return self.num_successes / len(self.episodes)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % Wilson interval of the success rate."""
        return wilson_interval(self.num_successes, len(self.episodes))

    @property
    def is_success(self) -> np.ndarray:
        """Return each episode's success, in the order of the seeds; pairs with another policy's on the same ones."""
        return np.array([episode.is_success for episode in self.episodes])

    @property
    def ticks_to_success(self) -> np.ndarray:
        """Return how long the successful episodes took."""
        return np.array([episode.num_ticks for episode in self.episodes if episode.is_success], dtype=float)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.rate:.0%} of {len(self.episodes)} ({low:.0%} to {high:.0%})"


def play_closed_loop(
    env: Env,
    policy: Policy,
    seeds: Sequence[int],
    *,
    task: str = "",
    num_executed: int | None = None,
    ahead: Policy | None = None,
) -> ClosedLoop:
    """Play one episode a seed, ``num_executed`` ticks of every chunk (None: all) before the next.

    ``policy`` and ``ahead`` get the rows that still play, their seeds as sessions, and no finished one. With
    ``ahead`` execution is asynchronous: while a chunk plays it is asked, with what was seen as the chunk began, for
    the chunk after it (``num_executed`` ticks). The environment's step must return infos with "num_ticks" [b] last;
    where they have "films", a film a row of what its last chunk showed, the policy gets them beside the newest frame.
    Raises InputError for chunks shorter than ``num_executed``.
    """
    if not len(seeds):
        raise InputError("there are no episodes to play: give at least one seed")
    clock = _Clock()
    episodes: list[PlayedEpisode] = []
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as executor:
        for start in range(0, len(seeds), env.num_envs):
            group = list(seeds[start : start + env.num_envs])
            episodes += _play_group(env, policy, group, task, num_executed, ahead, executor, clock)
    executed = num_executed or clock.chunk_ticks
    return ClosedLoop(tuple(episodes), executed, ahead is not None, tuple(clock.latencies_s), tuple(clock.waits_s))


def percentiles_ms(latencies_s: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentile in milliseconds."""
    return {f"p{p}": 1000 * float(np.percentile(latencies_s, p)) for p in (50, 90, 99)}


def measure_latency(policy: Policy, observation: Observation, num_calls: int = 40, num_warmup: int = 3) -> list[float]:
    """Return the wall seconds of calls with one observation, after a warm-up."""
    for _ in range(num_warmup):
        policy(observation)
    found = []
    for _ in range(num_calls):
        start_s = time.perf_counter()
        policy(observation)
        found.append(time.perf_counter() - start_s)
    return found


class _Clock:
    """What calls took and how long environments waited for them."""

    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self.waits_s: list[float] = []
        self.chunk_ticks = 0

    def timed(self, policy: Policy, observation: Observation) -> np.ndarray:
        start_s = time.perf_counter()
        actions = policy(observation)
        self.latencies_s.append(time.perf_counter() - start_s)
        return actions

    def waited(self, ask: Callable[[], np.ndarray]) -> np.ndarray:
        start_s = time.perf_counter()
        actions = ask()
        self.waits_s.append(time.perf_counter() - start_s)
        return actions


def _play_group(
    env: Env,
    policy: Policy,
    group: list[int],
    task: str,
    num_executed: int | None,
    ahead: Policy | None,
    executor: ThreadPoolExecutor,
    clock: _Clock,
) -> list[PlayedEpisode]:
    seeds = np.array(group + [group[-1]] * (env.num_envs - len(group)))  # the last group may be smaller
    raw = env.reset(seed=seeds.tolist())[0]
    instructions = [str(instruction) for instruction in env.instructions]
    num_ticks, num_calls = np.zeros((2, env.num_envs), dtype=int)
    is_playing = (np.arange(env.num_envs) < len(group)) & ~env.is_done
    chunk: np.ndarray | None = None
    films: Films = ()
    while is_playing.any():
        rows = np.flatnonzero(is_playing)
        seen = observe_rows(raw, instructions, seeds, rows, films)
        if chunk is None or ahead is None:
            chunk = clock.waited(lambda seen=seen: _cut(clock.timed(policy, seen), num_executed))
            num_calls[rows] += 1
        clock.chunk_ticks = chunk.shape[1]
        following = None if ahead is None else executor.submit(clock.timed, ahead, seen)
        everyone = np.zeros((env.num_envs, *chunk.shape[1:]), np.float32)
        everyone[rows] = chunk
        raw, *_, infos = env.chunk_step(everyone)
        films = infos.get("films", ())
        num_ticks[rows] += infos["num_ticks"][rows]
        is_playing &= ~env.is_done
        if following is not None:
            found = clock.waited(lambda following=following: _cut(following.result(), num_executed))
            num_calls[rows] += 1
            chunk = found[is_playing[rows]]
    return [
        PlayedEpisode(seed, task, instructions[i], bool(env.is_success[i]), int(num_ticks[i]), int(num_calls[i]))
        for i, seed in enumerate(group)
    ]


def observe_rows(
    raw: Any, instructions: Sequence[str], sessions: np.ndarray, rows: np.ndarray, films: Films = ()
) -> Observation:
    """Turn some rows of an environment's batched observation, and of its films, into what a policy sees."""
    return Observation(
        frames={camera: views[rows] for camera, views in raw["pixels"].items()},
        state=np.asarray(raw["agent_pos"])[rows],
        instructions=[instructions[int(row)] for row in rows],
        session=sessions[rows],
        films=[films[int(row)] for row in rows] if films else (),
    )


def _cut(chunk: np.ndarray, num_executed: int | None) -> np.ndarray:
    if num_executed is None:
        return chunk
    if not 1 <= num_executed <= chunk.shape[1]:
        raise InputError(f"{num_executed} ticks of a chunk of {chunk.shape[1]} cannot be executed: give 1 to that many")
    return chunk[:, :num_executed]
