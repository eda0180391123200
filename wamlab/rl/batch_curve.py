"""How many episodes a worker plans for in one call of its policy: measured in play, where calls of any size are work.

The first rounds are cut into calls of 1, 2, 4, ... episodes, so that a whole curve costs a round or two of somewhat
smaller batches and no chunk is planned for the clock alone. Then every round is cut into equal calls of about the size
that plans the most episodes a second.
"""

from __future__ import annotations

import math

from wamlab.errors import InputError
from wamlab.rl.service import choose_batch

NUM_TIMES = 3  # each size is measured so often; the first call of a size may compile or allocate
GAIN = 0.03  # a larger call must plan so much more a second: clocks are no better


class BatchCurve:
    """The measured time of policy calls by their size, and the size that follows from it."""

    def __init__(self) -> None:
        self._times_s: dict[int, list[float]] = {}

    @property
    def measured_s(self) -> dict[int, float]:
        """Return the shortest time of each size, those measured often enough."""
        return {size: min(times) for size, times in sorted(self._times_s.items()) if len(times) >= NUM_TIMES}

    def choose(self, num_rows: int) -> int:
        """Return the size with the most episodes a second among those up to ``num_rows``; that where none is known."""
        known = {size: time_s for size, time_s in self.measured_s.items() if size <= num_rows}
        return choose_batch(known, gain=GAIN) if known else num_rows

    def cut(self, num_rows: int) -> list[int]:
        """Return the sizes of the calls that plan for ``num_rows`` episodes."""
        if num_rows < 1:
            raise InputError(f"there are {num_rows} episodes to plan for: give at least 1")
        wanted = [
            2**power for power in range(num_rows.bit_length()) if len(self._times_s.get(2**power, ())) < NUM_TIMES
        ]
        sizes, left = [], num_rows
        for size in wanted:
            if size > left:
                break
            sizes.append(size)
            left -= size
        if wanted and not sizes:
            sizes, left = [wanted[0]], num_rows - wanted[0]
        if not left:
            return sizes
        num_calls = max(1, round(left / self.choose(left)))
        return sizes + [left // num_calls + (call < left % num_calls) for call in range(num_calls)]

    def add(self, size: int, took_s: float) -> None:
        """Note what a call took; only powers of two are kept, a few of each, the newest."""
        if took_s > 0 and math.log2(size).is_integer():
            self._times_s[size] = [*self._times_s.get(size, []), took_s][-NUM_TIMES:]
