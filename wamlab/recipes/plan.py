"""Predict a recipe's step on devices that are not here: time, memory and what bounds it, before any is rented."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from wamlab.codec.flops import EncoderCost, image_cost, text_cost, video_cost
from wamlab.errors import InputError
from wamlab.model.flops import NetworkFlops, Window, count_flops, count_parameters
from wamlab.model.wam import WAMConfig
from wamlab.recipes.config import Recipe
from wamlab.recipes.methods import METHODS, Method
from wamlab.recipes.plan_memory import GIB, Memory, choose_recompute
from wamlab.speed.peaks import DevicePeak
from wamlab.speed.roofline import (
    Achieved,
    Limits,
    Phase,
    StepTime,
    time_device_optimizer,
    time_host_optimizer,
    time_step,
)

REAL_TEXT_TOKENS = 64  # of a robot's prompt with its layout sentences
DECODE_S = 0.6e-3  # of one frame on one core: 46 ms a sample of 3 cameras x 25 frames (DECISIONS, 2026-12-02)

count_parameters_once = lru_cache(maxsize=16)(count_parameters)


@dataclass(frozen=True)
class Prediction:
    """One method on one set of devices."""

    recipe: str
    devices: str
    method: str
    micro_batch: int
    num_micro_batches: int
    num_devices: int
    num_recomputed: int
    time: StepTime
    memory: Memory
    memory_limit_gib: int | float
    mfu: int | float
    hfu: int | float

    @property
    def samples_per_s_device(self) -> float:
        return self.micro_batch * self.num_micro_batches / self.time.step_s

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_limit_gib

    def to_dict(self) -> dict[str, Any]:
        """Return plain figures for JSON."""
        return {
            "recipe": self.recipe, "devices": self.devices, "method": self.method, "micro_batch": self.micro_batch,
            "num_micro_batches": self.num_micro_batches, "recomputed_blocks": self.num_recomputed,
            "step_s": self.time.step_s, "samples_per_s_device": self.samples_per_s_device, "mfu": self.mfu,
            "hfu": self.hfu, "bottleneck": self.time.bottleneck, "stack_s": self.time.stack,
            "memory_gib": vars(self.memory) | {"total": self.memory.total}, "fits": self.fits,
        }  # fmt: skip


def window_of(recipe: Recipe, *, text_tokens: int | None = None) -> Window:
    """Return what a sample of the recipe shows the network."""
    stride = recipe.video.spatial_stride
    height, width = recipe.robot.canvas_height_px // stride, recipe.robot.canvas_width_px // stride
    return Window(recipe.window.max_blocks, height, width, recipe.window.actions_per_block, text_tokens)


def network_flops(recipe: Recipe, *, is_published: bool) -> NetworkFlops:
    """Count the recipe's network for one sample."""
    text = None if is_published else min(REAL_TEXT_TOKENS, recipe.text.max_tokens)
    return count_flops(recipe.model, window_of(recipe, text_tokens=text), is_published=is_published)


def encoder_costs(recipe: Recipe) -> tuple[EncoderCost, EncoderCost, EncoderCost]:
    """Return what one pass of the video, text and image encoders costs for a sample."""
    robot = recipe.robot
    return (
        video_cost(recipe.video, recipe.window.num_frames, robot.canvas_height_px, robot.canvas_width_px),
        text_cost(recipe.text, recipe.text.max_tokens),
        image_cost(recipe.image),
    )


def predict(
    recipe: Recipe,
    num_devices: int,
    peak: DevicePeak,
    method: Method,
    *,
    achieved: Achieved | None = None,
    micro_batch: int | None = None,
    flops_scale: int | float = 1.0,
) -> Prediction:
    """Predict a training step of a recipe with one method; ``flops_scale`` multiplies the network's operations."""
    achieved = achieved or Achieved()
    limits = Limits.of(num_devices, peak)
    num_micro = recipe.train.num_micro_batches if micro_batch is None else 1
    size = recipe.train.batch_size // num_micro if micro_batch is None else micro_batch
    flops = network_flops(recipe, is_published=method.is_published_network)
    num_parameters = count_parameters_once(recipe.model)
    trained = num_parameters if recipe.train.lora is None else max(1, num_parameters // 100)
    costs = encoder_costs(recipe)
    limit_gib = peak.memory_gb * 1e9 / GIB
    num_recomputed, memory = choose_recompute(
        recipe, method, num_devices, size, flops, num_parameters, trained, costs, limit_gib
    )
    block_work = _network_phases(
        recipe.model, flops, method, size, num_recomputed, flops_scale, trained < num_parameters
    )
    encode = _encode_phases(recipe, method, size, costs)
    phases = tuple(replace(phase, repeats=phase.repeats * num_micro) for phase in (*encode, *block_work))
    gathered, num_units = _exchange(recipe, method, num_parameters, trained, costs)
    optimizer_s = (
        time_host_optimizer(trained / num_devices, achieved)
        if method.is_host_optimizer
        else time_device_optimizer(
            trained / (1 if method.sharding == "none" else num_devices), limits, achieved,
            is_fused=method.is_fused_optimizer,
        )
    )  # fmt: skip
    frames = size * num_micro * recipe.window.num_frames * len(recipe.robot.cameras)
    data_s = 0.0 if method.has_features else frames * DECODE_S / max(1, recipe.data.num_threads or 4)
    time = time_step(
        phases, limits, achieved, gathered_bytes=gathered, num_units=num_units, is_overlapped=method.is_overlapped,
        optimizer_s=optimizer_s, data_s=data_s,
    )  # fmt: skip
    model_flops = network_flops(recipe, is_published=True).train * flops_scale  # the same for every method
    done = sum(p.repeats * (p.matmul_flops + p.attention_flops + p.convolution_flops) for p in phases)
    samples = size * num_micro
    return Prediction(
        recipe.name, f"{num_devices}x{peak.name}", method.name, size, num_micro, num_devices, num_recomputed, time,
        memory, limit_gib, samples * model_flops / (time.step_s * limits.flops), done / (time.step_s * limits.flops),
    )  # fmt: skip


def _network_phases(
    config: WAMConfig,
    flops: NetworkFlops,
    method: Method,
    size: int,
    num_recomputed: int,
    scale: int | float,
    is_lora: bool,
) -> tuple[Phase, ...]:
    """Return forward (with the blocks that are recomputed) and backward."""
    layers, code = config.layers, method.block
    width = 2.0 * size * flops.tokens * config.dim  # bytes of one pass
    outside = flops.outside
    if method.is_published_network:  # noise levels are embedded once a token
        outside += 2 * flops.tokens * (config.freq_dim * config.dim + 7 * config.dim**2)
    num_maps = 14  # products of a block: 4 and 4 maps, 2 of the feed-forward, 4 of the context

    def phase(
        name: str, blocks: int | float, factor: int | float, kernels: int, passes: int | float, rest: int | float
    ) -> Phase:
        saved_attention = flops.saved_last * flops.block_attention / flops.block
        saved = flops.saved_last - saved_attention
        last = min(blocks / layers, 1.0)
        return Phase(
            name,
            matmul_flops=scale * size * factor * (blocks * flops.block_linear - last * saved + rest),
            num_matmuls=factor * num_maps * blocks,
            attention_flops=scale * size * factor * (blocks * flops.block_attention - last * saved_attention),
            bytes_moved=blocks * passes * width,
            launches=0 if code.is_graph else blocks * kernels,
            graph_launches=blocks * kernels if code.is_graph else 0,
            is_serial=method.is_serial,
        )

    backward = 1.0 if is_lora else 2.0
    return (
        phase("forward", layers, 1.0, code.forward_kernels, code.forward_passes, outside),
        phase("recompute", num_recomputed, 1.0, code.forward_kernels, code.forward_passes, 0.0),
        phase("backward", layers, backward, code.backward_kernels, code.backward_passes, outside),
    )


def _encode_phases(
    recipe: Recipe, method: Method, size: int, costs: tuple[EncoderCost, EncoderCost, EncoderCost]
) -> tuple[Phase, ...]:
    """Return what frozen encoders do in a step; nothing waits inside them, so the host runs ahead."""
    video, text, image = costs
    if method.has_features:
        return ()
    num_passes = 1 + (recipe.condition == "grey" or (method.has_dead_encode and recipe.image is not None))
    at_once = size if method.is_encode_batched else 1
    phases = [
        Phase(
            "encode video", convolution_flops=at_once * video.flops, num_convolutions=video.products,
            bytes_moved=at_once * video.bytes_moved, launches=video.launches, repeats=num_passes * (size // at_once),
        )
    ] if video.flops else []  # fmt: skip
    for name, cost in (("encode text", text), ("encode image", image)):
        if cost.flops and not (name == "encode text" and method.has_text_cache):
            phases.append(
                Phase(
                    name, matmul_flops=size * cost.flops, num_matmuls=cost.products,
                    bytes_moved=size * cost.bytes_moved, launches=cost.launches,
                )
            )  # fmt: skip
    return tuple(phases)


def _exchange(
    recipe: Recipe, method: Method, num_parameters: int, trained: int, costs: tuple[EncoderCost, ...]
) -> tuple[float, int]:
    """Return the bytes gathered and reduced in a step, unsharded in bf16, and in how many units."""
    if method.sharding == "none":
        return 2 * 2.0 * trained, recipe.model.layers  # an all-reduce is both halves
    if method.sharding == "zero2":
        return 2.0 * trained + 2.0 * trained, recipe.model.layers
    gathered = 2.0 * num_parameters * 2 + 2.0 * trained  # forward, backward; gradients once
    if method.has_sharded_encoders:
        gathered += sum(cost.weight_bytes for cost in costs)
    return gathered, recipe.model.layers


def plan(
    recipe: Recipe,
    num_devices: int,
    peak: DevicePeak,
    methods: tuple[Method, ...] = (),
    *,
    micro_batch: int | None = None,
) -> list[Prediction]:
    """Predict every method; ``micro_batch`` samples a device in place of the recipe's."""
    if micro_batch is not None and micro_batch < 1:
        raise InputError(f"--micro-batch is {micro_batch}: give at least 1")
    chosen = methods or tuple(METHODS.values())
    return [predict(recipe, num_devices, peak, method, micro_batch=micro_batch) for method in chosen]


def plan_table(found: list[Prediction]) -> str:
    """Return predictions as a table, with where each step goes."""
    first = found[0]
    causes = [cause for cause in first.time.stack if any(p.time.stack[cause] >= 0.005 for p in found)]
    lines = [
        f"{first.recipe} on {first.devices}: predicted step in seconds, and what it is made of",
        "",
        f"{'method':14} {'batch':>7} {'step s':>8} {'samples/s/dev':>14} {'MFU':>6} {'HFU':>6} {'GiB':>7}  bottleneck",
    ]
    for p in found:
        batch = f"{p.micro_batch}" if p.num_micro_batches == 1 else f"{p.num_micro_batches}x{p.micro_batch}"
        full = "" if p.fits else f", more than the device's {p.memory_limit_gib:.0f} GiB"
        lines.append(
            f"{p.method:14} {batch:>7} {p.time.step_s:8.2f} {p.samples_per_s_device:14.3f} {p.mfu:6.1%} {p.hfu:6.1%} "
            f"{p.memory.total:7.1f}  {p.time.bottleneck}{full}"
        )
    lines += ["", f"{'seconds':14} " + " ".join(f"{cause:>15}" for cause in causes)]
    lines += [f"{p.method:14} " + " ".join(f"{p.time.stack[cause]:15.2f}" for cause in causes) for p in found]
    names = list(vars(first.memory))
    lines += ["", f"{'GiB':14} " + " ".join(f"{name:>11}" for name in names) + "  recomputed blocks"]
    lines += [
        f"{p.method:14} " + " ".join(f"{vars(p.memory)[name]:11.1f}" for name in names) + f"  {p.num_recomputed}"
        for p in found
    ]
    return "\n".join(lines)
