"""Whole iterations of post-training by worker processes, episodes of drawn lengths: what a way of playing is worth.

Network, tables, segments, weights handed over and the update are real. Only when an episode ends is drawn, within the
tables' own time limits, since an untrained network ends none early: ways to play then have the same episodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wamlab.data.normalize import Normalizers, Quantiles
from wamlab.recipes.policy import WamPolicy
from wamlab.recipes.rehearsal import FAMILIES, RandomWam, make_tabletop
from wamlab.recipes.rl import RlBench
from wamlab.recipes.rl_config import RlRecipe, rl_tabletop_grpo
from wamlab.recipes.rl_examples import RewardConfig
from wamlab.rl.length_models import LengthModel, Lengths, draw_lengths
from wamlab.rl.play import PlayConfig, Rollout
from wamlab.rl.process_workers import ProcessCrew
from wamlab.rl.segments import Asked, Group, Planned, Setting
from wamlab.rl.store import TieredStore
from wamlab.sim.scene import TICKS_PER_GOAL
from wamlab.sim.vector import TabletopVector
from wamlab.train import make_optimizer, train
from wamlab.types import StepRecord

CHUNK_TICKS = 4
LIMITS = tuple(TICKS_PER_GOAL[family] for family in FAMILIES)
TABLETOP = LengthModel("tabletop", LIMITS, tuple(0.37 * ticks for ticks in LIMITS), 0.7, CHUNK_TICKS)
NUM_STEPS = 2  # of the sampler
GOES_ON, SUCCEEDS, FAILS = 0.0, 1.0, 2.0  # what a planned chunk leads to, behind its actions


@dataclass(frozen=True)
class WayToPlay:
    """What differs between the iterations that are compared."""

    rule: str = "context"
    is_prefix_shared: bool = True
    is_streamed: bool = False  # learn from groups while others are still played; else from all at the end


class EndingTable:
    """A table whose episode ends when the plan says so."""

    num_envs = 1

    def __init__(self, task: str) -> None:
        self.table: TabletopVector = make_tabletop(task)
        self.is_done, self.is_success = np.zeros(1, bool), np.zeros(1, bool)

    @property
    def instructions(self) -> list[str]:
        """Return the table's."""
        return self.table.instructions

    def reset(self, *, seed: Any = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Begin an episode."""
        self.is_done, self.is_success = np.zeros(1, bool), np.zeros(1, bool)
        return self.table.reset(seed=[seed])

    def chunk_step(self, actions: np.ndarray, /) -> tuple[Any, ...]:
        """Execute all columns but the last, which tells of the end."""
        found = self.table.chunk_step(actions[..., :-1])
        self.is_done, self.is_success = actions[:, -1, -1] != GOES_ON, actions[:, -1, -1] == SUCCEEDS
        return found

    def snapshot(self, row: int, /) -> Any:
        """Return the table's."""
        return self.table.snapshot(row)

    def restore(self, row: int, snapshot: Any, /) -> None:
        """Go on from a table's."""
        self.is_done, self.is_success = np.zeros(1, bool), np.zeros(1, bool)
        self.table.restore(row, snapshot)

    def observe(self) -> Mapping[str, Any]:
        """Return what the table shows."""
        return self.table.observe()


@lru_cache(maxsize=8)
def lengths_of(iteration: int, num_groups: int, num_members: int) -> Lengths:
    """Draw an iteration's lengths: the same in every process."""
    return draw_lengths(TABLETOP, num_groups, num_members, seed=iteration)


def open_start() -> WamPolicy:
    """Return the demo's network with random weights, the same in every process."""
    bench = RandomWam().bench
    recipe = replace(bench.recipe, sampler=replace(bench.recipe.sampler, num_steps=NUM_STEPS))
    ours = type(bench)(recipe)
    ours.net.load_state_dict(bench.net.state_dict())
    one = np.ones(recipe.robot.max_action_dim)
    zero = np.zeros(recipe.robot.max_state_dim)
    return WamPolicy(ours, Normalizers(Quantiles(-one, one), Quantiles(zero, zero + 1), (), len(one), len(zero)))


class EndingPolicy:
    """Plans chunks with their denoising chains, and says which of them ends its episode."""

    def __init__(self, way: WayToPlay, num_groups: int, num_members: int, worker: int = 0) -> None:
        self.start, self.size = open_start(), (num_groups, num_members)
        recipe = _recipe(way, num_groups, num_members, 1)
        self.policy = RlBench(recipe, self.start).policy(recipe.explore.noise_scale)
        self.policy.prefixes.is_shared = way.is_prefix_shared

    def __call__(self, asked: Asked) -> Planned:
        """Return a chunk of every episode; its last column tells of the end."""
        planned = self.policy(asked)
        ending = np.zeros((*planned.actions.shape[:2], 1), planned.actions.dtype)
        for row, (_, iteration, group, member, chunk) in enumerate(asked.keys.tolist()):
            drawn = lengths_of(iteration, *self.size)
            if chunk + 1 == drawn.lengths[group, member]:
                ending[row, -1] = SUCCEEDS if drawn.is_success[group, member] else FAILS
        return replace(planned, actions=np.concatenate([planned.actions.clip(-1, 1), ending], axis=-1))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Play by these from now on."""
        self.start.bench.net.load_state_dict(weights)


@dataclass
class CrewBench(RlBench):
    """A post-training whose episodes are played by a crew."""

    crew: ProcessCrew | None = None
    rollout: Rollout | None = None  # the newest
    load_s: float = 0.0  # spent on handing its weights over

    def play(self, iteration: int, store: TieredStore | None = None) -> Rollout:
        """Hand the weights over and play."""
        assert self.crew is not None
        start_s = time.perf_counter()
        self.crew.load(self.net.state_dict(), iteration)
        self.load_s = time.perf_counter() - start_s
        recipe = self.recipe
        drawn = lengths_of(iteration, recipe.num_groups, recipe.play.num_members)
        groups = [
            Group(number, FAMILIES[task], seed=1000 * iteration + number, cap=int(drawn.caps[number]))
            for number, task in enumerate(drawn.tasks)
        ]
        setting = Setting(recipe.train.seed, iteration, iteration, "chains")
        self.rollout = Rollout(groups, setting, self.crew, config=recipe.play, store=store)
        return self.rollout


@dataclass(frozen=True)
class Iteration:
    """What one iteration took, and how its rollout went."""

    total_s: float
    rollout_s: float  # until the last episode ended
    tail_s: float
    busy: float  # share of the workers' time
    load_s: float
    update_s: float  # without waiting for groups: forward, backward and optimiser, beside playing where streamed
    num_rows: float  # mean of the policy's batches
    num_chunks: int


class Trainer:
    """One post-training, iteration by iteration, by worker processes of its own; use it as a context."""

    def __init__(
        self, way: WayToPlay, *, num_groups: int, num_members: int, num_workers: int, num_slots: int, most: int
    ) -> None:
        """Prepare at most ``most`` iterations."""
        self.is_streamed = way.is_streamed
        make = partial(EndingPolicy, way, num_groups, num_members)
        self.crew = ProcessCrew(make, EndingTable, num_workers=num_workers, num_slots=num_slots)
        self.bench = CrewBench(_recipe(way, num_groups, num_members, most), open_start(), crew=self.crew)
        self._records: Iterator[StepRecord] = self._train()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.crew.close()

    def iterate(self) -> Iteration:
        """Play, learn and step once."""
        start_s = time.perf_counter()
        next(self._records)
        total_s = time.perf_counter() - start_s
        rollout = self.bench.rollout
        assert rollout is not None
        timeline, rows = rollout.timeline, [pace.num_rows for pace in rollout.paces]
        played_s = self.bench.notes["play_s"]
        return Iteration(
            total_s,
            timeline.makespan_s,
            timeline.tail_s,
            timeline.utilisation,
            self.bench.load_s,
            total_s - played_s,
            float(np.mean(rows)),
            timeline.num_chunks,
        )

    def _train(self) -> Iterator[StepRecord]:
        bench = self.bench
        config, begin = bench.recipe.train, bench.update_from
        if self.is_streamed:
            config, begin = bench.recipe.streamed_train, bench.stream_from
        examples = (begin(iteration) for iteration in range(bench.recipe.num_iterations))
        return train(bench.loss, examples, make_optimizer(bench.net, config), config, scale=bench.scale)


def _recipe(way: WayToPlay, num_groups: int, num_members: int, most: int) -> RlRecipe:
    recipe = rl_tabletop_grpo()
    train_config = replace(recipe.train, num_steps=most)
    play = PlayConfig(rule=way.rule, num_members=num_members)
    return replace(
        recipe, num_groups=num_groups, reward=RewardConfig("success"), play=play, train=train_config,
        num_sampler_steps=NUM_STEPS,
    )  # fmt: skip


def compare(slow: WayToPlay, fast: WayToPlay, num_pairs: int, **sizes: int) -> list[tuple[Iteration, Iteration]]:
    """Take the same iterations in both ways in turns, after one of each to warm up; who goes first changes."""
    pairs, num_threads = [], torch.get_num_threads()
    torch.set_num_threads(sizes["num_workers"])  # the workers wait while the trainer learns
    try:
        with Trainer(slow, most=num_pairs + 1, **sizes) as one, Trainer(fast, most=num_pairs + 1, **sizes) as other:
            for turn in range(num_pairs + 1):
                order = (one, other) if turn % 2 else (other, one)
                found = {id(trainer): trainer.iterate() for trainer in order}
                if turn:
                    pairs.append((found[id(one)], found[id(other)]))
    finally:
        torch.set_num_threads(num_threads)
    return pairs
