"""The step predictor held against a step of this machine's CPU: every constant measured here, none fitted."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from wamlab.flow import flow_loss
from wamlab.model.flops import count_flops
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.recipes.config import Recipe, tiny
from wamlab.recipes.methods import BlockCode
from wamlab.recipes.plan import window_of
from wamlab.speed.peaks import measure_call_s, measure_matmul_peak
from wamlab.speed.roofline import Achieved, Limits, Phase, time_phase
from wamlab.train import noised_examples
from wamlab.types import Batch

# Of an eager block in float32 throughout, where nothing is widened: counted on meta tensors like those of `methods`.
EAGER_FLOAT32 = BlockCode(84, 351, 88, 271)


@dataclass(frozen=True)
class CpuBacktest:
    """Forward and backward of a small network, predicted and measured."""

    predicted_s: int | float
    measured_s: int | float
    matmul_gflops: int | float  # of square products of the network's width
    attention_gflops: int | float  # of a call of its size, forward and backward
    memory_gb_s: int | float
    host_us: int | float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def __str__(self) -> str:
        return (
            f"this CPU, tiny, forward and backward in float32: measured {self.measured_s:.3f} s, predicted "
            f"{self.predicted_s:.3f} s, {self.error:+.0%} (ceilings: {self.matmul_gflops:.0f} GFLOP/s of products, "
            f"{self.attention_gflops:.0f} of attention, {self.memory_gb_s:.0f} GB/s, {self.host_us:.0f} us a kernel)"
        )


def backtest_cpu(recipe: Recipe | None = None, *, batch_size: int = 16, seconds: int | float = 2.0) -> CpuBacktest:
    """Predict and measure forward and backward of a recipe's network on this CPU."""
    recipe = recipe or tiny()
    config, num_text = recipe.model, recipe.model.text_len // 2
    flops = count_flops(config, window_of(recipe, text_tokens=num_text))
    matmul, attention, memory, host_s = _ceilings(config, batch_size, flops.tokens)
    limits = Limits(matmul, memory, 1.0, 1)
    reached = Achieved(
        matmul=1.0, matmul_half_gflop=0.0, attention=attention / matmul, memory=1.0, host_us=host_s * 1e6
    )
    width = 4.0 * batch_size * flops.tokens * config.dim
    predicted = sum(
        time_phase(
            Phase(
                name,
                matmul_flops=factor * batch_size * (flops.forward - flops.attention),
                attention_flops=factor * batch_size * flops.attention,
                bytes_moved=config.layers * passes * width,
                launches=config.layers * kernels,
                is_serial=True,  # a CPU is its own host
            ),
            limits,
            reached,
        ).seconds
        for name, factor, kernels, passes in (
            ("forward", 1.0, EAGER_FLOAT32.forward_kernels, EAGER_FLOAT32.forward_passes),
            ("backward", 2.0, EAGER_FLOAT32.backward_kernels, EAGER_FLOAT32.backward_passes),
        )
    )
    measured = _measure_s(recipe, batch_size, num_text, seconds)
    return CpuBacktest(predicted, measured, matmul / 1e9, attention / 1e9, memory / 1e9, host_s * 1e6)


def _ceilings(config: WAMConfig, batch_size: int, num_tokens: int) -> tuple[float, float, float, float]:
    """Return FLOP/s of products and of attention, bytes/s of elementwise kernels and seconds of a small kernel.

    Each is timed by itself on tensors of the network's size; elementwise kernels as a norm, a scaling by broadcast
    values, an activation and a widened copy, which a CPU computes more slowly than it moves their bytes.
    """
    tokens = torch.randn(batch_size, num_tokens, config.dim)
    matmul = measure_matmul_peak("cpu", torch.float32, size=max(256, config.dim), seconds=0.3)
    query = torch.randn(batch_size, config.heads, num_tokens, config.head_dim, requires_grad=True)
    attend_s = measure_call_s(
        lambda: F.scaled_dot_product_attention(query, query, query).sum().backward(), "cpu", seconds=0.3
    )
    attention = 3 * 4 * batch_size * num_tokens**2 * config.dim / attend_s
    share = torch.randn(batch_size, 1, config.dim)
    kernels = (
        lambda: F.layer_norm(tokens, tokens.shape[-1:]),
        lambda: tokens * share,
        lambda: F.gelu(tokens, approximate="tanh"),
        lambda: tokens.transpose(1, 2).contiguous(),
    )
    moved_s = sum(measure_call_s(kernel, "cpu", seconds=0.1) for kernel in kernels)
    small = torch.randn(8, requires_grad=True)
    host_s = measure_call_s(lambda: (small * small).sum().backward(), "cpu", seconds=0.1) / 6  # kernels of it
    return matmul, attention, 2 * len(kernels) * tokens.nbytes / moved_s, host_s


def _measure_s(recipe: Recipe, batch_size: int, num_text: int, seconds: int | float) -> float:
    config, window, generator = recipe.model, window_of(recipe), torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(batch_size, *shape, generator=generator)

    frames = 1 + window.num_blocks * config.latents_per_block
    size = (window.latent_height, window.latent_width)
    extra = config.in_channels - config.latent_channels
    actions = random(window.num_blocks * window.actions_per_block, config.max_action_dim)
    batch = Batch(
        latents=random(frames, config.latent_channels, *size),
        actions=actions,
        action_mask=torch.ones_like(actions, dtype=torch.bool),
        state=random(window.num_blocks, config.max_state_dim),
        text=random(num_text, config.text_dim),
        condition=random(frames, extra, *size) if extra else None,
    )
    net = WorldActionModel(config)
    example = next(noised_examples([batch], seed=0, config=recipe.noise))

    def step() -> None:
        flow_loss(net, example, config=recipe.noise).total.backward()

    step()
    times, end_s = [], time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(times) < 3:
        start_s = time.process_time()  # of this process alone: other work on the machine is left out
        step()
        times.append((time.process_time() - start_s) / torch.get_num_threads())
    return min(times)  # as the ceilings are
