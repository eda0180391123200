"""Run by test_compile.py in a process of its own: compilers cannot read functions whose annotations are checked.

``compiled_law.py inductor CACHE`` compiles one block with the real compiler, keeping it in a folder, and says what that
took; ``compiled_law.py laws`` checks everything else with its first half, which traces, decomposes and partitions
but runs torch's own kernels: a tenth of the time.
"""

import copy
import json
import sys
import time
import warnings

import torch
from small_network import batch_of, open_net  # pyright: ignore[reportMissingImports]
from torch import nn
from torch.optim import AdamW

from wamlab.flow import flow_loss, with_noise
from wamlab.model.lora import LoraConfig, with_lora
from wamlab.speed.compile import (
    compile_cache,
    compile_report,
    compiled,
    compiled_encoder,
    compiled_step,
    expect_no_recompiles,
    mark_step,
)
from wamlab.speed.recompute import with_recompute
from wamlab.speed.update import set_rate
from wamlab.types import FlowExample

HALF = "aot_eager_decomp_partition"


def example_of(seed: int, num_samples: int = 2) -> FlowExample:
    generator = torch.Generator().manual_seed(seed)
    return with_noise(batch_of(generator, num_samples), generator)


def difference(net: nn.Module, fast: nn.Module, example: FlowExample) -> float:
    """Return the largest difference of the losses and, relative to their size, of the gradients."""
    losses = []
    for one in (net, fast):
        one.zero_grad()
        loss = flow_loss(one, example).total  # pyright: ignore[reportArgumentType]
        loss.backward()
        losses.append(loss.item())
    pairs = [(p.grad, q.grad) for p, q in zip(net.parameters(), fast.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    found = [((a - b).norm() / (1e-3 + a.norm())).item() for a, b in pairs if a is not None and b is not None]
    return max(abs(losses[0] - losses[1]), *found)


def inductor(cache: str) -> dict:
    compile_cache(cache)
    start_s = time.perf_counter()
    net = open_net(1)
    found = difference(net, compiled(copy.deepcopy(net), is_strict=True), example_of(1))
    report = compile_report()
    return {
        "difference": found, "seconds": time.perf_counter() - start_s,
        "num_compilations": report.num_compilations, "cold_s": report.cold_s, "warm_s": report.warm_s,
    }  # fmt: skip


def blocks_law() -> dict:
    """Equal blocks share a compilation, alone, with recompute below or above, with adapters, in a copy."""
    found = {}
    for name in ("recompute", "compiled below recompute", "adapters, recompute"):
        torch._dynamo.reset()
        start_s = time.time()
        net = open_net(4)
        if "adapters" in name:
            with_lora(net, LoraConfig(trained=("action_encoder*",)), torch.Generator().manual_seed(1))
            for parameter_name, p in net.named_parameters():
                if parameter_name.endswith("lora_B"):
                    nn.init.normal_(p, std=0.1)
        fast = copy.deepcopy(net)
        fast = with_recompute(fast) if name.endswith("recompute") and "below" not in name else fast
        fast = compiled(fast, backend=HALF, is_strict=True)
        fast = with_recompute(fast) if "below" in name else fast
        worst = difference(net, fast, example_of(1))
        with expect_no_recompiles():
            mark_step()
            worst = max(worst, difference(net, fast, example_of(2)))
            twin = copy.deepcopy(fast)
            with torch.no_grad():
                for p, q in zip(fast.parameters(), twin.parameters(), strict=True):
                    p.zero_()
                    assert q.any()
            worst = max(worst, difference(net, twin, example_of(2)))
        found[name] = {"difference": worst, "num_compilations": compile_report(start_s).num_compilations}
    return found


def saved_bytes(net: nn.Module, example: FlowExample) -> int:
    """Return what a forward pass keeps for the backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = flow_loss(net, example).total  # pyright: ignore[reportArgumentType]
    total.backward()
    return sum(kept.values())


def budget_law() -> dict:
    """The less compiled blocks may keep the less they keep, and it changes no number."""
    found = {}
    net = open_net(1)
    for budget in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        fast = compiled(copy.deepcopy(net), backend=HALF, is_strict=True, activation_budget=budget)
        worst = difference(net, fast, example_of(1))
        found[str(budget)] = {"difference": worst, "saved_bytes": saved_bytes(fast, example_of(1))}
    return found


def recompiles_law() -> dict:
    """A new shape is one more compilation a form, counted as a recompile and refused, by name, where told."""
    torch._dynamo.reset()
    net = compiled(open_net(2), backend="eager")  # what is compiled anew is decided before any kernel is made
    start_s = time.time()
    flow_loss(net, example_of(1, 2)).total.backward()
    flow_loss(net, example_of(1, 3)).total.backward()
    report = compile_report(start_s)
    try:
        with expect_no_recompiles():
            flow_loss(net, example_of(1, 4))
        said = ""
    except RuntimeError as error:
        said = str(error)
    return {"compilations": report.num_compilations, "recompiles": report.num_recompiles, "refused": said}


def failing(graph: object, inputs: object) -> object:
    raise RuntimeError("there is no such instruction")


def fallback_law() -> dict:
    """What cannot be compiled runs eagerly, says so once, and raises where told; a fault of the input stays itself."""
    torch._dynamo.reset()
    net = open_net(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = compiled(copy.deepcopy(net), backend=failing)  # pyright: ignore[reportArgumentType]
        found = max(difference(net, fast, example_of(seed)) for seed in (1, 2))
    said = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    strict = compiled(copy.deepcopy(net), backend=failing, is_strict=True)  # pyright: ignore[reportArgumentType]
    raised = ""
    try:
        flow_loss(strict, example_of(1))
    except RuntimeError as error:
        raised = type(error).__name__
    torch._dynamo.reset()
    part = compiled(open_net(1), backend=HALF)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            part.layers[0].self_attn.q = nn.Linear(7, 7)
            flow_loss(part, example_of(1))
            own = ""
        except RuntimeError as error:
            own = type(error).__name__
    return {"difference": found, "said": said, "raised": raised, "own": own, "fallbacks": compile_report().fallbacks}


class Cut(nn.Module):
    """A layer that no compiler takes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x.relu()


def encoder_law() -> dict:
    torch._dynamo.reset()
    start_s = time.time()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Cut(), Cut(), Cut()))
    x = torch.randn(3, 8)
    with torch.no_grad():
        wanted = net(x)
        found = compiled_encoder(copy.deepcopy(net), "1", backend=HALF)(x)
        parts = compile_report(start_s)
        found = torch.stack([found, compiled_encoder(copy.deepcopy(net), backend=HALF)(x)])
    worst = (found - wanted).abs().max().item()
    return {"difference": worst, "compilations of 3 parts": parts.num_compilations, "breaks": parts.num_graph_breaks}


def optimizer_law() -> dict:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    nets, inputs = [net, copy.deepcopy(net)], torch.randn(5, 3, 8)
    optimizers = [AdamW(net.parameters(), lr=1e-3, weight_decay=0.1) for net in nets]
    steps = [optimizers[0].step, compiled_step(optimizers[1], backend=HALF, is_strict=True)]

    def update(index: int) -> None:
        for net, optimizer, step in zip(nets, optimizers, steps, strict=True):
            set_rate(optimizer, 1e-3 / (1 + index))
            net.zero_grad()
            net(inputs[index]).square().mean().backward()
            step()

    update(0)
    update(1)
    with expect_no_recompiles():
        update(2)
        update(3)
    for group in optimizers[1].param_groups:
        group.update(foreach=None, fused=None, capturable=False)
    steps[1] = compiled_step(optimizers[1], backend=failing)  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings(record=True):
        update(4)
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    return {"difference": max((p - q).abs().max().item() for p, q in pairs)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "inductor":
        print(json.dumps(inductor(sys.argv[2])))
    else:
        laws = (blocks_law, budget_law, recompiles_law, fallback_law, encoder_law, optimizer_law)
        print(json.dumps({law.__name__.removesuffix("_law"): law() for law in laws}))
