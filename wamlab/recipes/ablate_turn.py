"""One turn of an ablation, in a process of its own: a few steps of a recipe, and what they took."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from wamlab.lab.lifeline import hold_lifeline
from wamlab.lab.records import read_json, write_json
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import recipe_from_dict
from wamlab.recipes.utilization import utilization_of
from wamlab.speed.clock import Clock
from wamlab.speed.ranks import leave_ranks


def take_turn(bench: Workbench, num_warmup: int) -> dict[str, Any]:
    """Train to the end of a recipe's steps; return the steps after the warm-up with what they used, and all losses.

    ``cpu_s`` is what all threads of all processes spent a step.
    """
    start_s = time.perf_counter()
    clock = Clock(bench.device)
    utilization = utilization_of(bench)
    steps = bench.steps(bench.optimizer(), bench.examples(clock), clock)
    with closing(steps):
        warmup = list(islice(steps, num_warmup))
        warm_s, cpu_start_s = time.perf_counter(), time.process_time()
        records = list(steps)
    wall_s = (time.perf_counter() - warm_s) / len(records)
    cpu_s = (time.process_time() - cpu_start_s) / len(records)
    if bench.ranks.world_size > 1:
        cpu_s = bench.ranks.mean(torch.tensor(cpu_s)).item() * bench.ranks.world_size
    used = utilization.figures(records[0].num_samples, wall_s)
    return {
        "step_s": wall_s,
        "cpu_s": cpu_s,
        "warmup_s": warm_s - start_s,
        "num_samples": records[0].num_samples,
        "split_s": {part: sum(r.split_s[part] for r in records) / len(records) for part in records[0].split_s},
        "memory_gib": max(record.memory_gib for record in records),
        "losses": [record.loss for record in [*warmup, *records]],
        "device": str(bench.device),
        "num_processes": bench.ranks.world_size,
        "used": used,
        "last": asdict(records[-1]),
    }


def main(words: Sequence[str]) -> int:
    """Read a recipe, take its turn, write the result: CONFIG RESULT NUM_WARMUP."""
    hold_lifeline(grace_s=0.0)
    config, result, num_warmup = words
    bench = Workbench(recipe_from_dict(read_json(Path(config))))
    found = take_turn(bench, int(num_warmup))
    if bench.ranks.is_first:
        write_json(Path(result), found)
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
