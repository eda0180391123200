"""Predicted against measured peaks of one of several processes that share a network with FSDP2.

The other processes are torch's fake ones: messages carry nothing, buffers are real. ``python
tests/random_shared_memory.py 6 [bf16]`` prints the errors of six networks with three settings each.
"""

import random
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from random_memory import (  # pyright: ignore[reportMissingImports]
    CACHES,
    Case,
    example_of,
    optimizer_of,
    sizes_of,
    update,
)
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from wamlab.flow import flow_loss
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.speed.activation_memory import trace_step_memory
from wamlab.speed.config import ShardConfig
from wamlab.speed.live_memory import LiveMemory
from wamlab.speed.offload import is_on_host
from wamlab.speed.recompute import with_recompute
from wamlab.speed.recompute_plan import POLICIES, RecomputePlan
from wamlab.speed.shard import make_mesh, sharded
from wamlab.speed.shard_memory import UnitBytes, shared_memory
from wamlab.speed.tree import flat
from wamlab.types import FlowExample

WORLD = 4


class ResizedMemory(LiveMemory):
    """As ``LiveMemory``, but with storages as large as they are now: FSDP2 frees weights by resizing them."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        super().__init__(held)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations come later
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves((output, args)):
            if isinstance(value, Tensor):
                self._note(value)
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in list(self.storages)))
        return output

    def _note(self, tensor: Tensor) -> None:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if not is_on_host(storage):
            self.storages.add(storage)


@contextmanager
def fake_processes(number: int = WORLD) -> Iterator[None]:
    """Be the first of so many processes for the body of a ``with`` statement."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shared_cases(
    number: int, seed: int = 0, *, has_bf16: bool = False, settings_each: int = 3, policies: Sequence[str] = POLICIES
) -> Iterator[Case]:
    """Yield random steps inside ``fake_processes``; each network is traced once."""
    draw = random.Random(seed)

    def loss(net: Any, example: FlowExample) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16):
            return flow_loss(net, example).total

    for _ in range(number):
        config, size, windows = sizes_of(draw), draw.randint(1, 6), draw.randint(1, 3)
        loss(WorldActionModel(config), example_of(1, windows))
        memory = trace_step_memory(
            partial(_net_of, config), loss, example_of(1, windows), num_blocks=config.layers, micro_batch=size,
            make_optimizer=optimizer_of, update=update, policies=policies, caches=CACHES,
        )  # fmt: skip
        for _ in range(settings_each):
            shard = ShardConfig(num_kept=draw.choice((0, 1)), num_prefetched=draw.choice((0, 1, 2)))
            plan = RecomputePlan(tuple(draw.choice(policies) for _ in range(config.layers)))
            parts = draw.choice((1, 1, 2, 3))
            with torch.device("meta"):
                units = UnitBytes.of(WorldActionModel(config), shard)
            own = shared_memory(memory, units, shard, WORLD, is_accumulating=parts > 1)
            yield Case(
                f"{config.layers} blocks of {config.dim}, {parts} x {size} samples, {shard.num_kept} kept, "
                f"{shard.num_prefetched} ahead: {plan}",
                own.peak(plan, num_micro_batches=parts),
                _measured(config, shard, plan, loss, example_of(size * parts, windows), parts),
            )


def _net_of(config: WAMConfig, num_blocks: int) -> WorldActionModel:
    return WorldActionModel(replace(config, layers=num_blocks))


def _measured(
    config: WAMConfig, shard: ShardConfig, plan: RecomputePlan, loss: Any, example: FlowExample, parts: int
) -> int:
    net = with_recompute(WorldActionModel(config), plan)
    net = sharded(net, make_mesh(shard, "cpu", WORLD), shard)
    optimizer, size = optimizer_of(net), len(example) // parts

    def step() -> None:
        for part in range(parts):
            net.set_requires_gradient_sync(part == parts - 1)  # pyright: ignore[reportCallIssue]
            loss(net, example[part * size : (part + 1) * size]).backward()
        update(net, optimizer)
        optimizer.zero_grad(set_to_none=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of outputs that are views
        step()
        for cache in CACHES:
            cache.cache_clear()
        held: list[Tensor] = [*net.parameters()]
        flat([list(optimizer.state.values()), example], held)
        with ResizedMemory(held) as memory:
            step()
    return memory.peak_bytes


if __name__ == "__main__":
    torch.set_num_threads(1)
    with fake_processes():
        found = list(shared_cases(int(sys.argv[1]), has_bf16="bf16" in sys.argv))
    for case in sorted(found, key=lambda case: case.error):
        print(f"{case.error:+8.4%} {case.measured_bytes:10d}  {case.name}")
    print(f"{len(found)} cases: {min(c.error for c in found):+.4%} to {max(c.error for c in found):+.4%}")
