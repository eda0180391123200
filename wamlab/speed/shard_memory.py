"""The memory of one of several processes that share a network, from the memory of the whole one.

A process holds its share of weights, gradients and the optimiser's state; beside them lie, for a while, what FSDP2
gathers and reduces: the block that computes, the flat buffers of those fetched ahead and of the last one unpacked, all
gradients of a block, and the buffer in which they are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from wamlab.speed.activation_memory import PassMemory, StepMemory, Stretch
from wamlab.speed.config import ShardConfig


@dataclass(frozen=True)
class UnitBytes:
    """Whole, unshared bytes of a block and of everything that is no block: as gathered, and gradients as summed."""

    block: int
    root: int
    block_gradient: int
    root_gradient: int
    sum_gradient: int  # of a block, in the type in which gradients are summed
    root_sum_gradient: int

    @classmethod
    def of(cls, net: nn.Module, config: ShardConfig) -> UnitBytes:
        """Count a network, which may be on the meta device."""
        inside = {id(p) for p in net.get_submodule("blocks").parameters()}
        num_blocks = len(list(net.get_submodule("blocks").children()))

        def total(size: int | None, *, is_block: bool, is_trained: bool) -> int:
            found = (p for p in net.parameters() if (id(p) in inside) == is_block)
            found = (p for p in found if p.requires_grad or not is_trained)
            whole = sum(p.numel() * (size or p.element_size()) for p in found)
            return whole // num_blocks if is_block else whole

        narrow, sums = (2 if is_narrow else None for is_narrow in (config.has_bf16_weights, config.has_bf16_sums))
        return cls(
            *(total(narrow, is_block=is_block, is_trained=trained) for trained in (False, True)
              for is_block in (True, False)),
            *(total(sums or 4, is_block=is_block, is_trained=True) for is_block in (True, False)),
        )  # fmt: skip


def shared_memory(
    memory: StepMemory, units: UnitBytes, config: ShardConfig, world_size: int, *, is_accumulating: bool
) -> StepMemory:
    """Return the memory of one process; ``is_accumulating`` says that a step has several micro-batches.

    Gradients are summed over processes after the last micro-batch only, so until then they are whole on each. Lifetimes
    are those of torch 2.13: forward the flat buffer of a unit stays until the next one is unpacked; backward at least
    one unit is fetched ahead, and a block's summing buffer stays until the next one is needed.
    """
    parts = max(1, world_size // config.num_replicas)
    if config.units == "whole":
        units = replace(
            units, block=0, block_gradient=0, sum_gradient=0,
            root=units.root + memory.num_blocks * units.block,
            root_gradient=units.root_gradient + memory.num_blocks * units.block_gradient,
            root_sum_gradient=units.root_sum_gradient + memory.num_blocks * units.sum_gradient,
        )  # fmt: skip
    block, kept = units.block, min(config.num_kept, memory.num_blocks) * units.block
    ahead, behind = config.num_prefetched * block, max(config.num_prefetched, 1) * block

    def freed(whole: int) -> int:
        """Return how much smaller a share is."""
        return whole - -(-whole // parts)

    def moved(one: Stretch, more: int, *, change: int = 0, at_end: int | None = None) -> Stretch:
        """Return a stretch with more beside it, and at its end so much beside what is alive then."""
        peak = one.peak + more
        return Stretch(peak if at_end is None else max(peak, one.change + at_end), one.change + change)

    def all_moved(
        ones: Mapping[str, Stretch], more: int, *, change: int = 0, at_end: int | None = None
    ) -> dict[str, Stretch]:
        return {policy: moved(one, more, change=change, at_end=at_end) for policy, one in ones.items()}

    def of(one: PassMemory, *, is_first: bool) -> PassMemory:
        is_summed = not (is_accumulating and is_first)
        sums, root_sums = (units.sum_gradient, units.root_sum_gradient) if is_summed else (0, 0)
        less, root_less = freed(units.block_gradient), freed(units.root_gradient)
        beside, at_last = sums, sums
        if is_accumulating:  # all become shares in the last pass, the worst is before
            beside = max(sums - less, 0)
            root_less = root_less + memory.num_blocks * less if is_summed else 0
            less = 0
        return replace(
            one,
            stem=moved(one.stem, 2 * units.root, change=units.root),
            forward=all_moved(one.forward, 2 * block + ahead),
            tail=all_moved(one.tail, 2 * block, change=kept),
            last=all_moved(
                one.last, (0 if kept else block) + behind, change=-kept - less, at_end=behind + at_last - kept
            ),
            backward=all_moved(one.backward, block + behind + beside, change=-less, at_end=behind + beside),
            root=all_moved(
                one.root, block + beside, change=-units.root - less - root_less, at_end=root_sums - units.root
            ),
        )

    return replace(
        memory,
        parameters=-(-memory.parameters // parts),
        optimizer=-(-memory.optimizer // parts),
        gradients=-(-memory.gradients // parts),
        update_peak=-(-memory.update_peak // parts),
        first=of(memory.first, is_first=True),
        later=of(memory.later, is_first=False),
    )
