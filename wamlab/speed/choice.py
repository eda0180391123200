"""What the tuner chooses: how a step is cut into micro-batches, and what each block keeps."""

from __future__ import annotations

from dataclasses import dataclass

from wamlab.speed.recompute_plan import RecomputePlan


@dataclass(frozen=True)
class StepChoice:
    """One way to compute the same step, with what it is predicted to take."""

    micro_batch: int  # samples on each device at a time
    num_micro_batches: int  # a step, on each device
    plan: RecomputePlan
    peak_bytes: int  # on each device, everything alive included
    step_s: float  # of one optimiser step; model units where only the order matters
