"""What keeps a run within its budget of memory: the tuner's choices as a ladder, and a line for every move on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.optim import Optimizer

from wamlab.errors import InputError
from wamlab.lab.records import append_line, read_lines
from wamlab.recipes.build import Workbench
from wamlab.recipes.tune import tune_recipe
from wamlab.speed.choice import StepChoice
from wamlab.speed.device_memory import CudaMemory, all_bytes
from wamlab.speed.guard import Guard
from wamlab.speed.ladder import GIB, Ladder, plain_rungs, thinned
from wamlab.speed.live_memory import LiveMemory, tensors_of
from wamlab.train import Ema

MEMORY_MOVES = "memory.jsonl"  # in the run folder: with which choice steps ran and why, a line each decision


def guard_of(bench: Workbench, optimizer: Optimizer, ema: Ema | None, folder: Path) -> Guard | None:
    """Return the guard of a run whose recipe has ``speed.recompute`` "tuned", else None.

    Raises InputError on a CPU without a budget or with compiled blocks.
    """
    if bench.recipe.speed.recompute != "tuned":
        return None
    rungs, budget_bytes = rungs_of(bench)
    return guarded(bench, optimizer, ema, folder, rungs, budget_bytes)


def guarded(
    bench: Workbench, optimizer: Optimizer, ema: Ema | None, folder: Path, rungs: Sequence[StepChoice],
    budget_bytes: int,
) -> Guard:  # fmt: skip
    """Return a guard that notes its moves in a run's folder; a run that goes on begins where its shapes stood.

    On a CPU tensors are followed one by one, at two to three times the cost of a small network's step.
    """
    path = folder / MEMORY_MOVES
    stood = {line["shape"]: line["to"] for line in read_lines(path)[0]} if path.exists() else {}
    if bench.device.type == "cuda":
        memory = CudaMemory(bench.device, budget_bytes, is_capped=not bench.is_shared)
    else:
        held = tensors_of(bench.net, optimizer, None if ema is None else ema.average)
        memory = LiveMemory(held, budget_bytes=None if bench.is_shared else budget_bytes)
    return Guard(
        bench.net,
        optimizer,
        Ladder(rungs, budget_bytes=budget_bytes, begin=stood),
        memory,
        ranks=bench.ranks,
        is_shared=bench.is_shared,
        tell=lambda move: append_line(path, move.record()),
    )


def rungs_of(bench: Workbench) -> tuple[Sequence[StepChoice], int]:
    """Return a recipe's choices from the fastest to the leanest, and its budget in bytes.

    The tuner times this machine alone, so processes that share a network begin from plain choices, in which they agree.
    """
    recipe, device = bench.recipe, bench.device
    speed = recipe.speed
    if device.type != "cuda" and speed.budget_gib is None:
        raise InputError('speed.recompute "tuned" on a CPU needs a budget: give speed.budget_gib')
    if device.type != "cuda" and speed.compile != "off":
        raise InputError(
            'speed.recompute "tuned" on a CPU follows operations, which compiled blocks hide: turn speed.compile off'
        )
    budget = None if speed.budget_gib is None else round(speed.budget_gib * GIB)
    if bench.is_shared:
        size = -(-recipe.train.batch_size // recipe.train.num_micro_batches)
        return plain_rungs(recipe.train.batch_size, recipe.model.layers, size), budget or all_bytes(device)
    tuned = tune_recipe(recipe, budget, device)
    assert tuned.budget_bytes is not None  # a CPU has one by now, a CUDA device always
    return thinned([*tuned.front, tuned.choice], kept=tuned.choice), tuned.budget_bytes
