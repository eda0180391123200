"""A run's policy in closed loop, on the tabletop or a simulator: tasks, execution modes, films of failures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.data.encode import VideoConfig, VideoWriter
from wamlab.data.robot import RobotConfig
from wamlab.data.views import canvas_of
from wamlab.recipes.environments import TABLETOP, make_env, tasks_of
from wamlab.recipes.history import HistoryPolicy
from wamlab.recipes.look_ahead import LookAhead
from wamlab.score.closed_loop import ClosedLoop, PlayedEpisode, measure_latency, percentiles_ms, play_closed_loop
from wamlab.score.success import observe
from wamlab.sim.adapters import AdaptedVector
from wamlab.sim.vector import TabletopVector

MIN_FILM_PX = 192  # height of a film's frames, which are enlarged by a whole factor
FILM_TAIL_S = 0.7  # that a film rests on its last frame


@dataclass(frozen=True)
class PlayOrder:
    """What to play: where, families of tasks, episodes of each, the ticks of a chunk that are executed.

    A chunk of which only some ticks are executed stands for a whole block in a policy's history, its frames repeated,
    and one of a single tick begins anew.
    """

    families: tuple[str, ...] = ("reach",)
    num_episodes: int = 100  # of each family
    seed: int = 1_000_000  # of the first; recordings use small ones
    num_executed: int | None = None  # ticks of a chunk before the next is asked for; None: all
    num_videos: int = 6
    num_envs: int = 50
    env: str = TABLETOP  # or a simulator with its task, such as "metaworld:reach-v3"

    def __post_init__(self) -> None:
        tasks_of(self.env, self.families)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return what is played: families, or the one task of a simulator."""
        return tasks_of(self.env, self.families)

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.num_episodes)


class Filmed:
    """An environment with films that keeps every tick's pictures; plays like the one it holds."""

    def __init__(self, env: TabletopVector | AdaptedVector, robot: RobotConfig) -> None:
        self.env, self.robot, self.num_envs = env, robot, env.num_envs
        self.films: list[list[np.ndarray]] = []

    @property
    def instructions(self) -> list[str]:
        return self.env.instructions

    @property
    def is_done(self) -> np.ndarray:
        return self.env.is_done

    @property
    def is_success(self) -> np.ndarray:
        return self.env.is_success

    def reset(self, *, seed: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        raw, infos = self.env.reset(seed=seed)
        self.films = [[frame] for frame in canvas_of(raw["pixels"], self.robot)]
        return raw, infos

    def chunk_step(self, actions: np.ndarray) -> tuple[Any, ...]:
        found = self.env.chunk_step(actions)
        for row, film in enumerate(found[-1]["films"]):
            self.films[row] += list(canvas_of(film, self.robot))
        return found


def play_tasks(policy: HistoryPolicy, order: PlayOrder, *, is_asynchronous: bool = False) -> dict[str, ClosedLoop]:
    """Play every task, with the same seeds and noise for every policy; executed synchronously or not."""
    ahead = LookAhead(policy, order.num_executed) if is_asynchronous else None
    played = {}
    for task in order.tasks:
        policy.forget()
        with closing(make_env(policy, task, min(order.num_envs, order.num_episodes))) as env:
            played[task] = play_closed_loop(
                env, policy, order.seeds, task=task, num_executed=order.num_executed, ahead=ahead
            )
    policy.forget()
    return played


def measure_one_robot(policy: HistoryPolicy, order: PlayOrder, num_calls: int = 40) -> dict[str, Any]:
    """Return a single robot's latency and pause a chunk, executed synchronously and asynchronously.

    A policy with history goes on with one episode, from a window that is full.
    """
    ahead, num_ticks = LookAhead(policy, order.num_executed), policy.bench.recipe.window.actions_per_block
    with closing(make_env(policy, order.tasks[0], 1)) as env:
        seen = observe(env.reset(seed=[order.seed])[0], env.instructions, np.array([order.seed]))
        if policy.has_history:
            *_, infos = env.chunk_step(np.zeros((1, num_ticks, policy.normalizers.num_actions), np.float32))
            seen = replace(seen, films=infos["films"])
    chunk_ms = 1000 * ahead.num_executed / env.control_hz
    num_warmup = 2 + policy.bench.recipe.window.max_blocks
    found: dict[str, Any] = {"chunk_ms": chunk_ms, "num_calls": num_calls}
    for name, call in (("synchronous", policy), ("asynchronous", ahead)):
        latency = percentiles_ms(measure_latency(call, seen, num_calls, num_warmup))
        pause_ms = latency["p50"] if call is policy else max(0.0, latency["p50"] - chunk_ms)
        found[name] = {"latency_ms": latency, "pause_ms": pause_ms}
    return found


def film_episodes(
    policy: HistoryPolicy, played: Mapping[str, ClosedLoop], order: PlayOrder, folder: Path
) -> list[dict[str, Any]]:
    """Play some episodes again, failures first, and write each as mp4; return what each shows.

    One is played alone, with the noise it had: rounding may differ from the batch it was in, so its end is noted anew.
    """
    folder.mkdir(exist_ok=True)
    for old in folder.glob("episode_*.mp4"):
        old.unlink()
    robot, shown = policy.bench.recipe.robot, []
    for episode in choose_films(played, order.num_videos):
        policy.forget()
        with closing(make_env(policy, episode.task, 1, has_films=True)) as shown_env:
            env = Filmed(shown_env, robot)
            again = play_closed_loop(env, policy, [episode.seed], task=episode.task, num_executed=order.num_executed)
        seen = again.episodes[0]
        word = "success" if seen.is_success else "failure"
        task = re.sub(r"[^\w-]+", "_", episode.task)
        path = folder / f"episode_{len(shown):02d}_{task}_{word}.mp4"
        write_film(path, env.films[0], shown_env.control_hz)
        shown.append(
            {
                "file": f"{folder.name}/{path.name}", "task": seen.task, "seed": seen.seed, "ticks": seen.num_ticks,
                "instruction": seen.instruction, "is_success": seen.is_success,
            }
        )  # fmt: skip
    return shown


def choose_films(played: Mapping[str, ClosedLoop], num_videos: int) -> list[PlayedEpisode]:
    """Choose failures of all families in turn, then successes."""
    chosen: list[PlayedEpisode] = []
    for is_success in (False, True):
        lists = [[e for e in loop.episodes if e.is_success == is_success] for loop in played.values()]
        for place in range(max(map(len, lists), default=0)):
            chosen += [episodes[place] for episodes in lists if place < len(episodes)]
    num_failures = sum(not episode.is_success for episode in chosen)
    last = chosen[num_failures : num_failures + 1]  # a success to hold beside them, where there is one
    return (chosen[: max(0, min(num_failures, num_videos - len(last)))] + chosen[num_failures:])[:num_videos]


def write_film(path: Path, frames: Sequence[np.ndarray], fps: float) -> None:
    """Write frames [h w 3] as an mp4 of even size that any browser plays."""
    factor = -(-MIN_FILM_PX // frames[0].shape[0])
    height, width = (side * factor // 2 * 2 for side in frames[0].shape[:2])
    writer = VideoWriter(path, fps, height, width, VideoConfig(crf=23))
    rest = [frames[-1]] * round(FILM_TAIL_S * fps)
    for frame in [*frames, *rest]:
        writer.append(np.repeat(np.repeat(frame, factor, 0), factor, 1)[None, :height, :width])
    writer.close()
