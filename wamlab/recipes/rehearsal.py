"""The demo's network with random weights on tabletops as rollout workers: what playing costs, without a trained run."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from wamlab.data.robot import short_name
from wamlab.data.views import canvas_of
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import tiny
from wamlab.recipes.session import begin, plan_from
from wamlab.rl.crew import Crew
from wamlab.rl.episode import Episode, plan_next
from wamlab.rl.play import Pace, PlayConfig, Rollout
from wamlab.rl.schedule import ScheduleConfig
from wamlab.rl.segments import Asked, Group, Planned, Setting, noise_generator
from wamlab.sim.vector import TabletopVector

FAMILIES = ("reach", "push", "pick_place", "stack")
SETTING = Setting(sampler="rehearsal")


class RandomWam:
    """Plans from pictures as the demo's trained network would; its noise is counted."""

    def __init__(self, worker: int = 0) -> None:
        self.bench = Workbench(tiny())
        torch.manual_seed(0)
        for p in self.bench.net.parameters():
            p.data.add_(0.02 * torch.randn_like(p))  # heads start at zero

    @torch.no_grad()
    def __call__(self, asked: Asked) -> Planned:
        """Return a block of actions for every episode."""
        seen, recipe = asked.observation, self.bench.recipe
        canvas = torch.from_numpy(canvas_of(seen.frames, recipe.robot)).to(self.bench.device)
        session = begin(self.bench, canvas, [recipe.robot.instruct(task) for task in seen.instructions])
        _, *shape = self.bench.encoder.video.latent_shape(1, *canvas.shape[1:3])
        shapes = (recipe.model.latents_per_block, *shape), (recipe.model.actions_per_block, recipe.model.max_action_dim)
        noise = (
            torch.from_numpy(
                np.stack([noise_generator(k, word).standard_normal(size, dtype=np.float32) for k in asked.keys])
            ).to(self.bench.device)
            for word, size in enumerate(shapes)
        )
        _, actions = plan_from(self.bench, session, torch.from_numpy(seen.state), tuple(noise))  # pyright: ignore[reportArgumentType]
        return Planned(actions.clamp(-1, 1).float().cpu().numpy())


def make_tabletop(task: str) -> TabletopVector:
    """Return one table as the demo sees it."""
    robot = tiny().robot
    size = (robot.view_height_px, robot.view_width_px)
    return TabletopVector(1, task, size=size, cameras=tuple(short_name(camera) for camera in robot.cameras))


def tabletop_groups(number: int) -> list[Group]:
    """Return groups of all task families."""
    return [Group(n, FAMILIES[n % 4], seed=n, cap=20) for n in range(number)]


def bare_cycles_s(act: RandomWam, num_groups: int, num_rows: int) -> list[float]:
    """Play group after group without any scheduler; return the time of every round in which all were playing."""
    found = []
    for group in tabletop_groups(num_groups):
        start_s = time.perf_counter()
        episodes = [Episode(make_tabletop(group.task), group, member, SETTING) for member in range(num_rows)]
        while len(playing := [episode for episode in episodes if not episode.is_done]) == num_rows:
            for episode, plan in zip(playing, plan_next(act, playing), strict=True):
                episode.execute(*plan)
            now_s = time.perf_counter()
            found.append(now_s - start_s)
            start_s = now_s
    return found


def scheduled_paces(crew: Crew, num_groups: int, num_rows: int) -> list[Pace]:
    """Play the same groups by a crew of one worker; return its rounds with all places taken."""
    config = PlayConfig(num_members=num_rows, schedule=ScheduleConfig(segment_chunks=8))
    rollout = Rollout(tabletop_groups(num_groups), SETTING, crew, config=config)
    for _ in rollout:
        pass
    return [pace for pace in rollout.paces if pace.num_rows == num_rows]


def chunk_latency_ratios(crew: Crew, act: RandomWam, num_pairs: int, *, num_groups: int = 4) -> dict[str, list[float]]:
    """Return what a round under the scheduler takes over what it would take, in alternating pairs after a warm-up.

    "own": over the policy and the environments in those very rounds, so that other load cancels; "paired": over the
    rounds of a bare loop in this process.
    """
    found: dict[str, list[float]] = {"own": [], "paired": []}
    for pair in range(num_pairs + 1):
        bare_s = bare_cycles_s(act, num_groups, crew.num_slots)
        paces = scheduled_paces(crew, num_groups, crew.num_slots)
        if pair:
            found["own"].append(sum(pace.cycle_s for pace in paces) / sum(pace.played_s for pace in paces))
            found["paired"].append(statistics.median(pace.cycle_s for pace in paces) / statistics.median(bare_s))
    return found
