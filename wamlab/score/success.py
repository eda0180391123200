"""Closed-loop success: play episodes with a policy and count."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wamlab.types import Env, Observation, Policy


@dataclass(frozen=True)
class EpisodeResult:
    """How one closed-loop episode ended."""

    seed: int
    instruction: str
    is_success: bool
    num_chunks: int  # policy calls until it ended


@dataclass(frozen=True)
class SuccessRate:
    """A success rate with its 95 % Wilson interval and what the policy cost."""

    num_episodes: int
    num_successes: int
    low: float
    high: float
    latency_s: float  # median wall time of one policy call for all parallel sessions
    episodes: tuple[EpisodeResult, ...]

    @property
    def rate(self) -> float:
        return self.num_successes / self.num_episodes

    def __str__(self) -> str:
        return f"{self.rate:.0%} of {self.num_episodes} ({self.low:.0%} to {self.high:.0%})"


def wilson_interval(num_successes: int, num_trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the score interval of a proportion (Wilson 1927); it stays inside 0..1 also at the ends."""
    rate = num_successes / num_trials
    centre = rate + z * z / (2 * num_trials)
    spread = z * math.sqrt(rate * (1 - rate) / num_trials + z * z / (4 * num_trials**2))
    scale = 1 + z * z / num_trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def measure_success(env: Env, policy: Policy, seeds: Sequence[int]) -> SuccessRate:
    """Play one episode a seed, as many at a time as the environment has places, until each has ended.

    Where the infos of its steps have "films", a film a row of what the last chunk showed, the policy gets them too.
    """
    episodes: list[EpisodeResult] = []
    latencies_s: list[float] = []
    for start in range(0, len(seeds), env.num_envs):
        group = list(seeds[start : start + env.num_envs])
        padded = group + [group[-1]] * (env.num_envs - len(group))  # the last group may be smaller
        raw, _ = env.reset(seed=padded)
        instructions = list(env.instructions)
        num_chunks = np.zeros(env.num_envs, dtype=int)
        films: Sequence[Mapping[str, np.ndarray]] = ()
        while not env.is_done.all():
            num_chunks += ~env.is_done
            observation = observe(raw, instructions, np.arange(start, start + env.num_envs), films)
            start_s = time.perf_counter()
            actions = policy(observation)
            latencies_s.append(time.perf_counter() - start_s)
            raw, *_, infos = env.chunk_step(actions)
            films = infos.get("films", ())
        episodes += [
            EpisodeResult(seed, instructions[i], bool(env.is_success[i]), int(num_chunks[i]))
            for i, seed in enumerate(group)
        ]
    num_successes = sum(episode.is_success for episode in episodes)
    low, high = wilson_interval(num_successes, len(episodes))
    return SuccessRate(len(episodes), num_successes, low, high, float(np.median(latencies_s)), tuple(episodes))


def observe(
    raw: Mapping[str, Any],
    instructions: Sequence[str],
    session: np.ndarray,
    films: Sequence[Mapping[str, np.ndarray]] = (),
) -> Observation:
    """Turn an environment's batched observation into what a policy sees."""
    return Observation(
        frames=raw["pixels"], state=raw["agent_pos"], instructions=instructions, session=session, films=films
    )
