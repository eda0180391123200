"""A graph device for tests: what CUDA graphs do, with real numbers on a CPU.

It records the operations that a step dispatches, undoes what they did and spoils what they returned; a replay runs
the same operations on the same tensors, without Python's part of the step. So a step that reads values back, keeps
state in Python or changes an address fails here as it does there.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten: Any = torch.ops.aten


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.made: set[int] = set()
        self.states = [(torch.default_generator, torch.default_generator.get_state())]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            raise RuntimeError("a value is read back")
        schema = func._schema.arguments
        given = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
        for argument in schema:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_of(given.get(argument.name)):
                    if place(tensor) not in self.made and place(tensor) not in self.before:
                        storage = tensor.untyped_storage()
                        self.before[place(tensor)] = storage, storage.clone()
        if (generator := kwargs.get("generator")) is not None:
            self.states.append((generator, generator.get_state()))
        found = func(*args, **kwargs)
        old = {place(t) for value in given.values() for t in tensors_of(value)}
        self.made |= {place(t) for t in tensors_of(found)} - old
        self.calls.append((func, args, kwargs, found))
        return found

    def undo(self) -> None:
        for storage, kept in self.before.values():
            storage.copy_(kept)
        for generator, state in reversed(self.states):
            generator.set_state(state)
        for *_, found in self.calls:
            for tensor in tensors_of(found):
                if place(tensor) in self.made and tensor.is_floating_point():
                    tensor.detach().fill_(float("nan"))

    @torch.no_grad()
    def replay(self) -> None:
        with torch.autocast("cpu", enabled=False):
            for func, args, kwargs, found in self.calls:
                for kept, new in zip(tensors_of(found), tensors_of(func(*args, **kwargs)), strict=True):
                    if place(kept) != place(new):
                        kept.detach().copy_(new)


class ReplayDevice:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_captures = 0

    def warming(self) -> AbstractContextManager:
        return nullcontext()

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.num_captures += 1
        with Recorder() as recorder:
            found = run()
        recorder.undo()
        return found, recorder.replay
