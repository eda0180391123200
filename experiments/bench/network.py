"""Training forward and backward of the network against its plain form (``wamlab/model/plain.py``).

    wamlab bench network [--quick] [--json]

The configuration is a 27.8 M parameter network of the 5B's shape: 1,000 tokens a sample, text of 40 tokens padded to
64 or 512. Every variant has the parameters of the plain form and gives its gradients: to 1e-4 in float32, under bf16
autocast to its rounding. bf16 is measured where the CPU has it; the headline is in the training precision.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wamlab.flow import velocity_loss, with_noise
from wamlab.lab.table import Table
from wamlab.model.plain import plain_forward
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.speed.compare import Timing, compare
from wamlab.speed.compile import compiled, has_cpp_compiler
from wamlab.train import has_native_bf16
from wamlab.types import Batch, FlowExample, Net

CONFIG = WAMConfig(
    dim=384, layers=8, heads=6, ffn_dim=1536, latent_channels=48, text_dim=4096, text_len=64,
    latents_per_block=2, actions_per_block=24, max_blocks=4,
)  # fmt: skip
NUM_REAL_TEXT = 40
SIZES = {"text 64, batch 1": (64, 1), "text 512, batch 1": (512, 1), "text 64, batch 4": (64, 4)}
COMPILED = "wamlab, compiled"
LOWEST_COSINE = 0.99  # between bf16 gradients of two orders of rounding, over all parameters


def make_example(config: WAMConfig, batch_size: int) -> FlowExample:
    """Draw a training example of four blocks on a 10 x 20 latent grid."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(batch_size, *shape, generator=generator)

    num_actions = config.max_blocks * config.actions_per_block
    batch = Batch(
        latents=drawn(1 + config.max_blocks * config.latents_per_block, config.latent_channels, 10, 20),
        actions=drawn(num_actions, config.max_action_dim),
        action_mask=torch.ones(batch_size, num_actions, config.max_action_dim, dtype=torch.bool),
        state=drawn(config.max_blocks, config.max_state_dim),
        text=drawn(NUM_REAL_TEXT, config.text_dim),
    )
    return with_noise(batch, generator)


def train_step(net: WorldActionModel, forward: Net, example: FlowExample, *, has_bf16: bool) -> Callable[[], None]:
    """Return a call that computes the gradients of one step."""

    def step() -> None:
        for p in net.parameters():
            p.grad = None
        seen = example.seen
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16):
            found = forward(example.batch, seen)
        terms = velocity_loss(
            found, example.target, seen.video_noise_level, seen.action_noise_level, example.batch.action_mask
        )
        terms.total.backward()

    return step


def gradients(net: WorldActionModel, step: Callable[[], None]) -> dict[str, Tensor]:
    step()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def check_gradients(own: dict[str, Tensor], wanted: dict[str, Tensor], *, has_bf16: bool) -> float:
    """Return the largest relative difference of a parameter's gradient, in bf16 that of all parameters together."""
    differences = {key: (own[key] - wanted[key]).norm() for key in wanted}
    if not has_bf16:
        worst = max((differences[key] / wanted[key].norm().clamp(min=1e-6)).item() for key in wanted)
        assert worst < 1e-4, f"a gradient differs from the plain form's by {worst:.1e}"
        return worst
    a, b = (torch.cat([grads[key].flatten() for key in wanted]) for grads in (own, wanted))
    cosine = F.cosine_similarity(a, b, dim=0).item()
    assert cosine > LOWEST_COSINE, f"the gradient's direction differs from the plain form's: cosine {cosine:.4f}"
    return ((a - b).norm() / b.norm()).item()


def matmul_step(config: WAMConfig, batch_size: int, *, has_bf16: bool) -> Callable[[], None]:
    """Return the matrix products alone of one plain step, forward and backward: the limit of fusing all else."""
    num_tokens = batch_size * 1000
    dim, ffn = config.dim, config.ffn_dim
    hidden, wide = torch.randn(num_tokens, dim, requires_grad=True), torch.randn(num_tokens, ffn, requires_grad=True)
    square, up, down = (torch.randn(*shape, requires_grad=True) for shape in ((dim, dim), (ffn, dim), (dim, ffn)))

    @torch.autocast("cpu", torch.bfloat16, enabled=has_bf16)
    def step() -> None:
        for _ in range(config.layers):
            for _ in range(6):  # q, k, v, o; q and o of cross-attention
                F.linear(hidden, square).sum().backward()
            F.linear(hidden, up).sum().backward()
            F.linear(wide, down).sum().backward()

    return step


def measure_case(text_len: int, batch_size: int, *, has_bf16: bool, is_quick: bool) -> tuple[dict[str, Timing], float]:
    """Time every variant of one size and precision; return the timings and the worst gradient difference."""
    config = replace(CONFIG, text_len=text_len)
    net = WorldActionModel(config)
    for p in net.parameters():  # heads start at zero; gradients must reach everything
        if p.requires_grad and not p.any():
            torch.nn.init.normal_(p, std=0.02)
    example = make_example(config, batch_size)

    def step_of(net: WorldActionModel, forward: Net) -> Callable[[], None]:
        return train_step(net, forward, example, has_bf16=has_bf16)

    nets = {"wamlab": net}
    if has_cpp_compiler():
        nets[COMPILED] = copy.deepcopy(net) if is_quick else compiled(copy.deepcopy(net))
        for block in list(nets[COMPILED].layers)[:-1] if is_quick else ():  # the last takes as long again to compile
            block.compile(fullgraph=True, dynamic=False)
    plain = step_of(net, lambda batch, noised: plain_forward(net, batch, noised))
    steps = {name: step_of(own, own) for name, own in nets.items()}
    wanted = gradients(net, plain)
    worst = max(check_gradients(gradients(nets[name], step), wanted, has_bf16=has_bf16) for name, step in steps.items())
    variants = {"plain": plain, **steps, "matrix products alone": matmul_step(config, batch_size, has_bf16=has_bf16)}
    return compare(variants, num_rounds=2 if is_quick else 15, budget_s=60), worst


def run(*, is_quick: bool) -> dict[str, Any]:
    """Measure every case; return the figures and print a table a case.

    Quick: one case, in the training precision, all blocks but the last compiled.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start_s = time.perf_counter()
    figures: dict[str, Any] = {}
    precisions = ["bf16", "float32"] if has_native_bf16("cpu") else ["float32"]
    cases = [(size, precision) for precision in precisions for size in SIZES][: 1 if is_quick else None]
    for size, precision in cases:
        timings, worst = measure_case(*SIZES[size], has_bf16=precision == "bf16", is_quick=is_quick)
        case = f"{size}, {precision}"
        print(f"\n{case}: worst relative gradient difference {worst:.1e}")
        print(Table([timing.row() for timing in timings.values()]))
        best = COMPILED if COMPILED in timings else "wamlab"
        figures[f"speedup_vs_plain, {case}"] = timings[best].row()["speed-up, median"]
        figures[f"speedup_vs_plain, eager, {case}"] = timings["wamlab"].row()["speed-up, median"]
        figures[f"worst gradient difference, {case}"] = worst
    figures["speedup_vs_plain"] = figures[f"speedup_vs_plain, {cases[0][0]}, {cases[0][1]}"]
    figures["minutes"] = (time.perf_counter() - start_s) / 60
    return figures


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
