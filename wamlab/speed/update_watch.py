"""Know whether an optimiser has begun to write, and let it begin only where there is room for what it takes.

Version counters of tensors do not tell: fused updates leave them as they are, and lists of tensors do so under a
dispatch mode (torch 2.13). So a hook notes that an update begins; and the bytes that earlier ones took for a while are
asked for once, and given back, before anything is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from wamlab.speed.device_memory import Memory

LEAST_BYTES = 2**12  # of temporaries that are worth asking for


class UpdateWatch:
    """Watches the updates of one optimiser, attempt by attempt."""

    def __init__(self, optimizer: Optimizer, memory: Memory) -> None:
        self.optimizer, self.memory = optimizer, memory
        self.device = optimizer.param_groups[0]["params"][0].device
        self.taken_bytes = 0  # for a while, by the updates so far
        self._has_begun = self._is_on = False
        self._peak_bytes = self._live_bytes = 0
        self._known: set[Any] = set()
        optimizer.register_step_pre_hook(self._begin)

    def start(self) -> None:
        """Begin an attempt at a step."""
        self._has_begun, self._is_on, self._peak_bytes = False, True, 0
        self._known = set(self.optimizer.state)

    def finish(self) -> int:
        """End an attempt; return the most bytes that were alive in it."""
        peak, self._is_on = self.memory.take_peak(), False
        if self._has_begun and self._known:  # the first update makes what stays
            self.taken_bytes = max(self.taken_bytes, peak - self._live_bytes)
        return max(peak, self._peak_bytes)

    def undo(self) -> bool:
        """Take away averages that a failed update was making; return False if it may have written to weights."""
        state = self.optimizer.state
        new = [p for p in state if p not in self._known]
        if self._has_begun and (self._known or any(float(state[p].get("step", 0)) for p in new)):
            return False  # every optimiser counts a step before it writes
        for p in new:
            del state[p]
        return True

    def _begin(self, *_: Any) -> None:
        if self._is_on and not self._has_begun:  # some optimisers run another's step inside their own
            self._peak_bytes = self.memory.take_peak()
            if self.taken_bytes >= LEAST_BYTES:
                torch.empty(self.taken_bytes, dtype=torch.uint8, device=self.device)
            self._has_begun, self._live_bytes = True, self.memory.live_bytes
