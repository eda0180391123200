"""Tune a recipe: the micro-batch and the recompute plan that are fastest within a budget of memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wamlab import __version__
from wamlab.errors import InputError
from wamlab.lab.records import plain, read_json, write_json
from wamlab.recipes.backtest import expected_error
from wamlab.recipes.build import choose_device
from wamlab.recipes.config import Recipe
from wamlab.recipes.plan_memory import GIB, RESERVED_GIB
from wamlab.recipes.tune_parts import (
    held_bytes,
    list_sizes,
    loss_of,
    network_of,
    sample_of,
    trace_recipe,
)
from wamlab.recipes.tune_roofline import predict_times
from wamlab.speed.activation_memory import StepMemory
from wamlab.speed.choice import StepChoice
from wamlab.speed.memory_sizes import memories_at, memory_from_dict, memory_to_dict, with_held
from wamlab.speed.peaks import DevicePeak, parse_devices
from wamlab.speed.recompute_plan import POLICIES, RecomputePlan
from wamlab.speed.step_time import BlockTime, MicroBatchTime, measure_times, times_at
from wamlab.speed.tune import StepSearch, search
from wamlab.train import has_native_bf16

VERSION = 1  # of what is kept in the cache: raise it when a model of memory or time changes
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


@dataclass(frozen=True)
class _Models:
    memories: tuple[StepMemory, ...]
    times: tuple[MicroBatchTime, ...]
    error: int | float
    policies: tuple[str, ...]


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
    where = _Place.of(recipe, device)
    if budget_bytes is None:
        budget_bytes = where.all_bytes
    models = _models(recipe, where, is_cached=is_cached)
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


@dataclass(frozen=True)
class _Place:
    """Where a recipe is to run."""

    name: str
    device: torch.device | None  # of this machine
    peak: DevicePeak | None  # of devices elsewhere
    num_devices: int
    has_bf16: bool

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device | str) -> _Place:
        has_bf16 = recipe.train.has_bf16
        if isinstance(device, str) and device.split(":")[0] not in ("auto", "cpu", "cuda"):
            num_devices, peak = parse_devices(device)
            return cls(f"{num_devices}x{peak.name}", None, peak, num_devices, has_bf16)
        found = choose_device(str(device))
        name = torch.cuda.get_device_name(found) if found.type == "cuda" else "cpu"
        return cls(name, found, None, 1, has_bf16 and has_native_bf16(found))

    @property
    def all_bytes(self) -> int | float | None:
        if self.peak is not None:
            return self.peak.memory_gb * 1e9 - RESERVED_GIB * GIB
        if self.device is not None and self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory - RESERVED_GIB * GIB
        return None

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies worth trying: a CPU has no second memory to offload to."""
        is_host = self.device is not None and self.device.type == "cpu"
        return tuple(policy for policy in POLICIES if not (is_host and policy == "offload"))


def _models(recipe: Recipe, where: _Place, *, is_cached: bool) -> _Models:
    path = cache_folder() / f"{_fingerprint(recipe, where)}.json"
    if is_cached and path.exists():
        kept = read_json(path)
        return _Models(
            tuple(memory_from_dict(values) for values in kept["memories"]),
            tuple(_time_from_dict(values) for values in kept["times"]), kept["error"], tuple(kept["policies"]),
        )  # fmt: skip
    sizes = list_sizes(recipe.train.batch_size)
    traced = trace_recipe(recipe, sorted({sizes[0], sizes[-1]}), has_bf16=where.has_bf16, policies=where.policies)
    memories = tuple(_with_all(recipe, where, memory) for memory in memories_at(traced, sizes).values())
    if where.peak is not None:
        predict = partial(predict_times, recipe, num_devices=where.num_devices, peak=where.peak)
        times, error = tuple(predict(memory=memory) for memory in memories), expected_error()
    else:
        times, error = _measure(recipe, where, sizes)
    models = _Models(memories, times, error, where.policies)
    if is_cached:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {
            "recipe": recipe.name, "device": where.name, "memories": [memory_to_dict(one) for one in memories],
            "times": [asdict(one) for one in times], "error": error, "policies": list(where.policies),
        })  # fmt: skip
    return models


def _with_all(recipe: Recipe, where: _Place, memory: StepMemory) -> StepMemory:
    held, encode = held_bytes(recipe, memory.gradients)
    return with_held(memory, held, encode_bytes=encode)


def _measure(recipe: Recipe, where: _Place, sizes: Sequence[int]) -> tuple[tuple[MicroBatchTime, ...], float]:
    assert where.device is not None
    some = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})

    def make_net(num_blocks: int) -> torch.nn.Module:
        net = network_of(recipe, num_blocks, has_bf16=where.has_bf16).to(where.device)
        if recipe.speed.compile == "blocks":
            from wamlab.speed.compile import compiled  # the compiler takes a second to import

            net = compiled(net, mode=recipe.speed.compile_mode)
        return net

    measured = measure_times(
        make_net, loss_of(recipe, where.device.type, has_bf16=where.has_bf16), sample_of(recipe, where.device),
        num_blocks=recipe.model.layers, sizes=some, policies=where.policies, device=where.device,
    )  # fmt: skip
    return tuple(times_at(measured.times, sizes).values()), measured.error


def _search(recipe: Recipe, models: _Models) -> StepSearch:
    memories = {one.micro_batch: one for one in models.memories}
    return search(memories, {one.micro_batch: one for one in models.times}, recipe.train.batch_size, models.policies)


def _all_or_nothing(models: _Models, batch_size: int, budget_bytes: int | float | None) -> StepChoice | None:
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


def cache_folder() -> Path:
    """Return where traces and times are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wamlab" / "tune"


def _fingerprint(recipe: Recipe, where: _Place) -> str:
    kept = {
        "version": VERSION, "wamlab": __version__, "torch": torch.__version__, "device": where.name,
        "devices": where.num_devices, "bf16": where.has_bf16, "threads": torch.get_num_threads(),
        "model": asdict(recipe.model), "window": asdict(recipe.window), "video": asdict(recipe.video),
        "text": asdict(recipe.text), "image": None if recipe.image is None else asdict(recipe.image),
        "canvas": [recipe.robot.canvas_height_px, recipe.robot.canvas_width_px], "features": recipe.features.mode,
        "train": {**asdict(recipe.train), "num_micro_batches": 0, "seed": 0, "num_steps": 0},
        "speed": {**asdict(recipe.speed), "recompute": ""}, "noise": asdict(recipe.noise),
    }  # fmt: skip
    return hashlib.sha256(repr(plain(kept)).encode()).hexdigest()[:24]


def _time_from_dict(values: dict[str, Any]) -> MicroBatchTime:
    both = {n: {p: BlockTime(**one) for p, one in values[n].items()} for n in ("blocks", "lasts")}
    return MicroBatchTime(**{**values, **both})
