"""Training steps, each a trick more: what is the same, and what it takes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sizes import Size, example_of, open_net, with_layers  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.optim import AdamW

from wamlab.flow import flow_loss
from wamlab.model.flops import count_flops
from wamlab.speed.compile import compile_report, compiled, mark_step
from wamlab.speed.graph import captured
from wamlab.speed.peaks import measure_matmul_peak, peak_of
from wamlab.speed.recompute import with_recompute
from wamlab.speed.update import set_rate, with_tensor_rates
from wamlab.types import FlowExample

# Largest differences, relative, from eager float32 steps. Compiled kernels add in another order; graphs replay the very
# kernels of eager steps, and recomputing repeats them, but sums by atomic additions differ between any two runs.
FLOAT32_LOSS, FLOAT32_GRADIENT, UPDATED_LOSS = 1e-5, 1e-4, 1e-3
# In bfloat16 eager steps themselves differ by their rounding; a trick may differ by half as much again, as where
# a compiled kernel rounds is not where an eager one does.
BFLOAT16_SHARE = 1.5
HALF_COMPILER = "aot_eager_decomp_partition"  # on a CPU, where the other half takes a minute
NUM_TIMED = 3


def backend_of(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else HALF_COMPILER


def changed(net: Any, name: str, device: torch.device) -> Any:
    """Apply the tricks that a variant's name lists, innermost first."""
    if "recompute" in name:
        net = with_recompute(net)
    if "compiled" in name:
        mode = "reduce-overhead" if "reduce-overhead" in name else "default"
        net = compiled(net, mode=mode, is_strict=True, backend=backend_of(device))
    return net


def backward_of(net: nn.Module, device: torch.device, *, has_bf16: bool) -> Callable[[FlowExample], Tensor]:
    def backward(example: FlowExample) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=has_bf16):
            loss = flow_loss(net, example).total  # pyright: ignore[reportArgumentType]
        loss.backward()
        return loss.detach()

    return backward


LAWS = ("recompute", "compiled", "compiled, recompute", "graph", "compiled, graph", "compiled, reduce-overhead")
LAWS_OF_CPU = ("recompute", "compiled, recompute")


def laws(size: Size, device: torch.device) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield checks: loss and gradients, added up over three micro-batches, equal those of eager steps."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    exact = _accumulated(size, "eager", device, "float32")
    for precision in ("float32", "bfloat16"):
        limits = FLOAT32_LOSS, FLOAT32_GRADIENT
        if precision == "bfloat16":
            rounded = _differences(exact, _accumulated(size, "eager", device, precision))
            limits = tuple(BFLOAT16_SHARE * limit for limit in rounded)
        for name in LAWS if device.type == "cuda" else LAWS_OF_CPU:

            def check(name: str = name, precision: str = precision, limits: tuple[float, ...] = limits) -> dict:
                loss, gradient = _differences(exact, _accumulated(size, name, device, precision))
                is_kept = loss <= max(limits[0], FLOAT32_LOSS) and gradient <= limits[1]
                return {"loss": loss, "gradient": gradient, "limits": limits, "is_kept": is_kept}

            yield f"{name}, {precision}", check
    if device.type == "cuda":
        yield "graph of whole steps, float32", lambda: _check_updates(size, device)


def _differences(wanted: tuple[list[float], list[Tensor]], found: tuple[list[float], list[Tensor]]) -> tuple:
    """Return the largest relative difference of losses, and that of all gradients as one vector."""
    (losses, gradients), (own_losses, own_gradients) = wanted, found
    loss = max(abs(a - b) / abs(a) for a, b in zip(losses, own_losses, strict=True))
    pairs = zip(gradients, own_gradients, strict=True)
    squares = sum(float((a - b).double().square().sum()) for a, b in pairs)
    norm = sum(float(a.double().square().sum()) for a in gradients)
    return loss, (squares / norm) ** 0.5


def _check_updates(size: Size, device: torch.device) -> dict[str, Any]:
    """Compare the losses of six AdamW steps, each with another rate, four of them replayed."""
    losses: list[list[float]] = []
    for name in ("eager", "graph"):
        step, optimizer = _whole_step(size, name, device, has_bf16=False)
        losses.append([])
        for index in range(6):
            set_rate(optimizer, 1e-3 / (1 + index))
            losses[-1].append(step(example_of(size, 2, device, index)).item())
    loss = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    return {"loss": loss, "gradient": 0.0, "limits": (UPDATED_LOSS, 0.0), "is_kept": loss <= UPDATED_LOSS}


def _accumulated(size: Size, name: str, device: torch.device, precision: str) -> tuple[list[float], list[Tensor]]:
    net = changed(open_net(size.config, device), name, device)
    backward = backward_of(net, device, has_bf16=precision == "bfloat16")
    if "graph" in name:
        backward = captured(backward, device=device, watched=dict(net.named_parameters()), num_warmups=2)
    examples = [example_of(size, 2, device, seed) for seed in range(3)]
    for example in examples if name != "eager" else []:  # what is not captured yet, or not compiled, gets ready
        mark_step()
        backward(example)
    net.zero_grad(set_to_none=False)
    losses = []
    for example in examples:
        mark_step()
        losses.append(backward(example).item())
    return losses, [p.grad.clone() for p in net.parameters() if p.grad is not None]


VARIANTS = ("eager", "recompute", "compiled", "compiled, graph", "compiled, recompute", "compiled, recompute, graph")
VARIANTS_OF_CPU = ("eager", "compiled, recompute")


def steps(size: Size, device: torch.device) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield measurements of whole steps (forward, backward, clipping, AdamW): float32 weights, bfloat16 products."""
    peak = peak_of(device)
    peak_flops = peak.bf16_tflops * 1e12 if peak else measure_matmul_peak(device)
    for micro_batch in size.micro_batches:
        for name in VARIANTS if device.type == "cuda" else VARIANTS_OF_CPU:

            def measure(micro_batch: int = micro_batch, name: str = name) -> dict[str, Any]:
                return _scaled(size, micro_batch, name, device, peak_flops)

            yield f"micro-batch {micro_batch}, {name}", measure


def _scaled(size: Size, micro_batch: int, name: str, device: torch.device, peak_flops: float) -> dict[str, Any]:
    """Measure with 2 and 4 layers, then with as many as fit; go on to all layers along the last two."""
    wanted = size.config.layers
    shallow, middle = (_measured(with_layers(size, depth), micro_batch, name, device) for depth in (2, min(4, wanted)))
    deep, depth = middle, min(4, wanted)
    if device.type == "cuda":
        each = (middle["peak_gib"] - shallow["peak_gib"]) / 2
        free = 0.9 * torch.cuda.get_device_properties(device).total_memory / 2**30
        fitting = min(wanted, int(2 + (free - shallow["peak_gib"]) / max(each, 1e-3)))
        if fitting > 4:
            try:
                deep, depth = _measured(with_layers(size, fitting), micro_batch, name, device), fitting
            except torch.cuda.OutOfMemoryError:  # the estimate was too bold; what was measured stands
                release()
    below, low = (middle, 4) if depth > 4 else (shallow, 2)
    each_s = (deep["step_s"] - below["step_s"]) / max(1, depth - low)
    each_gib = (deep["peak_gib"] - below["peak_gib"]) / max(1, depth - low)
    step_s = deep["step_s"] + (wanted - depth) * each_s
    flops = count_flops(size.config, size.window).train
    return {
        "samples_per_s": micro_batch / step_s,
        "mfu": micro_batch * flops / step_s / peak_flops,
        "step_s": step_s,
        "peak_gib": deep["peak_gib"] + (wanted - depth) * each_gib,
        "layers": f"{depth} of {wanted}" + ("" if depth == wanted else ", extrapolated"),
        "is_extrapolated": depth < wanted,
        "first_steps_s": shallow["first_steps_s"],
        "measured": {"2": shallow, str(min(4, wanted)): middle, str(depth): deep},
    }


def _whole_step(size: Size, name: str, device: torch.device, *, has_bf16: bool) -> tuple[Any, AdamW]:
    """Return forward, backward, clipping and AdamW as one step, and its optimiser."""
    net = changed(open_net(size.config, device), name, device)
    optimizer = AdamW(net.parameters(), lr=1e-5, fused=True, capturable=device.type == "cuda")
    with_tensor_rates(optimizer)
    backward = backward_of(net, device, has_bf16=has_bf16)

    def whole_step(example: FlowExample) -> Tensor:
        loss = backward(example)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    if "graph" not in name:
        return whole_step, optimizer
    watched = dict(net.named_parameters())
    return captured(whole_step, device=device, watched=watched, optimizers=[optimizer]), optimizer


def _measured(size: Size, micro_batch: int, name: str, device: torch.device) -> dict[str, Any]:
    release()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step, _ = _whole_step(size, name, device, has_bf16=True)
    example = example_of(size, micro_batch, device)
    start_s, since_s = time.perf_counter(), time.time()
    for _ in range(3 if "graph" in name else 2):
        step(example)
    finish(device)
    first_s = time.perf_counter() - start_s
    seconds = []
    for _ in range(NUM_TIMED):
        start_s = time.perf_counter()
        loss = step(example)
        finish(device)
        seconds.append(time.perf_counter() - start_s)
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss.item()}")
    report = compile_report(since_s)
    return {
        "step_s": statistics.median(seconds),
        "slowest_s": max(seconds),
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
        "first_steps_s": first_s,
        "num_compilations": report.num_compilations,
        "compile_s": report.cold_s + report.warm_s,
    }


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
