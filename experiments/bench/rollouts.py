"""Rollouts: what the order of episodes is worth, how well simulated time is real time, what the engine costs a chunk.

    wamlab bench rollouts [--quick] [--json]

Scheduling: in simulated time, paired by seed. 24 groups of 8 episodes on 8 workers of 8 places, episode lengths as
three benchmarks have them, three lines of service times; every rule plays the same episodes with the same times. The
headline's line again with 48 groups.

Simulator: the same schedules on real worker processes whose policy and environments sleep or compute (the latter two
processes only), against the simulator told the cost line of those very rounds.

Engine: rounds of the demo's network on tabletops, played by a worker process under the scheduler, over the time of
policy and environments in those very rounds; and over those of a bare loop ("paired").

Iteration: whole GRPO iterations of the demo's network on tabletops of all families by two real worker processes, whose
trainer learns when they are done; static groups with refill against the context rule with shared prefixes, the same
episodes in turns. Only when an episode ends is drawn (an untrained network ends none). "update_share" is the part of a
static iteration that no way to play can shorten, "iteration_bound" what rollouts that take no time would give.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from wamlab.lab.table import Table
from wamlab.recipes.rehearsal import RandomWam, chunk_latency_ratios, make_tabletop
from wamlab.recipes.rl_iteration import Iteration, WayToPlay, compare
from wamlab.rl.length_models import LENGTH_MODELS, draw_lengths
from wamlab.rl.play import PlayConfig
from wamlab.rl.process_workers import ProcessCrew
from wamlab.rl.rehearse import RehearsalEnv, RehearsalPolicy, rehearse, simulator_error
from wamlab.rl.rules import RULES
from wamlab.rl.service import SERVICES, Service
from wamlab.rl.simulate import Timeline, least_makespan_s, simulate

NUM_GROUPS, GROUP_SIZE, NUM_WORKERS, NUM_SEEDS = 24, 8, 8, 10
MORE_GROUPS = 48  # an iteration twice as long: what ends late weighs half as much
SIMPLE = ("static", "fifo", "rounds")
HEADLINE = "balanced"
ASLEEP = Service(fixed_s=0.03, row_s=0.004, env_s=0.006, has_parallel_envs=False)
COMPUTING = Service(fixed_s=0.006, row_s=0.008, env_s=0.0, env_spread=0.0, has_parallel_envs=False)
REHEARSED = ("context", "static", "rounds")


def measure(model: str, service: str, num_groups: int, num_seeds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Play every rule on one setting; return a row a rule, and the ratios of ``context`` by name."""
    played: dict[str, list[Timeline]] = {name: [] for name in RULES}
    bounds_s = []
    for seed in range(num_seeds):
        lengths = draw_lengths(LENGTH_MODELS[model], num_groups, GROUP_SIZE, seed=seed)
        bounds_s.append(least_makespan_s(lengths, SERVICES[service], NUM_WORKERS, 8))
        for name, rule in RULES.items():
            timeline = simulate(lengths, rule, SERVICES[service], num_workers=NUM_WORKERS, seed=seed)
            played[name].append(timeline)
    rows = []
    for name, timelines in played.items():
        gains = [a.makespan_s / b.makespan_s for a, b in zip(played["padded"], timelines, strict=True)]
        rows.append(
            {
                "lengths": model,
                "service": service,
                "groups": num_groups,
                "rule": name,
                "episodes/s": statistics.median(t.episodes_per_s for t in timelines),
                "x padded": statistics.median(gains),
                "lowest": min(gains),
                "highest": max(gains),
                "tail s": statistics.median(t.tail_s for t in timelines),
                "busy": statistics.median(t.utilisation for t in timelines),
                "of the bound": statistics.median(
                    bound / t.makespan_s for bound, t in zip(bounds_s, timelines, strict=True)
                ),
            }
        )

    def ratio(slow: str) -> float:
        pairs = zip(played[slow], played["context"], strict=True)
        return statistics.median(a.makespan_s / b.makespan_s for a, b in pairs)

    pairs = zip(played["static"], played["context"], strict=True)
    return rows, {
        "throughput_vs_padded": ratio("padded"),
        "throughput_vs_static": ratio("static"),
        "throughput_vs_best_simple": min(ratio(name) for name in SIMPLE),
        "tail_cut_vs_static": statistics.median(1 - b.tail_s / a.tail_s for a, b in pairs),
    }


def rehearse_all(*, is_quick: bool) -> list[dict[str, Any]]:
    """Play schedules on sleeping and on computing processes; return a row a setting with the simulator's error."""
    rows = []
    for kind, service, num_workers, num_slots in (
        ("asleep", ASLEEP, 4 if is_quick else 8, 2),
        ("computing", COMPUTING, 2, 4),
    ):
        with ProcessCrew(RehearsalPolicy, RehearsalEnv, num_workers=num_workers, num_slots=num_slots) as crew:
            pairs = [(rule, model) for rule in REHEARSED for model in LENGTH_MODELS]
            if is_quick:
                pairs = list(zip(sorted(REHEARSED), LENGTH_MODELS, strict=True))
            for rule, model in tqdm(pairs, desc=f"{kind}, {num_workers} workers", file=sys.stderr):
                lengths = draw_lengths(LENGTH_MODELS[model], 3 if is_quick and kind == "asleep" else 6, 4, seed=1)
                config = PlayConfig(rule=rule, num_members=4)
                rollout = rehearse(lengths, service, crew, config, seed=1, is_computing=kind == "computing")
                row = {"workers": f"{num_workers}, {kind}", "rule": rule, "lengths": model}
                error = simulator_error(rollout, lengths, service, seed=1)
                rows.append(row | {"real s": rollout.timeline.makespan_s, "error": error})
    return rows


def measure_latency(*, is_quick: bool) -> dict[str, list[float]]:
    """Return what a round takes under the scheduler over what it takes without, pair by pair."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the worker
    try:
        with ProcessCrew(RandomWam, make_tabletop, num_workers=1, num_slots=4) as crew:
            return chunk_latency_ratios(crew, RandomWam(), 2 if is_quick else 7, num_groups=2 if is_quick else 4)
    finally:
        torch.set_num_threads(num_threads)


def measure_iteration(*, is_quick: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row a way to play, and what the context rule with shared prefixes is worth in whole iterations."""
    sizes = {"num_groups": 4 if is_quick else 6, "num_members": 3 if is_quick else 8}
    slow, fast = WayToPlay("static", is_prefix_shared=False), WayToPlay()
    pairs = compare(slow, fast, 2 if is_quick else 10, num_workers=2, num_slots=sizes["num_members"], **sizes)

    def median(what: Callable[[Iteration, Iteration], float]) -> float:
        return statistics.median(what(a, b) for a, b in pairs)

    rows = []
    for name, own in zip(("static", "context, shared prefixes"), zip(*pairs, strict=True), strict=True):
        names = ("total_s", "rollout_s", "tail_s", "busy", "update_s", "load_s", "num_rows")
        rows.append({"way": name} | {n: statistics.median(getattr(one, n) for one in own) for n in names})
    return rows, {
        "iteration_vs_static": median(lambda a, b: a.total_s / b.total_s),
        "iteration_pairs": [a.total_s / b.total_s for a, b in pairs],
        "iteration_rollout_vs_static": median(lambda a, b: a.rollout_s / b.rollout_s),
        "iteration_tail_cut": median(lambda a, b: 1 - b.tail_s / a.tail_s),
        "iteration_update_share": median(lambda a, _: a.update_s / a.total_s),
        "iteration_bound": median(lambda a, _: a.total_s / (a.total_s - a.rollout_s)),
        "iteration_static_busy": median(lambda a, _: a.busy),
        "iteration_context_busy": median(lambda _, b: b.busy),
        "iteration_context_makespan_s": median(lambda _, b: b.rollout_s),
        "iteration_context_tail_s": median(lambda _, b: b.tail_s),
    }


def run(*, is_quick: bool) -> dict[str, Any]:
    """Measure all settings; the figures are those of the worst length model at the balanced service, then each one."""
    start_s = time.perf_counter()
    num_seeds = 2 if is_quick else NUM_SEEDS
    services = [HEADLINE] if is_quick else list(SERVICES)
    settings = [(model, service, NUM_GROUPS) for service in services for model in LENGTH_MODELS]
    if not is_quick:
        settings += [(model, HEADLINE, MORE_GROUPS) for model in LENGTH_MODELS]
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    for setting in tqdm(settings, desc="settings", file=sys.stderr):
        own, found[setting] = measure(*setting, num_seeds)
        rows += own
    print(Table(rows))
    figures: dict[str, Any] = {
        name: min(found[model, HEADLINE, NUM_GROUPS][name] for model in LENGTH_MODELS)
        for name in found[next(iter(LENGTH_MODELS)), HEADLINE, NUM_GROUPS]
    }
    figures["settings"] = {", ".join(map(str, setting)): ratios for setting, ratios in found.items()}
    figures["num_seeds"] = num_seeds
    rehearsed = rehearse_all(is_quick=is_quick)
    print(Table(rehearsed))
    figures["simulator_error"] = max(abs(row["error"]) for row in rehearsed)
    figures["num_rehearsed"] = len(rehearsed)
    ratios = measure_latency(is_quick=is_quick)
    figures["chunk_latency_ratio"] = statistics.median(ratios["own"])
    figures["chunk_latency_ratio_paired"] = statistics.median(ratios["paired"])
    figures["chunk_latency_ratios"] = ratios
    ways, found_iteration = measure_iteration(is_quick=is_quick)
    print(Table(ways))
    figures |= found_iteration
    figures["minutes"] = (time.perf_counter() - start_s) / 60
    return figures


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
