"""Predicted against measured peaks of training steps, over random networks, micro-batches and plans.

``python tests/random_memory.py 80 [bf16]`` prints the errors of 80 of them.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from small_network import batch_of  # pyright: ignore[reportMissingImports]
from torch import nn
from torch.optim import AdamW, Optimizer

from wamlab.flow import flow_loss, with_noise
from wamlab.model.positions import place_code, window_rotation
from wamlab.model.presets import tiny
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.speed.activation_memory import StepMemory, trace_step_memory
from wamlab.speed.live_memory import measure_peak
from wamlab.speed.recompute import with_recompute
from wamlab.speed.recompute_plan import POLICIES, RecomputePlan
from wamlab.speed.update import clip_gradients
from wamlab.types import FlowExample

CACHES = (window_rotation, place_code)


@dataclass(frozen=True)
class Case:
    """One step that was predicted and then done."""

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Return the share by which the prediction is too high; below 0 too low."""
        return self.predicted_bytes / self.measured_bytes - 1


def sizes_of(draw: random.Random) -> WAMConfig:
    heads = draw.choice((1, 2, 4))
    dim = heads * draw.choice((8, 16, 32))
    return tiny(
        dim=dim, layers=draw.randint(2, 9), heads=heads, ffn_dim=dim * draw.choice((2, 4)), mlp_dim=16,
        latent_channels=4, text_dim=8, text_len=draw.choice((3, 6)),
    )  # fmt: skip


def example_of(num_samples: int, num_blocks: int) -> FlowExample:
    generator = torch.Generator().manual_seed(1)
    return with_noise(batch_of(generator, num_samples, num_blocks), generator)


def optimizer_of(net: nn.Module) -> Optimizer:
    return AdamW(net.parameters(), fused=True)


def foreach_optimizer_of(net: nn.Module) -> Optimizer:
    return AdamW(net.parameters(), foreach=True)


def update(net: nn.Module, optimizer: Optimizer) -> None:
    clip_gradients(net.parameters(), 1.0)
    optimizer.step()


def cases(number: int, seed: int = 0, *, has_bf16: bool = False, plans_each: int = 4) -> Iterator[Case]:
    """Yield random steps; each network and micro-batch is traced once and tried with several plans."""
    draw = random.Random(seed)

    def loss(net: Any, example: FlowExample) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16):
            return flow_loss(net, example).total

    for index in range(number):
        if index % plans_each == 0:
            config, size, windows = sizes_of(draw), draw.randint(1, 6), draw.randint(1, 3)
            make_optimizer = draw.choice((optimizer_of, foreach_optimizer_of))
            real, optimizer = _prepared(config, make_optimizer, loss, windows)
            memory = _traced(config, loss, windows, size, make_optimizer)
        plan = RecomputePlan(tuple(draw.choice(POLICIES) for _ in range(config.layers)))
        parts = draw.choice((1, 1, 2, 3))
        yield Case(
            f"{config.layers} blocks of {config.dim}, {parts} x {size} samples: {plan}",
            memory.peak(plan, num_micro_batches=parts),
            _measured(with_recompute(real, plan), optimizer, loss, example_of(size * parts, windows), parts),
        )


def _prepared(config: WAMConfig, make_optimizer: Any, loss: Any, windows: int) -> tuple[nn.Module, Optimizer]:
    """Return a network and an optimiser that has its state."""
    net = WorldActionModel(config)
    optimizer = make_optimizer(net)
    loss(net, example_of(1, windows)).backward()
    optimizer.step()
    return net, optimizer


def _traced(config: WAMConfig, loss: Any, windows: int, size: int, make_optimizer: Any) -> StepMemory:
    def make_net(num_blocks: int) -> nn.Module:
        return WorldActionModel(replace(config, layers=num_blocks))

    return trace_step_memory(
        make_net, loss, example_of(1, windows), num_blocks=config.layers, micro_batch=size,
        make_optimizer=make_optimizer, update=update, caches=CACHES,
    )  # fmt: skip


def _measured(net: nn.Module, optimizer: Optimizer, loss: Any, example: FlowExample, parts: int) -> int:
    optimizer.zero_grad(set_to_none=True)
    for cache in CACHES:
        cache.cache_clear()
    size = len(example) // parts

    def step() -> None:
        for part in range(parts):
            loss(net, example[part * size : (part + 1) * size]).backward()
        update(net, optimizer)

    return measure_peak(step, net, optimizer, example)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = list(cases(int(sys.argv[1]), has_bf16="bf16" in sys.argv))
    for case in sorted(found, key=lambda case: case.error):
        print(f"{case.error:+8.4%} {case.measured_bytes:10d}  {case.name}")
    print(f"{len(found)} cases: {min(c.error for c in found):+.4%} to {max(c.error for c in found):+.4%}")
