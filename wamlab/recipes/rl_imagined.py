"""Post-training in imagination: episodes are played in the world model, success is measured on the real tabletop.

The world is a copy of the start's network, taught on its recordings to follow given actions and then frozen, so that
what the policy learns does not change what it plays in. Success is judged by a small head learnt from the recordings'
ends, or by likeness to the end of the recording that an episode began in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from safetensors.torch import load_file, save_file

from wamlab.data.clips import split_episodes
from wamlab.recipes.build import Workbench
from wamlab.recipes.imagined_parts import (
    Keyframes,
    fit_world,
    goal_judge,
    head_judge,
    read_endings,
    world_bench,
)
from wamlab.recipes.imagined_world import Judge, WamWorld
from wamlab.recipes.rl import RlBench
from wamlab.rl.segments import Group
from wamlab.score.success_head import SuccessHead, measure_head, read_head, train_head, write_head
from wamlab.sim.imagined import ImaginedVector, moved_pose
from wamlab.types import Env

IMAGINED = "imagined"  # the task of groups that are played in imagination
WORLD_FILE, HEAD_FILE = "world.safetensors", "success_head.safetensors"


@dataclass
class ImaginedBench(RlBench):
    """A post-training whose episodes are imagined."""

    folder: Path | None = None  # where world and head are kept, so that a resumed run plays in the same ones

    def make_env(self, task: str) -> Env:
        """Return a place in the world model, or for evaluation one table."""
        if task != IMAGINED:
            return super().make_env(task)
        wanted = self.recipe.imagine
        num_ticks = wanted.max_chunks * self.start.bench.recipe.model.actions_per_block
        return ImaginedVector(1, self.world, self.keyframes, max_ticks=num_ticks, threshold=wanted.threshold)

    def played_groups(self, iteration: int) -> list[Group]:
        """Return groups that begin at keyframes."""
        recipe = self.recipe
        first = recipe.first_seed + iteration * recipe.num_groups
        cap = recipe.imagine.max_chunks
        return [Group(number, IMAGINED, first + number, cap) for number in range(recipe.num_groups)]

    @cached_property
    def split(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the recordings that the start was trained on, and those it was not."""
        data = self.start.bench.recipe.data
        return split_episodes(self.start.bench.parts[0].dataset, data.held_out_fraction, 0)

    @cached_property
    def keyframes(self) -> Keyframes:
        """Return the recorded moments that episodes begin at: of training episodes alone."""
        robot = self.start.bench.recipe.robot
        return Keyframes(self.start.bench.parts[0].dataset, self.split[0], robot, self.recipe.imagine.keyframe_until)

    @cached_property
    def world(self) -> WamWorld:
        """Return the world model, taught or read."""
        wanted, bench = self.recipe.imagine, world_bench(self.start)
        path = None if self.folder is None else self.folder / WORLD_FILE
        if path is not None and path.exists():
            bench.net.load_state_dict(load_file(path))
        elif wanted.num_world_steps:
            fit_world(bench, wanted.num_world_steps, seed=self.recipe.train.seed)
        if path is not None and not path.exists():
            save_file({name: value.contiguous() for name, value in bench.net.state_dict().items()}, path)
        return WamWorld(bench, self.start.normalizers, self.judge, moved_pose, num_steps=wanted.num_sampler_steps)

    @cached_property
    def judge(self) -> Judge:
        """Return what says how much a picture looks like success."""
        encoder = self.start.bench.encoder
        return goal_judge(encoder) if self.recipe.imagine.judge == "goal" else head_judge(self.head, encoder)

    @cached_property
    def head(self) -> SuccessHead:
        """Return the success head, trained or read."""
        bench, wanted = self.start.bench, self.recipe.imagine
        robot = bench.recipe.robot
        head = SuccessHead(robot.canvas_height_px, robot.canvas_width_px, bench.recipe.text.dim)
        path = None if self.folder is None else self.folder / HEAD_FILE
        if path is not None and path.exists():
            return read_head(head, path).eval()
        dataset = bench.parts[0].dataset
        endings = read_endings(dataset, self.split[0][: wanted.num_head_episodes], robot, bench.encoder)
        train_head(head, endings, num_steps=wanted.num_head_steps, seed=self.recipe.train.seed)
        if path is not None:
            write_head(head, path)
        return head.eval()

    def measure_head(self) -> dict[str, float]:
        """Return how well the head does on held-out recordings, at the recipe's threshold."""
        bench, wanted = self.start.bench, self.recipe.imagine
        held_out = self.split[1][: wanted.num_head_episodes]
        endings = read_endings(bench.parts[0].dataset, held_out, bench.recipe.robot, bench.encoder, seed=1)
        return measure_head(self.head, endings, wanted.threshold)


def with_recordings(bench: Workbench, root: Path | None) -> None:
    """Let a run's recordings be elsewhere than where it was trained."""
    if root is not None:
        vars(bench)["recipe"] = replace(bench.recipe, data=replace(bench.recipe.data, root=root, roots=()))
