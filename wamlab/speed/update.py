"""What an update of the weights needs: the joint norm of gradients, and learning rates that compiled code reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wamlab.tensors import whole


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to a joint norm of ``max_norm`` and return their norm before, over all processes' shares.

    A process that clips by the norm of its own share alone, as one popular trainer did until September 2026, scales
    shares differently and far too little.
    """
    return whole(nn.utils.clip_grad_norm_(parameters, max_norm))


def with_tensor_rates(optimizer: Optimizer) -> Optimizer:
    """Turn learning rates into tensors beside the parameters, in place: compiled and captured code reads them anew."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)
    return optimizer


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of every group, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
