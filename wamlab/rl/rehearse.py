"""Episodes of known lengths on real workers: to hold the simulator against the engine, or to try a schedule.

Policy and environment only spend the time that a service model says, asleep or computing; everything else is real.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from wamlab.errors import InputError
from wamlab.rl.crew import Crew
from wamlab.rl.jobs import WorkerLimits
from wamlab.rl.length_models import Lengths
from wamlab.rl.play import Pace, PlayConfig, Rollout
from wamlab.rl.rules import RULES
from wamlab.rl.segments import Asked, Group, Planned, Setting
from wamlab.rl.service import Service, fit_service
from wamlab.rl.simulate import Timeline, env_times_s, simulate

UNIT_S = 0.001  # about what one unit of computing takes
GOES_ON, SUCCEEDS, FAILS = 0.0, 1.0, 2.0


class RehearsalEnv:
    """An environment of one place that sleeps as long as it is told, and ends when it is told."""

    num_envs = 1

    def __init__(self, task: str) -> None:
        self.instructions = [task]
        self.is_done, self.is_success = np.zeros(1, bool), np.zeros(1, bool)

    def reset(self, *, seed: Any = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Begin an episode."""
        self.is_done, self.is_success = np.zeros(1, bool), np.zeros(1, bool)
        return self.observe(), {}

    def chunk_step(self, actions: np.ndarray, /) -> tuple[Any, ...]:
        """Spend ``actions[0, 0, 0]`` seconds; end as ``actions[0, 0, 1]`` says."""
        time.sleep(actions[0, 0, 0])
        self.is_done, self.is_success = actions[0, :1, 1] != GOES_ON, actions[0, :1, 1] == SUCCEEDS
        infos = {"num_ticks": np.ones(1, int)}
        return self.observe(), self.is_success[None].astype(float), self.is_done, np.zeros(1, bool), infos

    def observe(self) -> Mapping[str, Any]:
        """Return nothing to see."""
        return {"agent_pos": np.zeros((1, 1), np.float32), "pixels": {}}

    def snapshot(self, row: int, /) -> Any:
        """Return nothing to go on from: the policy knows where the episode stands."""
        return {"row": row}

    def restore(self, row: int, snapshot: Any, /) -> None:
        """Go on."""
        self.reset()


class RehearsalPolicy:
    """Plans when episodes end and how long environments take; spends its own time as the task's service says."""

    def __init__(self, worker: int = 0) -> None:
        self.matrix = torch.full((160, 160), 1e-3)

    def __call__(self, asked: Asked) -> Planned:
        """Return one tick an episode: seconds in the environment, and whether it ends."""
        scripts = [_script(text) for text in asked.observation.instructions]
        service = Service(**scripts[0]["service"])
        if scripts[0]["is_computing"]:
            for _ in range(round(service.policy_s(len(scripts)) / UNIT_S)):
                torch.mm(self.matrix, self.matrix)
        else:
            time.sleep(service.policy_s(len(scripts)))
        actions = np.zeros((len(scripts), 1, 2))
        for row, (script, key) in enumerate(zip(scripts, asked.keys.tolist(), strict=True)):
            member, chunk = key[3:]
            is_last = chunk + 1 == script["lengths"][member]
            ending = (SUCCEEDS if script["is_success"][member] else FAILS) if is_last else GOES_ON
            actions[row, 0] = script["env_s"][member][chunk], ending
        return Planned(actions)


@lru_cache(maxsize=1024)
def _script(text: str) -> dict[str, Any]:
    return json.loads(text)


def rehearse(
    lengths: Lengths,
    service: Service,
    crew: Crew,
    config: PlayConfig,
    *,
    seed: int = 0,
    is_computing: bool = False,
) -> Rollout:
    """Play episodes of these lengths on a crew of RehearsalPolicy and RehearsalEnv; return the finished rollout."""
    times_s = env_times_s(lengths, service, seed)
    groups = []
    for number, row in enumerate(lengths.lengths.tolist()):
        script = {
            "lengths": row,
            "is_success": lengths.is_success[number].tolist(),
            "env_s": [times_s[number, member] for member in range(len(row))],
            "service": asdict(service),
            "is_computing": is_computing,
        }
        groups.append(Group(number, json.dumps(script), seed=0, cap=int(lengths.caps[number])))
    rollout = Rollout(groups, Setting(seed=seed, sampler="rehearsal"), crew, config=config)
    if sum(len(played.segments) for played in rollout) != lengths.lengths.size:
        raise RuntimeError("a rehearsal ended before its last episode")
    return rollout


def measured_service(paces: Sequence[Pace], service: Service) -> Service:
    """Return the service with its cost line as these rounds were: transport, scheduler and other load included.

    Raises InputError where rounds were shorter than the environments' time in them.
    """
    env_s = service.env_s * float(np.exp(service.env_spread**2 / 2))  # mean of the log-normal
    spent_s: dict[int, list[float]] = {}
    for pace in paces:
        spent_s.setdefault(pace.num_rows, []).append(pace.cycle_s - pace.num_rows * env_s)
    found_s = {rows: float(np.mean(values)) for rows, values in spent_s.items()}
    if min(found_s.values(), default=0.0) <= 0:
        raise InputError("rounds were shorter than their environments' time: rehearse with has_parallel_envs False")
    line = fit_service(found_s)
    # sizes that came seldom bend the line as much as others: keep the time of all rounds together
    scale = sum(map(sum, spent_s.values())) / sum(line.policy_s(rows) * len(s) for rows, s in spent_s.items())
    return replace(service, fixed_s=scale * line.fixed_s, row_s=scale * line.row_s, move_s=0.0)


def predict(lengths: Lengths, service: Service, crew: Crew, config: PlayConfig, *, seed: int = 0) -> Timeline:
    """Simulate what ``rehearse`` would do."""
    limits = [WorkerLimits(crew.num_slots, config.memory_bytes)] * crew.num_workers
    return simulate(lengths, RULES[config.rule], service, workers=limits, config=config.schedule, seed=seed)


def simulator_error(rollout: Rollout, lengths: Lengths, service: Service, *, seed: int = 0) -> float:
    """Return by how much the simulator misses a rehearsal's makespan, told the cost line of its rounds alone."""
    measured = measured_service(rollout.paces, service)
    predicted = predict(lengths, measured, rollout.crew, rollout.config, seed=seed)
    return predicted.makespan_s / rollout.timeline.makespan_s - 1
