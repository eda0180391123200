"""What follows a device's memory; of a CUDA device its allocator, which keeps to a budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from wamlab.errors import InputError

RESERVED_BYTES = 8 * 2**30  # of a whole device: context, libraries, fragments, the buffers of messages


def all_bytes(device: torch.device) -> int:
    """Return what a CUDA device has for tensors."""
    return torch.cuda.get_device_properties(device).total_memory - RESERVED_BYTES


@runtime_checkable
class Memory(Protocol):
    """What follows the memory of a device while its ``with`` statement runs: ``LiveMemory``, ``CudaMemory``."""

    @property
    def live_bytes(self) -> int:
        """Return what is alive now."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...

    def hold(self, tensors: Iterable[Tensor], /) -> None:
        """Count tensors that are alive already."""
        ...

    def take_peak(self) -> int:
        """Return the most bytes alive since the last call, and start anew."""
        ...


class CudaMemory:
    """Follows what a CUDA device's allocator gives out while its ``with`` statement runs."""

    def __init__(self, device: torch.device, budget_bytes: int, *, is_capped: bool) -> None:
        """Follow a device; capped, its allocator fails where a device of the budget's size would."""
        total = torch.cuda.get_device_properties(device).total_memory
        if budget_bytes > total:
            raise InputError(f"the budget of {budget_bytes} bytes is more than the device's {total}: give less")
        self.device = device
        if is_capped:
            torch.cuda.set_per_process_memory_fraction(budget_bytes / total, device)

    def __enter__(self) -> CudaMemory:
        torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Change nothing: the allocator counts on."""

    @property
    def live_bytes(self) -> int:
        """Return what is given out now."""
        return torch.cuda.memory_allocated(self.device)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: the allocator has counted them."""

    def take_peak(self) -> int:
        """Return the most bytes given out since the last call, and start anew."""
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak
