"""Which tricks a run uses; each can be left out, and none changes what is learnt beyond rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wamlab.errors import InputError, check_range
from wamlab.speed.recompute_plan import RecomputePlan

COMPILED = ("off", "blocks")
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead")
RECOMPUTED = ("none", "all", "tuned")
UNITS = ("blocks", "whole")


@dataclass(frozen=True)
class ShardConfig:
    """How a network is shared between processes."""

    num_replicas: int = 1  # groups of processes that hold a whole copy each (HSDP); 1 shares one copy among all
    units: str = "blocks"  # gathered and freed one by one; "whole" gathers everything at once and overlaps nothing
    num_kept: int = 1  # last blocks that keep their weights from forward to backward; as many as there are: ZeRO-2
    num_prefetched: int = 1  # blocks gathered ahead of the one that computes, forward and backward
    has_bf16_weights: bool = False  # gather weights in bfloat16: half the traffic; the shares stay float32
    has_bf16_sums: bool = False  # also sum gradients in bfloat16; off: float32
    is_offloaded: bool = False  # shares, gradients and the optimiser's step in host memory

    def __post_init__(self) -> None:
        check_range("shard", self, 1, math.inf, "num_replicas")
        check_range("shard", self, 0, math.inf, "num_kept", "num_prefetched")
        if self.units not in UNITS:
            raise InputError(f'shard.units is "{self.units}": give one of {", ".join(UNITS)}')


@dataclass(frozen=True)
class SpeedConfig:
    """Tricks applied to a network and its step, from outside."""

    is_plain: bool = False  # the network as published code computes it: the baseline of everything else
    recompute: str = "none"  # "all": blocks compute again in backward what they forgot; or a plan, "12 full, 28 keep";
    # "tuned": the fastest plan and micro-batch within budget_gib, leaner where memory fails, faster where there is room
    budget_gib: float | None = None  # for tensors of each device; None: what a CUDA device has, a CPU needs a number
    compile: str = "off"  # "blocks": each block of the network becomes one compiled graph
    compile_mode: str = "default"  # or "max-autotune-no-cudagraphs", "reduce-overhead"
    activation_budget: float = 1.0  # of what compiled blocks would keep for backward; the compiler recomputes the rest
    has_compiled_encoders: bool = False  # the autoencoder's forward pass, three to five graphs a shape
    has_compiled_optimizer: bool = False  # of AdamW; seconds for every hundred parameters
    has_graph: bool = False  # capture forward and backward as one CUDA graph; elsewhere they run as they are
    shard: ShardConfig | None = None  # how several processes share the network; None: the defaults of ShardConfig
    is_optimizer_fused: bool = True  # off: a loop over parameters (CPU) or lists of them (CUDA)
    is_encode_batched: bool = True  # off: clips are encoded one by one
    has_text_cache: bool = True  # off: instructions are encoded in every step, at their full padded length
    has_dead_encode: bool = False  # encode a condition that the network does not read, as published 5B training does

    def __post_init__(self) -> None:
        for name, value, known in (
            ("compile", self.compile, COMPILED),
            ("compile_mode", self.compile_mode, COMPILE_MODES),
        ):
            if value not in known:
                raise InputError(f'speed.{name} is "{value}": give one of {", ".join(known)}')
        check_range("speed", self, 0, 1, "activation_budget")
        if self.activation_budget < 1 and (self.compile == "off" or self.recompute != "none"):
            raise InputError(
                "speed.activation_budget is for compiled blocks that are not recomputed as a whole: give speed.compile "
                '"blocks" and speed.recompute "none"'
            )
        if self.recompute not in RECOMPUTED:
            RecomputePlan.read(self.recompute)
        if self.budget_gib is not None:
            check_range("speed", self, 1e-4, 1e6, "budget_gib")
            if self.recompute != "tuned":
                raise InputError(f'speed.budget_gib needs speed.recompute "tuned", but it is "{self.recompute}"')
        if self.recompute == "tuned" and self.has_compiled_optimizer:
            raise InputError(
                'speed.has_compiled_optimizer hides if an update had begun when memory failed: turn it or "tuned" off'
            )
        if self.has_graph and self.compile_mode == "reduce-overhead" and self.compile != "off":
            raise InputError(
                'speed.has_graph captures the step, compile_mode "reduce-overhead" each block: give one of both'
            )
