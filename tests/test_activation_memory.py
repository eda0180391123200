"""The peak of a step is known before it is done."""

from dataclasses import replace

import pytest
import torch
from random_memory import (  # pyright: ignore[reportMissingImports]
    CACHES,
    cases,
    example_of,
    optimizer_of,
)
from small_network import open_net  # pyright: ignore[reportMissingImports]

from wamlab.errors import InputError
from wamlab.flow import flow_loss
from wamlab.model.wam import WorldActionModel
from wamlab.speed.activation_memory import trace_step_memory
from wamlab.speed.live_memory import LiveMemory, measure_peak
from wamlab.speed.recompute import with_recompute
from wamlab.speed.recompute_plan import RecomputePlan


def test_live_memory_counts_a_storage_once_and_until_its_end() -> None:
    held = torch.zeros(100)
    with LiveMemory([held, held[:50]]) as memory:
        assert memory.live_bytes == 400
        one = held + 1
        view = one[3:]
        two = one * 2
        assert memory.live_bytes == 1200
        del one
        assert memory.live_bytes == 1200
        del view, two
        assert memory.live_bytes == 400 and memory.peak_bytes == 1200
    with pytest.raises(torch.OutOfMemoryError), LiveMemory([held], budget_bytes=700):
        _ = held + 1


def test_random_plans_are_predicted_within_five_percent() -> None:
    found = list(cases(6, plans_each=6))
    assert all(abs(case.error) < 0.05 for case in found), [(case.name, case.error) for case in found]


def test_uniform_plans_of_a_deeper_network_are_predicted_to_the_byte() -> None:
    example, policies = example_of(2, 1), ("keep", "full", "offload")

    def loss(net: torch.nn.Module, given: object) -> torch.Tensor:
        return flow_loss(net, given).total  # pyright: ignore[reportArgumentType]

    loss(open_net(1), example)  # constants of the loss are read once
    traced = trace_step_memory(
        open_weights, loss, example, num_blocks=5, micro_batch=2, make_optimizer=optimizer_of, policies=policies,
        caches=CACHES,
    )  # fmt: skip
    for policy in policies:
        plan = RecomputePlan.uniform(policy, 5)
        net = with_recompute(open_weights(5), plan)
        optimizer = optimizer_of(net)
        loss(net, example).backward()
        optimizer.step()
        optimizer.zero_grad()
        for cache in CACHES:
            cache.cache_clear()

        def step(net: torch.nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> None:
            loss(net, example).backward()
            optimizer.step()

        assert traced.peak(plan) == measure_peak(step, net, optimizer, example), policy
    with pytest.raises(InputError, match="for 4 blocks, but memory was traced for 5"):
        traced.peak(RecomputePlan.uniform("keep", 4))


CONFIG = open_net(1).config


def open_weights(num_blocks: int) -> torch.nn.Module:
    return WorldActionModel(replace(CONFIG, layers=num_blocks))
