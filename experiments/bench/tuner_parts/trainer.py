"""A network of which one step can be computed in any way, timed and followed by its memory."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from wamlab.flow import flow_loss, with_noise
from wamlab.model.positions import place_code, window_rotation
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.speed.live_memory import measure_peak
from wamlab.speed.recompute import with_recompute
from wamlab.speed.recompute_plan import RecomputePlan
from wamlab.speed.step_time import as_large
from wamlab.speed.update import clip_gradients
from wamlab.types import Batch, FlowExample

CACHES = (window_rotation, place_code)
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
    num_pair_rounds: int  # of a budget's choice and the best found, side by side
    num_cases: int  # random networks, micro-batches and plans whose peak is predicted and measured

    @property
    def sizes(self) -> list[int]:
        return [size for size in range(1, self.batch_size + 1) if self.batch_size % size == 0]


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
