"""Which steps count: one whose loss or gradient is no number, or exploded, is left out or ends the run, by rule.

The rule hears numbers that all processes of a run have alike, so they decide alike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

NUM_REMEMBERED = 100  # steps: of these the median of the norms is taken, and so many are looked at for skipped ones
NUM_NEEDED = 20  # norms before any is called exploded: the first steps differ by themselves


class StepRule:
    """Judges steps by their loss and gradient norm, and counts those that it leaves out."""

    def __init__(self, on_nan: str = "stop", max_skipped: int = 10, max_norm_ratio: int | float = 0.0) -> None:
        """Take the rule of ``TrainConfig``; ``max_norm_ratio`` is in medians of the latest norms, 0 knows no limit."""
        self.is_nan_skipped, self.max_skipped, self.max_norm_ratio = on_nan == "skip", max_skipped, max_norm_ratio
        self.num_skipped = 0  # since the run began
        self._latest: deque[float | None] = deque(maxlen=NUM_REMEMBERED)  # norms; None where a step was left out

    @property
    def may_skip(self) -> bool:
        """Say whether any step can be left out."""
        return self.is_nan_skipped or self.max_norm_ratio > 0

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take up what the records of the steps before say, so that a resumed run judges like one that never ended."""
        for record in records:
            was_skipped = record.get("num_skipped", 0) > self.num_skipped
            self._latest.append(None if was_skipped else record.get("gradient_norm"))
            self.num_skipped = record.get("num_skipped", 0)

    def judge(self, step: int, loss: float, gradient_norm: float) -> str:
        """Return why a step is to be left out, or nothing for one that counts.

        Raises FloatingPointError for a loss or norm that is not finite, unless such steps are left out, and where more
        than ``max_skipped`` of the latest steps were.
        """
        reason = ""
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            reason = f"the loss is {loss} and the gradient norm {gradient_norm}"
            if not self.is_nan_skipped:
                raise FloatingPointError(f"step {step}: {reason}; the weights were left as they are")
        elif self.max_norm_ratio and gradient_norm > (limit := self._limit()):
            reason = f"the gradient norm is {gradient_norm:.4g}, above {limit:.4g}"
        self._latest.append(None if reason else gradient_norm)
        if not reason:
            return ""
        self.num_skipped += 1
        num_lately = sum(norm is None for norm in self._latest)
        if num_lately > self.max_skipped:
            raise FloatingPointError(
                f"step {step}: {reason}; it would be number {num_lately} of the latest {len(self._latest)} steps to be "
                f"left out, and train.max_skipped is {self.max_skipped}; the weights were left as they are"
            )
        return reason

    def _limit(self) -> float:
        norms = [norm for norm in self._latest if norm is not None]
        return self.max_norm_ratio * statistics.median(norms) if len(norms) >= NUM_NEEDED else math.inf
