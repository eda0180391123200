"""The memory of one of several processes that share a network, from the memory of the whole one.

A process holds its share of weights, gradients and the optimiser's state; beside them lie, for a while, what FSDP2
gathers and reduces: the block that computes, the flat buffers of those fetched ahead and of the last one unpacked, all
gradients of a block, and the buffer in which they are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from torch import nn

from wamlab.speed.activation_memory import PassMemory, StepMemory, Stretch
from wamlab.speed.config import ShardConfig


@dataclass(frozen=True)
class Unit:
    """Whole, unshared bytes of what is gathered together."""

    weights: int  # as gathered
    gradient: int  # as autograd makes it
    summed: int  # of trained weights, in the type in which gradients are summed
    master: int  # of trained weights, in the type of the shares

    def __add__(self, other: Unit) -> Unit:
        return Unit(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Unit)))

    def __mul__(self, number: int) -> Unit:
        return Unit(*(number * getattr(self, f.name) for f in fields(Unit)))


@dataclass(frozen=True)
class UnitBytes:
    """A block, and everything that is no block."""

    block: Unit
    root: Unit

    @classmethod
    def of(cls, net: nn.Module, config: ShardConfig) -> UnitBytes:
        """Count a network, which may be on the meta device."""
        blocks = list(net.get_submodule("blocks").children())
        inside = {id(p) for block in blocks for p in block.parameters()}

        def unit(parameters: list[nn.Parameter]) -> Unit:
            trained = [p for p in parameters if p.requires_grad]

            def total(those: list[nn.Parameter], size: int | None) -> int:
                return sum(p.numel() * (size or p.element_size()) for p in those)

            narrow = 2 if config.has_bf16_weights else None
            sums = 2 if config.has_bf16_sums else 4
            return Unit(total(parameters, narrow), total(trained, narrow), total(trained, sums), total(trained, None))

        return cls(unit(list(blocks[0].parameters())), unit([p for p in net.parameters() if id(p) not in inside]))


def shared_memory(
    memory: StepMemory, units: UnitBytes, config: ShardConfig, world_size: int, *, is_accumulating: bool
) -> StepMemory:
    """Return the memory of one process; ``is_accumulating`` says that a step has several micro-batches.

    Gradients are summed over processes after the last micro-batch only, so until then they are whole on each. Lifetimes
    are those of torch 2.13: forward the flat buffer of a unit stays until the next one is unpacked; backward at least
    one unit is fetched ahead, and a block's summing buffer stays until the next one is needed.
    """
    parts, number = max(1, world_size // config.num_replicas), memory.num_blocks
    if config.units == "whole":
        units = UnitBytes(Unit(0, 0, 0, 0), units.root + units.block * number)
    one_block, root, block = units.block, units.root, units.block.weights
    kept = min(config.num_kept, number) * block
    ahead, behind = config.num_prefetched * block, max(config.num_prefetched, 1) * block
    # Gradients of several micro-batches add up in the type of their sums.
    widened = max(one_block.summed - one_block.gradient, 0) if is_accumulating else 0
    root_widened = max(root.summed - root.gradient, 0) if is_accumulating else 0

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
        sums, root_sums = (one_block.summed, root.summed) if is_summed else (0, 0)
        less = one_block.gradient + widened - -(-one_block.master // parts)
        root_less = root.gradient + root_widened - -(-root.master // parts)
        beside = sums
        if is_accumulating and is_summed:  # all become shares in this pass; what it adds is highest at its beginning
            beside = max(sums - less, 0) + (one_block.gradient if widened else 0)
            less, root_less = 0, root_less + number * less
        elif is_accumulating:
            less, root_less = -widened, -root_widened
        return replace(
            one,
            stem=moved(one.stem, 2 * root.weights, change=root.weights),
            forward=all_moved(one.forward, 2 * block + ahead),
            tail=all_moved(one.tail, 2 * block, change=kept),
            last=all_moved(one.last, (0 if kept else block) + behind, change=-kept - less, at_end=behind + sums - kept),
            backward=all_moved(one.backward, block + behind + beside, change=-less, at_end=behind + beside),
            root=all_moved(
                one.root, block + beside, change=-root.weights - less - root_less, at_end=root_sums - root.weights
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


def widened_memory(memory: StepMemory, units: UnitBytes, parameters: int) -> StepMemory:
    """Return a memory traced with bfloat16 weights with ``parameters`` bytes of shares and their optimiser in float32.

    Steps and passes stay as traced: gathered weights are in bfloat16, and so are the gradients autograd makes.
    """
    master = units.root.master + units.block.master * memory.num_blocks
    share = master / max(memory.gradients, 1)
    return replace(
        memory,
        parameters=parameters,
        optimizer=round(memory.optimizer * share),
        gradients=master,
        update_peak=round(memory.update_peak * share),
    )
