"""How much of a device a training step used: MFU and HFU, rates, and summaries without the warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from wamlab.errors import InputError
from wamlab.types import StepRecord


@dataclass(frozen=True)
class Utilization:
    """What a sample costs and what its devices can do (PaLM, arXiv 2204.02311, appendix B)."""

    model_flops: int | float  # forward and backward of a sample: of MFU
    executed_flops: int | float  # with what is recomputed and with frozen encoders: of HFU
    tokens: int  # of a sample
    peak_flops: int | float  # a second and device
    num_devices: int = 1
    peak_source: str = ""

    def figures(self, num_samples: int, step_s: int | float) -> dict[str, float]:
        """Return a step's rates and shares of the peak; ``num_samples`` counts those of all devices."""
        rate = num_samples / step_s / self.num_devices
        return {
            "samples_per_s_device": rate,
            "tokens_per_s": rate * self.tokens * self.num_devices,
            "mfu": rate * self.model_flops / self.peak_flops,
            "hfu": rate * self.executed_flops / self.peak_flops,
        }


def summarize_steps(records: Iterable[StepRecord], *, num_warm_up: int = 3) -> dict[str, float]:
    """Return medians of a run's steps and of their parts after the first ``num_warm_up``, which are told apart."""
    steps = list(records)
    if len(steps) <= num_warm_up:
        raise InputError(f"{len(steps)} steps leave none after {num_warm_up} of warm-up: take more steps")
    rest, warm_up = steps[num_warm_up:], steps[:num_warm_up]
    parts = sorted({part for record in rest for part in record.split_s})
    return {
        "step_s": statistics.median(record.step_s for record in rest),
        "samples_per_s": statistics.median(record.samples_per_s for record in rest),
        "memory_gib": max(record.memory_gib for record in rest),
        "warm_up_s": sum(record.step_s for record in warm_up),
        **{f"{part}_s": statistics.median(record.split_s.get(part, 0.0) for record in rest) for part in parts},
    }
