"""Numbers to pixels, and the round numbers that label an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Number = float | int


@dataclass(frozen=True)
class Scale:
    """Maps numbers to pixels, evenly or by their logarithm."""

    low: Number
    high: Number
    start_px: Number
    end_px: Number
    is_log: bool = field(default=False, kw_only=True)

    def __call__(self, values: Any) -> Any:
        low, high, values = self.low, self.high, np.asarray(values, dtype=float)
        if self.is_log:
            low, high = math.log10(low), math.log10(high)
            values = np.log10(np.where(values > 0, values, np.nan))
        return self.start_px + (values - low) / ((high - low) or 1.0) * (self.end_px - self.start_px)

    def ticks(self, num_wanted: int) -> list[float]:
        """Return round numbers inside the scale."""
        if not self.is_log:
            return nice_ticks(self.low, self.high, num_wanted)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for mantissas in ((1,), (1, 3), (1, 2, 5)):
            stride = max(1, round((last - first) / num_wanted))
            found = [m * 10.0**e for e in range(first, last + 1, stride) for m in mantissas]
            found = [tick for tick in found if self.low <= tick <= self.high]
            if len(found) >= min(3, num_wanted):
                return found
        return nice_ticks(self.low, self.high, num_wanted)


def nice_ticks(low: Number, high: Number, num_wanted: int) -> list[float]:
    """Return about ``num_wanted`` multiples of 1, 2 or 5 times a power of ten from low to high."""
    if high <= low:
        return [low]
    rough = (high - low) / max(1, num_wanted)
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / stride - 1e-9), math.floor(high / stride + 1e-9)
    return [round(i * stride, 12) for i in range(first, last + 1)]


def tick_text(value: Number) -> str:
    """Write a tick as briefly as it is exact: 0.001, 250, 20k, 1.5M."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * (10 if suffix == "k" else 1):
            return f"{value / unit:.6g}{suffix}"
    return f"{value:.6g}"
