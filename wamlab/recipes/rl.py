"""The parts of a post-training on the tabletop: what plays, what is learnt from it, how success is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from wamlab.data.robot import short_name
from wamlab.flow import solver_levels
from wamlab.model.lora import freeze
from wamlab.recipes.policy import WamPolicy
from wamlab.recipes.rl_config import RlRecipe
from wamlab.recipes.rl_examples import Build, finished, nft_example, policy_example
from wamlab.recipes.rl_policy import ChainPolicy
from wamlab.rl.batch_curve import BatchCurve
from wamlab.rl.flow_policy import FlowSde
from wamlab.rl.nft import follow, nft_loss
from wamlab.rl.objectives import PolicyTerms, policy_loss
from wamlab.rl.play import PlayConfig, PlayedGroup, Rollout, play
from wamlab.rl.segments import Group, Setting
from wamlab.rl.store import TieredStore
from wamlab.rl.stream import StreamedGroups, in_number_order
from wamlab.rl.update import FinishedGroup, check_ratios, joined
from wamlab.score.success import wilson_interval
from wamlab.sim.vector import TabletopVector
from wamlab.train import step_generator
from wamlab.types import Env, LossTerms, Samples


@dataclass
class RlBench:
    """The parts of a post-training: the policy that plays, and what learns from it."""

    recipe: RlRecipe
    start: WamPolicy  # its network is the one that is trained
    notes: dict[str, float] = field(default_factory=dict)  # of the newest iteration
    groups_learnt: list[FinishedGroup] = field(default_factory=list)  # of the newest iteration, as they came
    curve: BatchCurve = field(default_factory=BatchCurve)  # of the policy's calls, from iteration to iteration
    _num_unchecked: float = 0  # samples whose ratios must be 1, as no update has used them; without end in a stream

    def __post_init__(self) -> None:
        freeze(self.net, self.recipe.train.frozen)

    @property
    def net(self) -> nn.Module:
        return self.start.bench.net

    @property
    def device(self) -> torch.device:
        return self.start.bench.device

    @cached_property
    def old(self) -> nn.Module:
        """Return the network that played, as nft compares with it."""
        return deepcopy(self.net).requires_grad_(False)

    @cached_property
    def levels(self) -> list[float]:
        return solver_levels(self.recipe.num_sampler_steps, self.start.bench.recipe.noise.shift).tolist()

    @property
    def num_samples(self) -> int:
        """Return how many played chunks the newest iteration learns from."""
        return sum(len(group.example) for group in self.groups_learnt)

    def sde(self, noise_scale: float) -> FlowSde:
        """Return how denoising steps are drawn; without noise they follow the ODE."""
        return FlowSde(level_cap=self.levels[1] if len(self.levels) > 2 else 0.5, noise_scale=noise_scale)

    def policy(self, noise_scale: float) -> ChainPolicy:
        """Return the policy that plays, with as much exploration."""
        steps = self.recipe.explore.steps or None
        return ChainPolicy(self.start.bench, self.start.normalizers, self.sde(noise_scale), steps=steps)

    def make_env(self, task: str) -> Env:
        """Return one table of a task, "family split", as the policy's robot sees it."""
        robot = self.start.bench.recipe.robot
        return TabletopVector(
            1,
            *task.split(),
            size=(robot.view_height_px, robot.view_width_px),
            cameras=tuple(short_name(camera) for camera in robot.cameras),
            reward="dense" if self.recipe.reward.kind == "progress" else "sparse",
        )

    def groups(self, number: int, first_seed: int) -> list[Group]:
        """Return scenes with seeds from ``first_seed`` on, of the recipe's splits in turns."""
        family, splits = self.recipe.family, self.recipe.splits
        num_ticks = self.start.bench.recipe.model.actions_per_block
        blind = {split: TabletopVector(1, family, split, cameras=()) for split in splits}
        groups = []
        for index in range(number):
            split = splits[index % len(splits)]
            blind[split].reset(seed=[first_seed + index])  # a scene's time limit depends on its goals
            (most_ticks,) = blind[split].call("_max_episode_steps")
            groups.append(Group(index, f"{family} {split}", first_seed + index, cap=-(-most_ticks // num_ticks)))
        return groups

    def played_groups(self, iteration: int) -> list[Group]:
        """Return what an iteration plays."""
        return self.groups(self.recipe.num_groups, self.recipe.first_seed + iteration * self.recipe.num_groups)

    def play(self, iteration: int, store: TieredStore | None = None) -> Rollout:
        """Play an iteration, counted from 0, by the weights as they are; go on from what ``store`` has of it."""
        recipe, policy = self.recipe, self.policy(self.recipe.explore.noise_scale)
        groups = self.played_groups(iteration)
        setting = Setting(
            recipe.train.seed, iteration, iteration, policy.sampler,
            is_exact=recipe.is_exact, is_batch_chosen=recipe.is_batch_chosen,
        )  # fmt: skip
        return play(groups, setting, policy, self.make_env, config=recipe.play, store=store, curve=self.curve)

    def finish(self, played: PlayedGroup, iteration: int) -> FinishedGroup:
        """Return a played group's part of the update."""
        recipe = self.recipe
        build: Build = partial(policy_example, log_prob=recipe.policy.log_prob)
        if recipe.objective == "nft":
            steps = recipe.explore.steps or range(recipe.num_sampler_steps)
            visited = [self.levels[step] for step in steps]
            levels = torch.tensor(visited, dtype=torch.float64, device=self.device)
            build = partial(
                nft_example,
                config=recipe.nft,
                noise=self.start.bench.recipe.noise,
                generator=step_generator(
                    recipe.train.seed, iteration * recipe.num_groups + played.group.number, self.device
                ),
                levels=levels if recipe.nft_levels == "sampler" else None,
                num_draws=recipe.num_draws,
            )
        return finished(
            played,
            iteration,
            build,
            self.start.normalizers,
            self.device,
            reward=recipe.reward,
            config=recipe.group,
        )

    def loss(self, example: Any) -> LossTerms:
        """Return the objective's loss; before an iteration's first update ratios must be 1."""
        recipe = self.recipe
        if recipe.objective == "nft":
            terms: LossTerms = nft_loss(self.net, self.old, example, recipe.nft)
        else:
            terms = policy_loss(self.net, self.sde(recipe.explore.noise_scale), example, recipe.policy)
        if self._num_unchecked > 0:
            self._num_unchecked -= len(example)
            if isinstance(terms, PolicyTerms):
                check_ratios(terms)
                self.notes["ratio_error"] = max(self.notes["ratio_error"], terms.ratio_error.item())
        return terms

    def evaluate(self) -> dict[str, Any]:
        """Return the success on held-out scenes, without exploration, with its 95 % Wilson interval."""
        wanted = self.recipe.evaluation
        config = PlayConfig(num_members=1, num_slots=self.recipe.play.num_slots)
        policy = self.policy(0.0)
        groups = self.groups(wanted.num_episodes, wanted.first_seed)
        setting = Setting(self.recipe.train.seed, 0, 0, policy.sampler)
        played = play(groups, setting, policy, self.make_env, config=config)
        won = {p.group.number: int(p.segments[0].is_success) for p in played}
        ordered = [won[group.number] for group in groups]
        parts = {split: ordered[turn :: len(self.recipe.splits)] for turn, split in enumerate(self.recipe.splits)}
        low, high = wilson_interval(sum(ordered), len(ordered))
        return {
            "success": sum(ordered) / len(ordered),
            "low": low,
            "high": high,
            "by_split": {split: sum(own) / len(own) for split, own in parts.items() if own},
            "won": ordered,
        }

    def update_from(self, iteration: int, store: TieredStore | None = None) -> Samples:
        """Play an iteration by the weights as they are; return the example that its updates learn from.

        What ``store`` has of it is not played again.

        Raises InputError where no group had anything to say.
        """
        for _ in self._finished(iteration, store):
            pass  # they are noted
        example = joined(self.groups_learnt, iteration)
        self._num_unchecked = len(example)
        return example

    def stream_from(self, iteration: int, store: TieredStore | None = None) -> StreamedGroups:
        """Begin to play an iteration; return an example of the training loop that grows as groups finish.

        Exact play learns from them in the order of their numbers, so that a resumed iteration sums to the same bits.
        """
        groups = self._finished(iteration, store)
        if self.recipe.is_exact:
            groups = in_number_order(groups)
        self._num_unchecked = math.inf
        sizes = self.recipe.num_groups, iteration
        return StreamedGroups(groups, *sizes, parts_a_group=self.recipe.parts_a_group)

    def scale(self, example: Any) -> float:
        """Return by what ``train`` multiplies a step's sum: a stream is divided at its end, by what has come."""
        if not isinstance(example, StreamedGroups):
            return 1.0
        self._num_unchecked = 0
        return example.factor()

    def _finished(self, iteration: int, store: TieredStore | None) -> Iterator[FinishedGroup]:
        """Yield an iteration's groups as they finish; note how it went when the last one has."""
        start_s = time.perf_counter()
        if self.recipe.objective == "nft":
            follow(self.old, self.net, 0.0)
        self.groups_learnt, segments = [], []
        self.notes = {"ratio_error": 0.0}
        rollout = self.play(iteration, store)
        play_s = time.perf_counter() - start_s
        try:
            while True:
                start_s = time.perf_counter()
                played = next(rollout, None)
                play_s += time.perf_counter() - start_s
                if played is None:
                    break
                segments += played.segments
                self.groups_learnt.append(self.finish(played, iteration))
                yield self.groups_learnt[-1]
        finally:
            rollout.close()
        self.notes |= {
            "success": sum(segment.is_success for segment in segments) / len(segments),
            "num_episodes": len(segments),
            "num_chunks": sum(segment.num_chunks for segment in segments),
            "num_played": rollout.timeline.num_chunks,  # fewer after a kill
            "num_flat": sum(group.is_flat for group in self.groups_learnt),
            "play_s": play_s,  # until groups came: with other processes as workers, less than they took to play
        }
