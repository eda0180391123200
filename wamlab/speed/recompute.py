"""Forget activations in forward and compute them again in backward: less memory, more time, the same numbers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from torch import nn
from torch.utils.checkpoint import checkpoint

from wamlab.errors import InputError

Net = TypeVar("Net", bound=nn.Module)


def with_recompute(net: Net, blocks: Iterable[int] | None = None) -> Net:
    """Let some blocks of ``net.blocks``, all unless told which, forget their activations, in place; return the network.

    It goes innermost, below compiling and sharding. Parameters keep their names; cached inference is as before.
    """
    modules = list(net.get_submodule("blocks").children())
    chosen = range(len(modules)) if blocks is None else list(blocks)
    for index in chosen:
        if not 0 <= index < len(modules):
            raise InputError(f"there is no block {index} to recompute: the network has {len(modules)}")
        block = modules[index]
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
    return net
