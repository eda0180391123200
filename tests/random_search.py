"""Memory and times as those of published blocks, made of a few numbers, so that searching can be timed and tested."""

from collections.abc import Sequence

from wamlab.speed.activation_memory import PassMemory, StepMemory, Stretch
from wamlab.speed.step_time import BlockTime, MicroBatchTime

# MiB of a sample and block; relative to a forward pass that takes 1.
KEPT = {"keep": 116.0, "full": 3.7, "attention": 11.1, "matmuls": 44.6, "offload": 0.0}
AGAIN = {"keep": 0.0, "full": 1.02, "attention": 0.7, "matmuls": 0.25, "offload": 0.4}
GRADIENT, WORKING = 200.0, 8.0


def blocks_of(num_blocks: int, sizes: Sequence[int]) -> tuple[dict[int, StepMemory], dict[int, MicroBatchTime]]:
    """Return memory and times of every size; what a block takes forward it gives back backward."""
    return {size: _memory(num_blocks, size) for size in sizes}, {size: _time(num_blocks, size) for size in sizes}


def _memory(num_blocks: int, size: int) -> StepMemory:
    def mib(number: float) -> int:
        return round(number * 2**20)

    def one(gradient: float) -> PassMemory:
        forward = {p: Stretch(mib(size * max(k, 45.0) + WORKING), mib(size * k)) for p, k in KEPT.items()}
        backward = {
            p: Stretch(mib(gradient + size * (KEPT["keep"] - k) + WORKING), mib(gradient - size * k))
            for p, k in KEPT.items()
        }
        dropped = dict.fromkeys(KEPT, 0)
        return PassMemory(Stretch(mib(9), mib(5)), forward, forward, dropped, backward, backward, backward)

    weights = mib(GRADIENT * num_blocks)
    return StepMemory(size, num_blocks, weights, 2 * weights, mib(size), weights, mib(1), one(GRADIENT), one(0.0))


def _time(num_blocks: int, size: int) -> MicroBatchTime:
    unit = size**0.85
    blocks = {policy: BlockTime(unit, again * unit, 2 * unit) for policy, again in AGAIN.items()}
    lasts = {policy: BlockTime(0.8 * unit, 0.8 * again * unit, 1.6 * unit) for policy, again in AGAIN.items()}
    return MicroBatchTime(size, num_blocks, 0.3 * unit, 0.2, blocks, lasts)
