"""What others do about memory: all blocks alike, each k-th one, torch's knob and solver, accelerate's batches."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tuner_parts.trainer import Setting, Trainer, Way, loss, sample_of  # pyright: ignore[reportMissingImports]

from wamlab.model.wam import WorldActionModel
from wamlab.speed.live_memory import LiveMemory, tensors_of
from wamlab.speed.recompute_plan import RecomputePlan

KNOB = (0.75, 0.5, 0.25, 0.1, 0.0)  # torch._functorch.config.activation_memory_budget


def every_kth(setting: Setting) -> list[Way]:
    """Return the plans that recompute each k-th block."""
    layers = setting.config.layers
    plans = {RecomputePlan(tuple("keep" if index % k else "full" for index in range(layers))) for k in range(1, layers)}
    return [(size, plan) for size in setting.sizes for plan in sorted(plans, key=str)]


def all_or_nothing(setting: Setting) -> list[Way]:
    plans = [RecomputePlan.uniform(policy, setting.config.layers) for policy in ("keep", "full")]
    return [(size, plan) for size in setting.sizes for plan in plans]


@dataclass(frozen=True)
class KnobPoint:
    """What torch's partitioner does with a budget, beside its own compiled form without one."""

    budget: float
    saved_bytes: int  # fewer, from forward to backward
    slowdown: float


def knob_of_torch(setting: Setting) -> list[KnobPoint]:
    """Compile the blocks for each budget, without generated code; one micro-batch, everything kept by ourselves.

    Each form is timed in turn with the eager network, as its own compilations cannot live side by side. Slowdowns are
    relative to the same backend with everything kept, which alone takes some third longer than the eager network.
    """
    import torch._functorch.config as config

    reference, way = Trainer(setting), (setting.batch_size, RecomputePlan.uniform("keep", setting.config.layers))
    found: dict[float, tuple[int, float]] = {}
    for budget in (1.0, *KNOB):
        torch._dynamo.reset()
        with config.patch(activation_memory_budget=budget):
            trainer = Trainer(setting)
            for block in trainer.net.blocks:
                block.compile(backend="aot_eager_decomp_partition", dynamic=False)
            trainer.step(way)
            shares = [trainer.step(way) / reference.step(way) for _ in range(setting.num_last_rounds)]
            found[budget] = (_saved_bytes(trainer), statistics.median(shares))
    torch._dynamo.reset()
    whole, base = found.pop(1.0)
    return [KnobPoint(budget, whole - saved, share / base) for budget, (saved, share) in found.items()]


def _saved_bytes(trainer: Trainer) -> int:
    """Return the bytes that one forward pass of the batch keeps for its backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in trainer.net.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = loss(trainer.net, trainer.batch)
    total.backward()
    trainer.optimizer.zero_grad(set_to_none=True)
    return sum(saved.values())


def batch_size_of_accelerate(trainer: Trainer, layers: int, budget_bytes: int) -> Way | None:
    """Let ``accelerate.find_executable_batch_size`` shrink the micro-batch until a step with everything kept fits."""
    from accelerate.utils.memory import find_executable_batch_size  # pyright: ignore[reportMissingImports]

    plan = RecomputePlan.uniform("keep", layers)

    def attempt(batch_size: int) -> int:
        held = tensors_of(trainer.net, trainer.optimizer, trainer.batch)
        try:
            with LiveMemory(held, budget_bytes=budget_bytes):
                trainer.step((batch_size, plan))
        except torch.OutOfMemoryError:
            trainer.optimizer.zero_grad(set_to_none=True)
            raise RuntimeError("CUDA out of memory.") from None  # what it looks for
        return batch_size

    try:
        return find_executable_batch_size(attempt, starting_batch_size=len(trainer.batch))(), plan
    except RuntimeError:
        return None


def has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None


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
