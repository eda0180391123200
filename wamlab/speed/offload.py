"""Keep what a block saves for its backward pass in host memory, copied beside the computation.

On CUDA a storage goes to pinned memory on a side stream as soon as autograd saves it, and a block's storages come back
together when its backward pass begins, each waited for where it is needed. Elsewhere the same copies are made at once,
so that numbers and lifetimes are the same; what lies on the host then counts as host memory (``is_on_host``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from wamlab.speed.tree import flat


class _Host:
    """Storages that stand for host memory where the device is the host itself."""

    def __init__(self) -> None:
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.is_making = False

    @contextmanager
    def being_made(self) -> Iterator[None]:
        self.is_making = True
        try:
            yield
        finally:
            self.is_making = False

    def add(self, tensor: Tensor) -> None:
        self.storages.add(tensor.untyped_storage())


_host = _Host()


def is_on_host(storage: torch.UntypedStorage) -> bool:
    """Say whether a storage, or one that comes into being now, stands for host memory on a device that is the host."""
    return _host.is_making or storage in _host.storages


class Offload:
    """Hooks around a block, outside of its compiled form; ``is_on`` switches them."""

    def __init__(self, block: nn.Module) -> None:
        self.is_on = False
        self._open: list[_Saving] = []
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.is_on and torch.is_grad_enabled():
            shared: list[Tensor] = [*block.parameters(), *block.buffers()]
            flat([args[1:], kwargs], shared)  # what all blocks read; the first argument is a block's own
            saving = _Saving({_key(tensor) for tensor in shared})
            saving.hooks.__enter__()
            self._open.append(saving)

    def _leave(self, block: nn.Module, args: tuple, output: Any) -> None:
        if self._open:
            saving = self._open.pop()
            saving.hooks.__exit__(None, None, None)
            saving.finish()
            tensors: list[Tensor] = []
            flat(output, tensors)
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(saving.fetch)


@dataclass(eq=False)
class _Copy:
    """A storage on the host, and on the device again from ``fetch`` to the last use of a tensor that lies in it."""

    host: Tensor  # all values of the storage
    device: torch.device
    copied: torch.Event | None
    back: Tensor | None = None
    fetched: torch.Event | None = None

    def bring(self, stream: torch.cuda.Stream | None) -> None:
        if self.back is not None:
            return
        if stream is None:
            self.back = self.host.clone()
            return
        assert self.copied is not None
        with torch.cuda.stream(stream):
            stream.wait_event(self.copied)
            self.back = self.host.to(self.device, non_blocking=True)
            self.fetched = stream.record_event()

    def use(self) -> Tensor:
        assert self.back is not None
        if self.fetched is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self.fetched)
            self.back.record_stream(current)
        return self.back


@dataclass
class _Packed:
    """A saved tensor: where in which copy it lies."""

    copy: _Copy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int | torch.SymInt, ...]
    offset: int | torch.SymInt


@dataclass
class _Saving:
    """What one call of a block saves."""

    shared: set[int]  # storages that stay on the device
    order: list[weakref.ref[_Copy]] = field(default_factory=list)
    known: dict[tuple[int, int], tuple[_Copy, weakref.ref[torch.UntypedStorage]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        if tensor.is_sparse or _key(tensor) in self.shared or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        key = (_key(tensor), tensor._version)
        copy, alive = self.known.get(key, (None, None))
        if copy is None or alive is None or alive() is None:  # an address may be taken anew
            copy = _to_host(tensor)
            self.known[key] = (copy, weakref.ref(storage))
            self.order.append(weakref.ref(copy))
        return _Packed(copy, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        packed.copy.bring(_side_stream(packed.copy.device))
        whole = packed.copy.use()
        whole = whole if whole.dtype == packed.dtype else whole.view(packed.dtype)
        return whole.as_strided(packed.size, packed.stride, packed.offset)

    def finish(self) -> None:
        """Forget what was needed to recognise storages while they were saved."""
        self.known.clear()

    def fetch(self, gradient: Tensor) -> None:
        """Bring everything back that is still wanted, the last saved first; a hook of the output's gradient."""
        for reference in reversed(self.order):
            copy = reference()
            if copy is not None:
                copy.bring(_side_stream(copy.device))
        self.order.clear()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _to_host(tensor: Tensor) -> _Copy:
    """Copy the whole storage that a tensor lies in."""
    num_values = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole, device = tensor.detach().as_strided((num_values,), (1,), 0), tensor.device
    stream = _side_stream(device)
    if stream is None:
        with _host.being_made():
            host = torch.empty_like(whole)
            _host.add(host)
        return _Copy(host.copy_(whole), device, None)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream(device))
        host = torch.empty(num_values, dtype=whole.dtype, pin_memory=True).copy_(whole, non_blocking=True)
        whole.record_stream(stream)
        return _Copy(host, device, stream.record_event())
