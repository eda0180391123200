"""The tuner's choice against the best of every plan tried, at budgets from "barely fits" to "everything fits".

    wamlab bench tuner [--quick] [--json]

A network of six blocks of width 256 in float32, a few tokens a sample, so that small micro-batches pay for what each
call costs, as on a GPU. Every class of plans is timed: how many blocks follow which policy, recomputed ones first (the
order moves the peak and hardly the time), times every micro-batch; the best of each budget and the tuner's choice are
then timed again in turn. Peaks are of tensors (``LiveMemory``); a CPU has no second memory, so nothing is offloaded.
Quick: four blocks, three policies, fewer rounds and networks.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from wamlab.flow import flow_loss, with_noise
from wamlab.lab.table import Table
from wamlab.model.positions import place_code, window_rotation
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.speed.activation_memory import StepMemory, trace_step_memory
from wamlab.speed.live_memory import measure_peak
from wamlab.speed.memory_sizes import memories_at
from wamlab.speed.recompute import with_recompute
from wamlab.speed.recompute_plan import RecomputePlan
from wamlab.speed.step_time import MicroBatchTime, as_large, measure_times, times_at
from wamlab.speed.tune import search
from wamlab.speed.update import clip_gradients
from wamlab.types import Batch, FlowExample

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from random_memory import cases  # pyright: ignore[reportMissingImports]

CONFIG = WAMConfig(
    dim=256, layers=6, heads=4, ffn_dim=1024, latent_channels=16, text_dim=128, text_len=16,
    latents_per_block=2, actions_per_block=8, max_blocks=1, max_action_dim=8, max_state_dim=8, mlp_dim=256,
)  # fmt: skip
CACHES = (window_rotation, place_code)
NUM_BUDGETS = 8
NUM_FINALISTS = 5  # of each budget, timed again beside the choice
Way = tuple[int, RecomputePlan]  # micro-batch and plan


@dataclass(frozen=True)
class Setting:
    """What is tuned, and how long it is measured."""

    config: WAMConfig
    batch_size: int
    policies: tuple[str, ...]
    num_model_rounds: int  # over policies and sizes, for the model of time
    num_rounds: int  # over all classes of plans
    num_last_rounds: int  # over those that are timed again
    num_cases: int  # random networks, micro-batches and plans whose peak is predicted and measured

    @property
    def sizes(self) -> list[int]:
        return [size for size in range(1, self.batch_size + 1) if self.batch_size % size == 0]


FULL = Setting(CONFIG, 8, ("keep", "full", "attention", "matmuls"), 5, 2, 11, 64)
QUICK = Setting(replace(CONFIG, layers=4, dim=128, ffn_dim=512), 8, ("keep", "full", "matmuls"), 2, 1, 4, 0)


def sample_of(config: WAMConfig) -> FlowExample:
    """Draw one sample: a block of two latents of 4 x 8, 8 actions."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator)

    batch = Batch(
        drawn(3, config.latent_channels, 4, 8), drawn(8, 8), torch.ones(1, 8, 8, dtype=torch.bool), drawn(1, 8),
        drawn(10, config.text_dim),
    )  # fmt: skip
    return with_noise(batch, generator)


def loss(net: Any, example: Any) -> Tensor:
    return flow_loss(net, example).total


def optimizer_of(net: nn.Module) -> Optimizer:
    return AdamW(net.parameters(), lr=1e-5, fused=True)


def update(net: nn.Module, optimizer: Optimizer) -> None:
    clip_gradients(net.parameters(), 1.0)
    optimizer.step()


class Trainer:
    """One network with its optimiser, whose step is computed in any way."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self.net = WorldActionModel(setting.config)
        self.optimizer = optimizer_of(self.net)
        self.batch = as_large(sample_of(setting.config), setting.batch_size)
        self.step((1, RecomputePlan.uniform("keep", setting.config.layers)))

    def step(self, way: Way) -> float:
        """Return the CPU seconds of a step."""
        size, plan = way
        with_recompute(self.net, plan)
        start_s = time.process_time()
        for start in range(0, len(self.batch), size):
            loss(self.net, self.batch[start : start + size]).backward()
        update(self.net, self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        return time.process_time() - start_s

    def peak(self, way: Way) -> int:
        """Return the most bytes of tensors alive in a step."""
        for cache in CACHES:
            cache.cache_clear()
        return measure_peak(lambda: self.step(way), self.net, self.optimizer, self.batch)

    def timed(self, ways: Iterable[Way], num_rounds: int) -> dict[Way, float]:
        """Return the seconds of each way, each round in another order, relative to the round, as medians."""
        draw, ways = random.Random(0), list(ways)
        samples: dict[Way, list[float]] = {way: [] for way in ways}
        rounds = []
        for _ in range(num_rounds):
            took = {way: self.step(way) for way in draw.sample(ways, len(ways))}
            rounds.append(statistics.mean(took.values()))
            for way, seconds in took.items():
                samples[way].append(seconds / rounds[-1])
        unit_s = statistics.median(rounds)
        return {way: unit_s * statistics.median(shares) for way, shares in samples.items()}


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


def every_kth(setting: Setting) -> list[Way]:
    """Return the plans that recompute each k-th block."""
    layers = setting.config.layers
    plans = {RecomputePlan(tuple("keep" if index % k else "full" for index in range(layers))) for k in range(1, layers)}
    return [(size, plan) for size in setting.sizes for plan in sorted(plans, key=str)]


def all_or_nothing(setting: Setting) -> list[Way]:
    plans = [RecomputePlan.uniform(policy, setting.config.layers) for policy in ("keep", "full")]
    return [(size, plan) for size in setting.sizes for plan in plans]


def search_s() -> float:
    """Return the seconds of a search over 40 blocks, 5 policies and 6 micro-batches."""
    from random_search import blocks_of  # pyright: ignore[reportMissingImports]

    memories, times = blocks_of(40, (1, 2, 4, 8, 16, 32))
    start_s = time.process_time()
    search(memories, times, 32).front()
    return time.process_time() - start_s


def why_not(name: str, run: Callable[[], Any]) -> str:
    """Return why a peer does not run here; nothing if it does."""
    try:
        run()
    except Exception as error:  # whatever a foreign tool raises is what is reported
        return f"{name} does not run here: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return ""


def solver_of_torch(setting: Setting) -> None:
    """Run torch's estimator of selective recomputation, whose figures its solver needs."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.sac_estimator import SACEstimator

    with FakeTensorMode():
        net, estimator = WorldActionModel(setting.config), SACEstimator()
        with estimator(estimate_mode_type="operator-level-cost-model"):
            loss(net, sample_of(setting.config)).backward()


def run(*, is_quick: bool) -> dict[str, Any]:
    """Tune at eight budgets, time every class of plans, print a row a budget, return the figures."""
    torch.set_num_threads(1)
    begin_s, setting = time.perf_counter(), QUICK if is_quick else FULL
    memories, times, time_error, trace_s = models(setting)
    found = search(memories, times, setting.batch_size, setting.policies)
    trainer = Trainer(setting)

    def peak(way: Way) -> int:
        return memories[way[0]].peak(way[1], num_micro_batches=setting.batch_size // way[0])

    most = peak((setting.batch_size, RecomputePlan.uniform("keep", setting.config.layers)))
    budgets = [
        found.least_bytes + round(place / (NUM_BUDGETS - 1) * (most - found.least_bytes))
        for place in range(NUM_BUDGETS)
    ]
    choices = [found.fastest(budget) for budget in budgets]
    chosen = [(choice.micro_batch, choice.plan) for choice in choices]
    peers = {"all or nothing": all_or_nothing(setting), "every k-th": every_kth(setting)}
    everything = list(dict.fromkeys([*classes(setting), *chosen, *itertools.chain(*peers.values())]))
    first_s = trainer.timed(everything, setting.num_rounds)

    def best(ways: Iterable[Way], seconds: dict[Way, float], budget: int, number: int = 1) -> list[Way]:
        return sorted((way for way in ways if peak(way) <= budget), key=seconds.__getitem__)[:number]

    finalists = dict.fromkeys(chosen)
    for budget in budgets:
        finalists |= dict.fromkeys(best(everything, first_s, budget, NUM_FINALISTS))
        for ways in peers.values():
            finalists |= dict.fromkeys(best(ways, first_s, budget, 2))
    last_s = trainer.timed(finalists, setting.num_last_rounds)
    rows, fractions, gains, own_errors = [], [], [], []
    for budget, choice, way in zip(budgets, choices, chosen, strict=True):
        top = best(last_s, last_s, budget)[0]
        fractions.append(last_s[top] / last_s[way])
        measured = trainer.peak(way)
        own_errors.append(choice.peak_bytes / measured - 1)
        row = {
            "budget MiB": budget / 2**20, "choice": f"{choice.num_micro_batches}x{way[0]}: {way[1]}",
            "ms": 1000 * last_s[way], "predicted ms": 1000 * choice.step_s, "of the best": fractions[-1],
            "best": f"{setting.batch_size // top[0]}x{top[0]}: {top[1]}", "peak MiB": measured / 2**20,
            "predicted MiB": choice.peak_bytes / 2**20,
        }  # fmt: skip
        for name, ways in peers.items():
            fitting = best([w for w in ways if w in last_s], last_s, budget)
            row[f"{name} ms"] = 1000 * last_s[fitting[0]] if fitting else float("nan")
        gains.append(row["all or nothing ms"] / row["ms"] - 1)
        rows.append(row)
    print(Table(rows))
    reasons = [why_not("torch's solver", lambda: solver_of_torch(setting))]
    if importlib.util.find_spec("accelerate") is None:
        reasons.append("accelerate.find_executable_batch_size: pip install accelerate; it would keep all, as above")
    print("\n".join(filter(None, reasons)))
    errors = [case.error for case in cases(setting.num_cases, plans_each=8)] + own_errors
    middle = [gain for gain in gains[2:-2] if gain == gain]
    return {
        "fraction_of_exhaustive": min(fractions),
        "memory_error_max": max(map(abs, errors)),
        "memory_error_lowest": min(errors),
        "gain_vs_all_or_nothing": min(middle),
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
