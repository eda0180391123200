"""Forget activations in forward and compute them again in backward: less memory, more time, the same numbers.

``with_recompute`` goes innermost, below compiling and sharding. Called again it changes the plan of a network in place,
whatever was put around it meanwhile; compiled blocks are then compiled for their new policy once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from wamlab.errors import InputError
from wamlab.speed.offload import Offload
from wamlab.speed.recompute_plan import RecomputePlan

Net = TypeVar("Net", bound=nn.Module)

ATTENTION_NAMES = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
MATMUL_NAMES = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = frozenset(getattr(torch.ops.aten, name).default for name in ATTENTION_NAMES) | {
    torch.ops.higher_order.flex_attention
}
KEPT = {
    "attention": ATTENTION,
    "matmuls": ATTENTION | frozenset(getattr(torch.ops.aten, name).default for name in MATMUL_NAMES),
}


def with_recompute(net: Net, plan: RecomputePlan | Iterable[int] | None = None) -> Net:
    """Let the blocks of ``net.blocks`` treat their activations as a plan says, in place; return the network.

    Block numbers in place of a plan forget everything in these blocks, None in all of them. Parameters keep their
    names; cached inference is as before. A plan for another number of blocks raises InputError.
    """
    blocks = list(net.get_submodule("blocks").children())
    for block, policy in zip(blocks, _plan_for(plan, len(blocks)), strict=True):
        state: dict[str, Any] = vars(block)
        if "recompute" not in state:
            if policy == "keep":
                continue
            state["recompute"] = state["forward"] = _Forgetting(block.forward)
        state["recompute"].policy = policy
        if policy == "offload" and "offload" not in state:
            state["offload"] = Offload(block)
        if "offload" in state:
            state["offload"].is_on = policy == "offload"
    return net


def plan_of(net: nn.Module) -> RecomputePlan:
    """Return the plan that a network follows."""
    held = [vars(block).get("recompute") for block in net.get_submodule("blocks").children()]
    return RecomputePlan(tuple("keep" if one is None else one.policy for one in held))


class _Forgetting:
    """A block's forward under a policy; hooks of the block do the offloading, outside of what is compiled."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.policy = "keep"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.policy == "full":
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        if self.policy == "attention":
            return checkpoint(self.forward, *args, use_reentrant=False, context_fn=_attention_contexts, **kwargs)
        if self.policy == "matmuls":
            return checkpoint(self.forward, *args, use_reentrant=False, context_fn=_matmul_contexts, **kwargs)
        return self.forward(*args, **kwargs)


def _choose(kept: frozenset, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Kept outputs are not computed again, so random numbers they took would then go to the next operation.
    if op in kept and not _has_dropout(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(op: Any, args: tuple, kwargs: dict) -> bool:
    names = [argument.name for argument in op._schema.arguments] if hasattr(op, "_schema") else []
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) > 0.0


_attention_contexts = partial(create_selective_checkpoint_contexts, partial(_choose, KEPT["attention"]))
_matmul_contexts = partial(create_selective_checkpoint_contexts, partial(_choose, KEPT["matmuls"]))


def _plan_for(plan: RecomputePlan | Iterable[int] | None, num_blocks: int) -> RecomputePlan:
    if plan is None:
        return RecomputePlan.uniform("full", num_blocks)
    if isinstance(plan, RecomputePlan):
        if len(plan) != num_blocks:
            raise InputError(f"the recompute plan is for {len(plan)} blocks, but the network has {num_blocks}")
        return plan
    policies = ["keep"] * num_blocks
    for index in plan:
        if not 0 <= index < num_blocks:
            raise InputError(f"there is no block {index} to recompute: the network has {num_blocks}")
        policies[index] = "full"
    return RecomputePlan(tuple(policies))
