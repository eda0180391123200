"""Follow which storages are alive, on real or fake tensors: the bytes that a device's allocator would have to give."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wamlab.speed.offload import is_on_host
from wamlab.speed.tree import flat


@no_type_check  # called at every operation, shape checks of test runs took most of the time (2026-12-03)
class LiveMemory(TorchDispatchMode):
    """Adds up storages from the operation that returns them to their end, while its ``with`` statement runs.

    What lies on the host counts nothing, and so does what a kernel takes and frees inside itself. Beyond
    ``budget_bytes`` an operation raises ``torch.OutOfMemoryError``, as an allocator of that size would.
    """

    def __init__(self, held: Iterable[Tensor] = (), *, budget_bytes: int | None = None) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.budget_bytes = budget_bytes
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.hold(held)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are alive already."""
        for tensor in tensors:
            self._note(tensor)

    def take_peak(self) -> int:
        """Return the highest number of bytes since the last call, and start anew from what is alive."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor):
                self._note(value)
        if self.budget_bytes is not None and self.live_bytes > self.budget_bytes:
            over = f"{self.live_bytes} of {self.budget_bytes} bytes are taken"
            del output, value
            raise torch.OutOfMemoryError(f"{func} returns more than there is room for: {over}")
        return output

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known or is_on_host(storage):
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, size).atexit = False

    def _forget(self, size: int) -> None:
        self.live_bytes -= size


def tensors_of(*values: Any) -> list[Tensor]:
    """Return the tensors of modules, optimisers and trees: what is alive before a step."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, nn.Module):
            found += [*value.parameters(), *value.buffers()]
            found += [p.grad for p in value.parameters() if p.grad is not None]
        elif isinstance(value, torch.optim.Optimizer):
            flat(list(value.state.values()), found)
        else:
            flat(value, found)
    return found


def measure_peak(run: Callable[[], Any], *held: Any) -> int:
    """Return the most bytes alive while ``run`` runs, ``held`` among them (modules, optimisers, trees of tensors)."""
    with LiveMemory(tensors_of(*held)) as memory:
        run()
        return memory.peak_bytes
