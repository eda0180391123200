"""Scheduling of rollouts alone: what the order of episodes is worth, in simulated time, paired by seed.

    wamlab bench rollouts [--quick] [--json]

24 groups of 8 episodes on 8 workers of 8 places, episode lengths as three benchmarks have them, three lines of service
times. Every rule plays the same episodes with the same times in their environments. Nothing here plays a real policy.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from tqdm import tqdm

from wamlab.lab.table import Table
from wamlab.rl.length_models import LENGTH_MODELS, draw_lengths
from wamlab.rl.rules import RULES
from wamlab.rl.service import SERVICES
from wamlab.rl.simulate import Timeline, least_makespan_s, simulate

NUM_GROUPS, GROUP_SIZE, NUM_WORKERS, NUM_SEEDS = 24, 8, 8, 10
SIMPLE = ("static", "fifo", "rounds")
HEADLINE = "balanced"


def measure(model: str, service: str, num_seeds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Play every rule on one setting; return a row a rule, and the ratios of ``context`` by name."""
    played: dict[str, list[Timeline]] = {name: [] for name in RULES}
    bounds_s = []
    for seed in range(num_seeds):
        lengths = draw_lengths(LENGTH_MODELS[model], NUM_GROUPS, GROUP_SIZE, seed=seed)
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


def run(*, is_quick: bool) -> dict[str, Any]:
    """Measure all settings; the figures are those of the worst length model at the balanced service, then each one."""
    start_s = time.perf_counter()
    num_seeds = 2 if is_quick else NUM_SEEDS
    services = [HEADLINE] if is_quick else list(SERVICES)
    settings = [(model, service) for service in services for model in LENGTH_MODELS]
    found: dict[tuple[str, str], dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    for setting in tqdm(settings, desc="settings", file=sys.stderr):
        own, found[setting] = measure(*setting, num_seeds)
        rows += own
    print(Table(rows))
    figures: dict[str, Any] = {
        name: min(found[model, HEADLINE][name] for model in LENGTH_MODELS)
        for name in found[next(iter(LENGTH_MODELS)), HEADLINE]
    }
    figures["settings"] = {", ".join(setting): ratios for setting, ratios in found.items()}
    figures["num_seeds"] = num_seeds
    figures["minutes"] = (time.perf_counter() - start_s) / 60
    return figures


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
