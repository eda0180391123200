"""Tune a recipe: the micro-batch and the recompute plan that are fastest within a budget of memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from wamlab.errors import InputError
from wamlab.lab.records import plain
from wamlab.recipes.config import Recipe
from wamlab.recipes.plan_memory import GIB
from wamlab.recipes.tune_models import Models, Place, models_of
from wamlab.speed.activation_memory import StepMemory
from wamlab.speed.choice import StepChoice
from wamlab.speed.recompute_plan import RecomputePlan
from wamlab.speed.step_time import MicroBatchTime
from wamlab.speed.tune import StepSearch, search

ALL_OR_NOTHING = ("keep", "full")


@dataclass(frozen=True)
class Tuned:
    """What tuning found for one recipe on one kind of device."""

    recipe: str
    device: str
    budget_bytes: int | None  # of each device; None: no limit
    choice: StepChoice  # the fastest that fits
    front: tuple[StepChoice, ...]  # from the least memory to the fastest
    all_or_nothing: StepChoice | None  # the fastest that fits with every block alike, kept or recomputed
    seconds: dict[str, float]  # of the chosen step, by what takes them
    memory_bytes: dict[str, int]  # of the chosen step's peak, by what takes them
    errors: dict[str, float]  # of the model: "time" as measured on a plan that was not fitted
    is_measured: bool  # times are of this machine; else of the roofline

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""

        def row(one: StepChoice | None) -> dict[str, Any] | None:
            return None if one is None else {**asdict(one), "plan": str(one.plan)}

        values = {**vars(self), "front": [row(one) for one in self.front]}
        return plain(values | {name: row(values[name]) for name in ("choice", "all_or_nothing")})


def tune_recipe(
    recipe: Recipe,
    budget_bytes: int | float | None = None,
    device: torch.device | str = "auto",
    *,
    is_cached: bool = True,
) -> Tuned:
    """Choose a recipe's micro-batch and plan for the memory of one device.

    ``device`` is one of this machine, whose times are measured, or devices such as "8xH100", whose times the roofline
    gives. ``budget_bytes`` is for tensors; None takes all that CUDA devices have, less 8 GiB for what is no tensor, and
    knows no limit on a CPU. Traces and times are kept under ``~/.cache/wamlab/tune``. Raises InputError where no plan
    fits.
    """
    if budget_bytes is not None and budget_bytes <= 0:
        raise InputError(f"the budget is {budget_bytes} bytes: give more than 0")
    where = Place.of(recipe, device)
    if budget_bytes is None:
        budget_bytes = where.all_bytes
    models = models_of(recipe, where, is_cached=is_cached)
    found = _search(recipe, models)
    choice = found.fastest(budget_bytes)
    memory = next(m for m in models.memories if m.micro_batch == choice.micro_batch)
    time = next(t for t in models.times if t.micro_batch == choice.micro_batch)
    return Tuned(
        recipe.name, where.name, None if budget_bytes is None else int(budget_bytes), choice, tuple(found.front()),
        _all_or_nothing(models, recipe.train.batch_size, budget_bytes), _seconds(time, choice), _bytes(memory, choice),
        {"time": models.error}, where.peak is None,
    )  # fmt: skip


def tuned(recipe: Recipe, *, budget_gib: int | float | None = None, device: torch.device | str = "auto") -> Recipe:
    """Return a recipe with the micro-batches and the recompute plan that are fastest within ``budget_gib``."""
    choice = tune_recipe(recipe, None if budget_gib is None else budget_gib * GIB, device).choice
    return with_choice(recipe, choice)


def with_choice(recipe: Recipe, choice: StepChoice) -> Recipe:
    """Return a recipe that computes its step as a choice says."""
    return replace(
        recipe,
        train=replace(recipe.train, num_micro_batches=choice.num_micro_batches),
        speed=replace(recipe.speed, recompute=str(choice.plan)),
    )


def tuned_table(found: Tuned) -> str:
    """Return the front as a table, with the chosen line marked, its picture and what its time and memory go to."""
    limit = "no limit" if found.budget_bytes is None else f"{found.budget_bytes / GIB:.2f} GiB"
    how = "measured here" if found.is_measured else "of the roofline"
    lines = [f"{found.recipe} on {found.device}, {limit} a device; times {how}, error {found.errors['time']:.0%}", ""]
    lines += [f"  {'batch':>7} {'step s':>9} {'samples/s':>10} {'GiB':>8}  plan"]
    choices = list(dict.fromkeys((*found.front, found.choice)))
    for one in sorted(choices, key=lambda one: one.peak_bytes):
        mark = ">" if one == found.choice else " "
        batch, samples = f"{one.num_micro_batches}x{one.micro_batch}", one.num_micro_batches * one.micro_batch
        lines.append(
            f"{mark} {batch:>7} {one.step_s:9.4f} {samples / one.step_s:10.3f} {one.peak_bytes / GIB:8.3f}  {one.plan}"
        )
    lines += ["", found.choice.plan.draw(), ""]
    if found.all_or_nothing is not None:
        other = found.all_or_nothing
        gain = other.step_s / found.choice.step_s - 1
        lines.append(
            f"the best with all blocks alike, kept or recomputed: {other.num_micro_batches}x{other.micro_batch}, "
            f"{other.plan}, {other.step_s:.4f} s; the choice does {gain:.1%} more samples/s"
        )
    else:
        lines.append("with all blocks alike, kept or recomputed, nothing fits")
    step_s = sum(found.seconds.values())
    lines.append("time: " + ", ".join(f"{name} {s / step_s:.0%}" for name, s in found.seconds.items() if s))
    lines.append("GiB: " + ", ".join(f"{name} {b / GIB:.3f}" for name, b in found.memory_bytes.items() if b))
    return "\n".join(lines)


def _search(recipe: Recipe, models: Models) -> StepSearch:
    memories = {one.micro_batch: one for one in models.memories}
    return search(memories, {one.micro_batch: one for one in models.times}, recipe.train.batch_size, models.policies)


def _all_or_nothing(models: Models, batch_size: int, budget_bytes: int | float | None) -> StepChoice | None:
    budget = float("inf") if budget_bytes is None else budget_bytes
    found = []
    for memory, time in zip(models.memories, models.times, strict=True):
        for policy in ALL_OR_NOTHING:
            plan, number = RecomputePlan.uniform(policy, memory.num_blocks), batch_size // memory.micro_batch
            peak = memory.peak(plan, num_micro_batches=number)
            if peak <= budget:
                step_s = time.step_s(plan, num_micro_batches=number)
                found.append(StepChoice(memory.micro_batch, number, plan, peak, step_s))
    return min(found, key=lambda one: one.step_s, default=None)


def _seconds(time: MicroBatchTime, choice: StepChoice) -> dict[str, float]:
    *others, last = choice.plan.policies
    blocks = [*(time.blocks[policy] for policy in others), time.lasts[last]]
    number = choice.num_micro_batches
    return {
        "forward": number * sum(block.forward_s for block in blocks),
        "recompute": number * sum(block.recompute_s for block in blocks),
        "backward": number * sum(block.backward_s for block in blocks),
        "outside the blocks": number * time.rest_s,
        "once a step": time.update_s,
    }


def _bytes(memory: StepMemory, choice: StepChoice) -> dict[str, int]:
    examples = choice.num_micro_batches * memory.example
    known = memory.parameters + memory.optimizer + memory.gradients + examples
    return {
        "parameters and what else lies there": memory.parameters,
        "optimiser": memory.optimizer,
        "gradients": memory.gradients,
        "examples": examples,
        "activations at the peak": max(choice.peak_bytes - known, 0),
    }
