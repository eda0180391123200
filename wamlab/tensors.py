"""Tensors that lie whole here, or shared among the processes of a run."""

from __future__ import annotations

import torch
from torch import Tensor


def is_shared(tensor: Tensor) -> bool:
    """Say whether this process holds a share of the tensor only."""
    return hasattr(tensor, "device_mesh")  # a DTensor, whose import takes longer than the rest of a small program


def shared_like(value: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor as ``like`` is: this process's share of it, if that is shared; nothing is sent."""
    if not is_shared(like) or is_shared(value):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into ``target``; of a shared one every process takes its share of the value it has."""
    target.copy_(shared_like(value, target))


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that lies whole here; all processes that share it must call this."""
    return tensor.full_tensor() if is_shared(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]
