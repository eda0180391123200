"""Which tricks a run uses; each can be left out, and none changes what is learnt beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass

from wamlab.errors import InputError
from wamlab.speed.compile import MODES
from wamlab.speed.shard import ShardConfig

COMPILED = ("off", "blocks")
RECOMPUTED = ("none", "all")


@dataclass(frozen=True)
class SpeedConfig:
    """Tricks applied to a network and its step, from outside."""

    is_plain: bool = False  # the network as published code computes it: the baseline of everything else
    recompute: str = "none"  # "all": every block forgets its activations and computes them again in backward
    compile: str = "off"  # "blocks": each block of the network becomes one compiled graph
    compile_mode: str = "default"  # or "max-autotune-no-cudagraphs", "reduce-overhead"
    has_graph: bool = False  # capture forward and backward as one CUDA graph; elsewhere they run as they are
    shard: ShardConfig | None = None  # how several processes share the network; None: the defaults of ShardConfig

    def __post_init__(self) -> None:
        for name, value, known in (
            ("recompute", self.recompute, RECOMPUTED),
            ("compile", self.compile, COMPILED),
            ("compile_mode", self.compile_mode, MODES),
        ):
            if value not in known:
                raise InputError(f'speed.{name} is "{value}": give one of {", ".join(known)}')
        if self.has_graph and self.compile_mode == "reduce-overhead" and self.compile != "off":
            raise InputError(
                'speed.has_graph captures the step, compile_mode "reduce-overhead" each block: give one of both'
            )
