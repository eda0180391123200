"""What tuning a recipe starts from: memory and time of every micro-batch at one place, kept from call to call."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from wamlab.recipes.tune_parts import held_bytes, list_sizes, loss_of, network_of, sample_of, trace_recipe
from wamlab.recipes.tune_roofline import predict_times
from wamlab.speed.activation_memory import StepMemory
from wamlab.speed.config import ShardConfig
from wamlab.speed.memory_sizes import memories_at, memory_from_dict, memory_to_dict, with_held
from wamlab.speed.peaks import DevicePeak, parse_devices
from wamlab.speed.recompute_plan import POLICIES
from wamlab.speed.shard_memory import UnitBytes, shared_memory, widened_memory
from wamlab.speed.step_time import BlockTime, MicroBatchTime, measure_times, times_at
from wamlab.train import has_native_bf16

VERSION = 3  # of what is kept in the cache: raise it when a model of memory or time changes


@dataclass(frozen=True)
class Models:
    """Memory and time of every micro-batch, and the policies that were tried."""

    memories: tuple[StepMemory, ...]
    times: tuple[MicroBatchTime, ...]
    error: int | float
    policies: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where a recipe is to run."""

    name: str
    device: torch.device | None  # of this machine
    peak: DevicePeak | None  # of devices elsewhere
    num_devices: int
    has_bf16: bool

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device | str) -> Place:
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

    def is_narrow(self, recipe: Recipe) -> bool:
        """Say whether weights are gathered in bfloat16."""
        return self.has_bf16 and recipe.speed.shard is not None and recipe.speed.shard.has_bf16_weights

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies worth trying: a CPU has no second memory to offload to."""
        is_host = self.device is not None and self.device.type == "cpu"
        return tuple(policy for policy in POLICIES if not (is_host and policy == "offload"))


def models_of(recipe: Recipe, where: Place, *, is_cached: bool) -> Models:
    """Read or make what a recipe takes at a place; measuring and tracing take up to minutes."""
    path = cache_path(recipe, where)
    if is_cached and path.exists():
        try:
            return read_models(path)
        except InputError as error:
            warnings.warn(f"{error}; it is made anew", stacklevel=2)
    sizes = list_sizes(recipe.train.batch_size)
    traced = trace_recipe(
        recipe, sorted({sizes[0], sizes[-1]}), has_bf16=where.has_bf16, is_narrow=where.is_narrow(recipe),
        policies=where.policies,
    )  # fmt: skip
    memories = tuple(_with_all(recipe, where, memory) for memory in memories_at(traced, sizes).values())
    if where.peak is not None:
        predict = partial(predict_times, recipe, num_devices=where.num_devices, peak=where.peak)
        times, error = tuple(predict(memory=memory) for memory in memories), expected_error()
    else:
        times, error = _measure(recipe, where, sizes)
    models = Models(memories, times, error, where.policies)
    if is_cached:
        write_models(path, recipe, where, models)
    return models


def _with_all(recipe: Recipe, where: Place, memory: StepMemory) -> StepMemory:
    """Return the memory of one process with everything that lies beside the step."""
    if where.num_devices > 1 or recipe.speed.shard is not None:
        shard = recipe.speed.shard or ShardConfig()
        with torch.device("meta"):
            net = network_of(recipe, recipe.model.layers, has_bf16=where.has_bf16)
        units = UnitBytes.of(net, shard)
        if where.is_narrow(recipe):
            memory = widened_memory(memory, units, sum(p.numel() * p.element_size() for p in net.parameters()))
        memory = shared_memory(
            memory, units, shard, where.num_devices,
            is_accumulating=memory.micro_batch < recipe.train.batch_size,
        )  # fmt: skip
    held, encode = held_bytes(recipe, memory.gradients)
    return with_held(memory, held, encode_bytes=encode)


def _measure(recipe: Recipe, where: Place, sizes: Sequence[int]) -> tuple[tuple[MicroBatchTime, ...], float]:
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


def cache_folder() -> Path:
    """Return where traces and times are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wamlab" / "tune"


def cache_path(recipe: Recipe, where: Place) -> Path:
    """Return the file for everything that memory and time depend on: network, shapes, tricks, device, versions."""
    kept = {
        "version": VERSION, "wamlab": __version__, "torch": torch.__version__, "device": where.name,
        "devices": where.num_devices, "bf16": where.has_bf16, "threads": torch.get_num_threads(),
        "model": asdict(recipe.model), "window": asdict(recipe.window), "video": asdict(recipe.video),
        "text": asdict(recipe.text), "image": None if recipe.image is None else asdict(recipe.image),
        "canvas": [recipe.robot.canvas_height_px, recipe.robot.canvas_width_px], "features": recipe.features.mode,
        "train": {**asdict(recipe.train), "num_micro_batches": 0, "seed": 0, "num_steps": 0},
        "speed": {**asdict(recipe.speed), "recompute": "", "budget_gib": None}, "noise": asdict(recipe.noise),
    }  # fmt: skip
    return cache_folder() / f"{hashlib.sha256(repr(plain(kept)).encode()).hexdigest()[:24]}.json"


def write_models(path: Path, recipe: Recipe, where: Place, models: Models) -> None:
    """Keep what was traced and timed, with a checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = plain({
        "recipe": recipe.name, "device": where.name, "memories": [memory_to_dict(one) for one in models.memories],
        "times": [asdict(one) for one in models.times], "error": models.error, "policies": list(models.policies),
    })  # fmt: skip
    write_json(path, {**kept, "sha256": _sha256_of(kept)})


def read_models(path: Path) -> Models:
    """Read what was kept; raises InputError for a file that is not as it was written."""
    kept = read_json(path)
    if kept.pop("sha256", None) != _sha256_of(kept):
        raise InputError(f"{path}, a cache of the tuner, is damaged")
    return Models(
        tuple(memory_from_dict(values) for values in kept["memories"]),
        tuple(_time_from_dict(values) for values in kept["times"]), kept["error"], tuple(kept["policies"]),
    )  # fmt: skip


def _sha256_of(kept: Any) -> str:
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _time_from_dict(values: dict[str, Any]) -> MicroBatchTime:
    both = {n: {p: BlockTime(**one) for p, one in values[n].items()} for n in ("blocks", "lasts")}
    return MicroBatchTime(**{**values, **both})
