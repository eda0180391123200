"""The tuner's choice against the best of every plan tried, at budgets from "barely fits" to "everything fits".

    wamlab bench tuner [--quick] [--json]

A network of six blocks of width 256 in float32, a few tokens a sample, so that small micro-batches pay for what each
call costs, as on a GPU. Every class of plans is timed: how many blocks follow which policy, recomputed ones first (the
order moves the peak and hardly the time), times every micro-batch; the best of each budget and the tuner's choice are
then timed again in turn. Peaks are of tensors (``LiveMemory``); a CPU has no second memory, so nothing is offloaded.
Quick: four blocks, three policies, fewer rounds and networks.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tuner_parts import peers as others  # pyright: ignore[reportMissingImports]
from tuner_parts.trainer import (  # pyright: ignore[reportMissingImports]
    CACHES,
    Setting,
    Trainer,
    Way,
    loss,
    optimizer_of,
    sample_of,
    update,
)

from wamlab.lab.table import Table
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.speed.activation_memory import StepMemory, trace_step_memory
from wamlab.speed.memory_sizes import memories_at
from wamlab.speed.recompute_plan import RecomputePlan
from wamlab.speed.step_time import MicroBatchTime, measure_times, times_at
from wamlab.speed.tune import search

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from random_memory import cases  # pyright: ignore[reportMissingImports]

CONFIG = WAMConfig(
    dim=256, layers=6, heads=4, ffn_dim=1024, latent_channels=16, text_dim=128, text_len=16,
    latents_per_block=2, actions_per_block=8, max_blocks=1, max_action_dim=8, max_state_dim=8, mlp_dim=256,
)  # fmt: skip
NUM_BUDGETS = 8
NUM_FINALISTS = 5  # of each budget, timed again beside the choice
FULL = Setting(CONFIG, 8, ("keep", "full", "attention", "matmuls"), 5, 2, 11, 21, 64)
QUICK = Setting(replace(CONFIG, layers=4, dim=128, ffn_dim=512), 8, ("keep", "full", "matmuls"), 2, 1, 3, 5, 0)


def models(setting: Setting) -> tuple[dict[int, StepMemory], dict[int, MicroBatchTime], float, float]:
    """Return memory and times by micro-batch, the error of the times, and the CPU seconds that tracing took."""
    example, layers = sample_of(setting.config), setting.config.layers

    def make_net(num_blocks: int) -> nn.Module:
        return WorldActionModel(replace(setting.config, layers=num_blocks))

    loss(make_net(1), example)  # constants of the loss are read once
    start_s = time.process_time()
    traced = [
        trace_step_memory(
            make_net, loss, example, num_blocks=layers, micro_batch=size, policies=setting.policies, caches=CACHES,
            make_optimizer=optimizer_of, update=update,
        )
        for size in (setting.sizes[0], setting.sizes[-1])
    ]  # fmt: skip
    trace_s = time.process_time() - start_s
    measured = measure_times(
        make_net, loss, example, num_blocks=layers, sizes=setting.sizes, policies=setting.policies,
        num_measured=layers, num_rounds=setting.num_model_rounds,
    )  # fmt: skip
    memories = memories_at(traced, setting.sizes)
    return memories, times_at(measured.times, setting.sizes), measured.error, trace_s


def classes(setting: Setting) -> list[Way]:
    """Return every micro-batch with every number of blocks under each policy, those that keep least first."""
    order = sorted(setting.policies, key=("full", "attention", "matmuls", "keep").index)
    plans = [RecomputePlan(p) for p in itertools.combinations_with_replacement(order, setting.config.layers)]
    return [(size, plan) for size in setting.sizes for plan in plans]


def search_s() -> float:
    """Return the seconds of a search over 40 blocks, 5 policies and 6 micro-batches."""
    from random_search import blocks_of  # pyright: ignore[reportMissingImports]

    memories, times = blocks_of(40, (1, 2, 4, 8, 16, 32))
    start_s = time.process_time()
    search(memories, times, 32).front()
    return time.process_time() - start_s


def run(*, is_quick: bool) -> dict[str, Any]:
    """Tune at eight budgets, time every class of plans, print a row a budget, return the figures."""
    torch.set_num_threads(1)
    begin_s, setting = time.perf_counter(), QUICK if is_quick else FULL
    memories, times, time_error, trace_s = models(setting)
    found = search(memories, times, setting.batch_size, setting.policies)
    trainer, layers = Trainer(setting), setting.config.layers

    def peak(way: Way) -> int:
        return memories[way[0]].peak(way[1], num_micro_batches=setting.batch_size // way[0])

    keep = (setting.batch_size, RecomputePlan.uniform("keep", layers))
    steps = [place / (NUM_BUDGETS - 1) for place in range(NUM_BUDGETS)]
    budgets = [found.least_bytes + round(step * (peak(keep) - found.least_bytes)) for step in steps]
    choices = [found.fastest(budget) for budget in budgets]
    chosen = [(choice.micro_batch, choice.plan) for choice in choices]
    peers = {"all or nothing": others.all_or_nothing(setting), "every k-th": others.every_kth(setting)}
    everything = list(dict.fromkeys([*classes(setting), *chosen, *itertools.chain(*peers.values())]))
    first_s = trainer.timed(everything, setting.num_rounds)

    def best(ways: Iterable[Way], seconds: dict[Way, float], budget: int, number: int = 1) -> list[Way]:
        return sorted((way for way in ways if peak(way) <= budget), key=seconds.__getitem__)[:number]

    has_accelerate = others.has_accelerate() and not is_quick
    shrunk = {
        budget: others.batch_size_of_accelerate(trainer, layers, budget) if has_accelerate else None
        for budget in budgets
    }
    finalists = dict.fromkeys([keep, *chosen, *filter(None, shrunk.values())])
    for budget in budgets:
        finalists |= dict.fromkeys(best(everything, first_s, budget, NUM_FINALISTS))
        for ways in peers.values():
            finalists |= dict.fromkeys(best(ways, first_s, budget, 2))
    last_s = trainer.timed(finalists, setting.num_last_rounds)
    tried = [way for way in last_s if setting.batch_size % way[0] == 0]
    knob = [] if is_quick else others.knob_of_torch(setting)
    rows, fractions, gains, own_errors = [], [], [], []
    for budget, choice, way in zip(budgets, choices, chosen, strict=True):
        top = best(tried, last_s, budget)[0]
        pair_s = trainer.timed(dict.fromkeys([way, top]), setting.num_pair_rounds)  # the least of many was also lucky
        fractions.append(pair_s[top] / pair_s[way])
        measured = trainer.peak(way)
        own_errors.append(choice.peak_bytes / measured - 1)
        row: dict[str, Any] = {
            "budget MiB": budget / 2**20, "choice": f"{choice.num_micro_batches}x{way[0]}: {way[1]}",
            "ms": 1000 * last_s[way], "predicted ms": 1000 * choice.step_s, "of the best": fractions[-1],
            "best": f"{setting.batch_size // top[0]}x{top[0]}: {top[1]}",
            "peak MiB": measured / 2**20, "predicted MiB": choice.peak_bytes / 2**20,
        }  # fmt: skip
        for name, ways in peers.items():
            fitting = best([w for w in ways if w in last_s], last_s, budget)
            row[f"{name} ms"] = 1000 * last_s[fitting[0]] if fitting else float("nan")
        small = shrunk[budget]
        row["accelerate ms"] = float("nan") if small is None else 1000 * last_s[small]
        slow = [one.slowdown for one in knob if peak(keep) - one.saved_bytes <= budget]
        row["torch's knob ms"] = 1000 * last_s[keep] * min(slow, default=float("nan"))
        gains.append(row["all or nothing ms"] / row["ms"] - 1)
        rows.append(row)
    print(Table(rows))
    reasons = [others.why_not("torch's solver", lambda: others.solver_of_torch(setting))]
    if not others.has_accelerate():
        reasons.append("accelerate.find_executable_batch_size: pip install accelerate")
    reasons += [
        f"torch's knob at {one.budget}: {one.saved_bytes / 2**20:.1f} MiB less, {one.slowdown:.3f} of its own time"
        for one in knob
    ]
    slowest = times[setting.batch_size]
    shares = {policy: slowest.block(policy) / slowest.block("keep") for policy in setting.policies}
    reasons.append("a block's time: " + ", ".join(f"{policy} {share:.3f}" for policy, share in shares.items()))
    print("\n".join(filter(None, reasons)))
    errors = [case.error for case in cases(setting.num_cases, plans_each=8)] + own_errors
    return {
        "fraction_of_exhaustive": min(fractions),
        "memory_error_max": max(map(abs, errors)),
        "memory_error_lowest": min(errors),
        "gain_vs_all_or_nothing": min(gain for gain in gains[2:-2] if gain == gain),
        "gains_by_budget": gains,
        "fractions_by_budget": fractions,
        "time_error": time_error,
        "num_memory_cases": len(errors),
        "num_ways_timed": len(everything),
        "search_s": search_s(),
        "trace_cpu_s": trace_s,
        "minutes": (time.perf_counter() - begin_s) / 60,
    }


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
