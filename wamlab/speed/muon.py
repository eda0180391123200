"""Muon: momentum whose every matrix is made orthogonal before it is applied (arXiv 2502.16982).

``torch.optim.Muon`` orthogonalises one matrix at a time in bfloat16, which took as long as the rest of a small
network's step on a CPU without bfloat16; here matrices of one shape share batched float32 products there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from wamlab.tensors import shared_like, whole

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic that drives singular values towards 1
NUM_ITERATIONS = 5
RMS_OF_ADAMW = 0.2  # root mean square of an AdamW update, which Muon's are scaled to


class Muon(AdamW):
    """Muon for the matrices of hidden layers, AdamW for all other parameters, with one learning rate.

    Muon's updates are scaled so that AdamW's learning rate and weight decay suit them (section 2.2 of the paper).
    """

    def __init__(
        self, matrices: Iterable[Tensor], others: Iterable[dict[str, Any]], *, momentum: float = 0.95, **settings: Any
    ) -> None:
        """Take (rows, columns) parameters as matrices, AdamW's parameter groups as others and its settings."""
        groups = [{"params": list(matrices), "momentum": momentum}, *({**group, "momentum": None} for group in others)]
        if any(p.ndim != 2 for p in groups[0]["params"]):
            raise ValueError("Muon takes matrices only")
        super().__init__([group for group in groups if group["params"]], **settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["momentum"] is None]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["momentum"] is not None:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                shapes.setdefault(tuple(p.shape), []).append(p)
        for shape, matrices in shapes.items():
            scale = RMS_OF_ADAMW * math.sqrt(max(shape))
            # Only a whole matrix can be made orthogonal: processes that share it gather it and each does so.
            updates = orthogonalized(torch.stack([whole(self._momentum(p, group["momentum"])) for p in matrices]))
            for p, update in zip(matrices, updates.unbind(), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(shared_like(update.to(p.dtype), p), alpha=-group["lr"] * scale)

    def _momentum(self, p: Tensor, momentum: float) -> Tensor:
        """Return the Nesterov momentum of a gradient."""
        gradient = p.grad
        assert gradient is not None
        state = self.state[p]
        if not state:
            state.update(step=torch.zeros(()), momentum=torch.zeros_like(gradient))
        average = state["momentum"]
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Replace each matrix (n, rows, columns) by nearly the orthogonal one next to it (Newton-Schulz iteration)."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.float() if matrices.device.type == "cpu" else matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
