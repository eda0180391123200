"""The stretches of a forward and backward pass, told apart by hooks around the blocks of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from wamlab.speed.tree import flat

Stretch = tuple[str, int]  # ("forward", 3), ("head", 0), ...
Told = Callable[[Stretch], None]


@contextmanager
def marked_passes(net: nn.Module, tell: Told) -> Iterator[None]:
    """Tell, inside a ``with`` statement, which stretch begins, in order.

    ("forward", i) for each block, ("head", 0) for what follows the last one up to its backward pass, ("backward", i)
    from the last block to the first, ("stem", 0) when the gradient of the first one's input is there. What comes
    before the first block has no mark. The first argument of a block is what it passes on.
    """
    blocks = list(net.get_submodule("blocks").children())
    handles = []

    def enter(index: int, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tell(("forward", index))
        if index == 0 and isinstance(args[0], Tensor) and args[0].requires_grad:
            args[0].register_hook(lambda _: tell(("stem", 0)))

    def leave(index: int, block: nn.Module, args: tuple, output: Any) -> None:
        tensors: list[Tensor] = []
        flat(output, tensors)
        if tensors[0].requires_grad:
            tensors[0].register_hook(lambda _: tell(("backward", index)))
        if index == len(blocks) - 1:
            tell(("head", 0))

    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(_at(enter, index), with_kwargs=True))
        handles.append(block.register_forward_hook(_at(leave, index), prepend=True))  # marks precede other hooks
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _at(hook: Callable[..., None], index: int) -> Callable[..., None]:
    def call(*args: Any) -> None:
        hook(index, *args)

    return call
