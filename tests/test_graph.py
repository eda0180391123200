"""Captured steps: the numbers of the step itself, captured anew when something they rely on changes."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from replay_device import ReplayDevice  # pyright: ignore[reportMissingImports]
from test_exact_savings import CONFIG, example_of, open_net  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from wamlab.errors import InputError
from wamlab.flow import flow_loss
from wamlab.speed.graph import CapturedStep, captured
from wamlab.speed.update import set_rate, with_tensor_rates
from wamlab.types import FlowExample

SMALL = replace(CONFIG, layers=2, has_image=False)


def captured_here(step: Any, **options: Any) -> CapturedStep:
    found = captured(step, device=ReplayDevice(), **options)
    assert isinstance(found, CapturedStep)
    return found


def test_a_training_step_of_the_network_is_the_same_captured() -> None:
    """Forward, backward, clipping, AdamW with a rate that changes, in bfloat16 autocast, over other examples."""

    def step_of(net: nn.Module, optimizer: Optimizer) -> Any:
        def step(example: FlowExample) -> dict[str, Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = flow_loss(net, example)  # pyright: ignore[reportArgumentType]
            loss.total.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return {"loss": loss.total, "norm": norm}

        return step

    nets = [open_net(SMALL), open_net(SMALL)]
    optimizers = [with_tensor_rates(AdamW(net.parameters(), lr=1e-2, fused=True)) for net in nets]
    plain = step_of(nets[0], optimizers[0])
    fast = captured_here(
        step_of(nets[1], optimizers[1]), watched=dict(nets[1].named_parameters()), optimizers=optimizers[1:]
    )
    for index in range(6):
        for optimizer in optimizers:
            set_rate(optimizer, 1e-2 / (1 + index))
        example = example_of(SMALL, 2)
        example = replace(example, batch=replace(example.batch, text=example.batch.text * (1 + index)))
        wanted, found = plain(example), fast(example)
        for name in ("loss", "norm"):
            assert torch.equal(wanted[name], found[name]), (index, name)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q)
    report = fast.report()
    assert (report.num_calls, report.num_eager, report.num_replays) == (6, 2, 4)
    assert [(c.call, c.reason) for c in report.captures] == [(3, "first capture")]


def doubling(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize("is_set_to_none", [True, False])
def test_gradients_accumulate_over_micro_batches(is_set_to_none: bool) -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))]
    nets.append(copy.deepcopy(nets[0]))
    nets[0][0].bias.requires_grad_(False)
    nets[1][0].bias.requires_grad_(False)

    def backward(net: nn.Module, x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    fast = captured_here(partial(backward, nets[1]), watched=dict(nets[1].named_parameters()), num_warmups=1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for _ in range(4):
        for _ in range(3):
            x = torch.randn(5, 4)
            assert torch.equal(backward(nets[0], x), fast(x))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=is_set_to_none)
    assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    assert len(fast.report().captures) == 1
    assert nets[1][0].bias.grad is None


def test_what_differs_is_captured_anew_and_named() -> None:
    net = nn.Linear(4, 4, bias=False)

    def forward(x: Tensor, *, scale: float = 1.0) -> Tensor:
        return net(x) * scale

    fast = captured_here(forward, watched={"weight": net.weight}, num_warmups=1, max_graphs=8)
    x = torch.randn(2, 4)

    def twice(*args: Any, **kwargs: Any) -> None:
        for _ in range(3):
            assert torch.equal(fast(*args, **kwargs), forward(*args, **kwargs))

    twice(x)
    twice(torch.randn(3, 4))
    twice(torch.randn(3, 4), scale=2.0)
    with torch.no_grad():
        twice(torch.randn(3, 4), scale=2.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            twice(torch.randn(3, 4), scale=2.0)
    net.weight.data.mul_(3)  # values may change
    twice(x)
    net.weight.data = torch.randn(4, 4)  # addresses may not
    twice(x)
    net.weight.requires_grad_(False)
    twice(x)
    assert [c.reason for c in fast.report().captures] == [
        "first capture",
        "tensor 0 was ((2, 4), torch.float32, (4, 1)), is ((3, 4), torch.float32, (4, 1))",
        "the arguments have another form",
        "gradient mode was (True, False), is (False, False)",
        "autocast was False, is torch.bfloat16",
        "weight has moved",
        "what is trained was (True,), is (False,)",
    ]
    twice(x.double().float().mT.contiguous().mT)
    assert "(1, 2)" in fast.report().captures[-1].reason  # strides


def test_the_number_of_graphs_is_bounded() -> None:
    fast = captured_here(doubling, num_warmups=1, max_graphs=2)

    def call(*sizes: int) -> None:
        for size in sizes:
            x = torch.randn(size)
            assert torch.equal(fast(x), 2 * x)

    call(1, 1, 2, 2, 1, 2, 3, 3)  # 3 drops 1, the least recently used
    assert (len(fast.report().captures), fast.report().num_dropped) == (3, 1)
    call(2, 3)
    assert len(fast.report().captures) == 3
    with pytest.warns(RuntimeWarning, match="more than max_graphs 2 kinds of calls"):
        call(1, 1)
    assert fast.report().captures[-1].reason == "given up before, for others"
    fast.reset()
    assert fast.report().num_dropped == 4


def test_results_are_copies_unless_told() -> None:
    fresh, shared = (captured_here(doubling, num_warmups=1, has_fresh_outputs=fresh) for fresh in (True, False))
    one, two = torch.ones(3), torch.full((3,), 2.0)
    for fast, wanted in ((fresh, 2.0), (shared, 4.0)):
        fast(one)
        first = fast(one)
        fast(two)
        assert first.tolist() == [wanted] * 3


def test_random_numbers_go_on() -> None:
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]

    def noisy(generator: torch.Generator, x: Tensor) -> Tensor:
        return x + torch.randn(3, generator=generator)

    fast = captured_here(partial(noisy, generators[1]))
    for _ in range(5):
        x = torch.randn(3)
        assert torch.equal(noisy(generators[0], x), fast(x))


def test_trees_come_and_go_whole() -> None:
    def step(example: FlowExample, rest: dict[str, Any]) -> Any:
        return example.batch.latents + 1, [rest["a"] * 2, rest["name"]], example.seen

    fast = captured_here(step, num_warmups=1)
    for seed in range(3):
        example, rest = example_of(SMALL), {"a": torch.full((2,), float(seed)), "name": "x"}
        latents, (doubled, name), seen = fast(example, rest)
        assert torch.equal(latents, example.batch.latents + 1)
        assert (doubled.tolist(), name) == ([2.0 * seed] * 2, "x")
        assert type(seen) is type(example.seen)
        assert torch.equal(seen.video_noise_level, example.seen.video_noise_level)
    assert len(fast.report().captures) == 1


def test_what_cannot_be_captured_is_refused_in_a_sentence() -> None:
    def reads(x: Tensor) -> float:
        return x.sum().item()

    def renews(net: nn.Linear, x: Tensor) -> None:
        net.zero_grad(set_to_none=True)
        net(x).sum().backward()

    net = nn.Linear(3, 1)
    x = torch.ones(3)
    cases: list[tuple[Any, dict[str, Any], Any, str]] = [
        (reads, {}, x, "forbids reading values back to the host"),
        (partial(renews, net), {"watched": dict(net.named_parameters())}, x, "makes a new gradient of weight"),
        (doubling, {}, torch.ones(3, requires_grad=True), "requires a gradient: watch it instead"),
        (doubling, {}, torch.ones(3, device="meta"), "given a tensor on meta: move it there"),
        (doubling, {"optimizers": [AdamW(net.parameters())]}, x, "the learning rate of AdamW is no tensor on cpu"),
        (lambda x, _: x, {}, (x, {1, 2}), "plain values that can be compared"),
    ]
    for step, options, given, message in cases:
        fast = captured_here(step, num_warmups=1, **options)
        with pytest.raises(InputError, match=message):
            for _ in range(2):
                fast(*given) if isinstance(given, tuple) else fast(given)
    with pytest.raises(InputError, match="give at least 1 each"):
        captured_here(doubling, max_graphs=0)


def test_a_device_without_graphs_keeps_the_step() -> None:
    with pytest.warns(RuntimeWarning, match="cpu devices have no graphs"):
        assert captured(doubling, device="cpu") is doubling
    assert captured(doubling, device="cpu") is doubling  # said once
