"""Take steps that fit: one that runs out of memory is undone and taken again in a leaner way, with the same numbers.

    guard = Guard(net, optimizer, Ladder(rungs, budget_bytes=budget), memory)
    for record in train(loss, examples, optimizer, config, guard=guard): ...

A step that failed before it wrote to a weight leaves nothing behind: its gradients are dropped, caches are emptied, the
random generators go back, and the same example is taken again with the next choice of the ladder. One that failed while
it wrote cannot be undone without a second copy of everything, so it ends the run and says so; ``UpdateWatch`` lets an
update begin only where there is room for what earlier ones took, so that happens to a first one at most.

Several processes agree on their place before each step and on the highest peak after it, so they move together. What
they cannot do is take back a step in which one of them failed: the others wait for its messages. That one says so and
ends, torchrun ends the others, and the resumed run begins one rung lower. So give them a budget below the device's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wamlab.errors import InputError
from wamlab.speed.device_memory import Memory
from wamlab.speed.ladder import Ladder, Move, Shape, gib, told
from wamlab.speed.random_states import random_states, restore_random
from wamlab.speed.ranks import Ranks
from wamlab.speed.recompute import with_recompute
from wamlab.speed.recompute_plan import RecomputePlan
from wamlab.speed.tree import flat
from wamlab.speed.update_watch import UpdateWatch

R = TypeVar("R")
FAILURES = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")  # plain RuntimeErrors


class Guard:
    """Takes each step with the choice that its shape has on the ladder, and moves along it."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        ladder: Ladder,
        memory: Memory,
        *,
        ranks: Ranks | None = None,
        is_shared: bool = False,
        tell: Callable[[Move], object] = lambda move: None,
    ) -> None:
        """Guard the steps of a network; ``tell`` hears every decision.

        A failed step of one that ``is_shared`` (FSDP2) is not taken again: its messages cannot be taken back.
        """
        self.net, self.optimizer, self.ladder, self.memory = net, optimizer, ladder, memory
        self.watch = UpdateWatch(optimizer, memory)
        self.ranks, self.is_shared, self.tell = ranks or Ranks(), is_shared, tell
        self._forget: Callable[[], object] = lambda: None
        self._followed: RecomputePlan | None = None
        self._follow(ladder.first)

    def __call__(self, step: int, example: Any, take: Callable[[int], R]) -> R:
        """Take a step in as many micro-batches as its choice says, and again while it fails.

        Raises InputError where the leanest choice fails, and where a failed step cannot be undone.
        """
        shape = self._shape(example)
        is_new = self.ladder.is_new(shape)
        rung = self.ladder.rung(shape)
        if is_new:
            self._tell(step, shape, None, rung, "a new shape", None)
        while True:
            done, reason = self._attempt(step, rung, example, take)
            peak = self.watch.finish()
            if reason is None:
                self._settle(step, shape, rung, self.ranks.greatest(peak))
                return done[0]
            rung = self._lower(step, shape, rung, reason, peak)

    def forgetting(self, wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``wrap`` (of ``train``) so that what it captures is given up with the plan it was captured for."""

        def wrapped(step: Any) -> Any:
            made = wrap(step)
            self._forget = getattr(made, "reset", self._forget)
            return made

        return wrapped

    def _attempt(
        self, step: int, rung: int, example: Any, take: Callable[[int], R]
    ) -> tuple[list[R], str | None]:  # fmt: skip
        """Return what a step returned, or why it failed; then everything is as it was before."""
        self._follow(rung)
        size = self.ladder.rungs[rung].micro_batch
        states = random_states()
        self.watch.start()
        tensors: list[Tensor] = []
        flat(example, tensors)
        try:
            with self.memory:
                self.memory.hold(tensors)
                return [take(-(-len(example) // size))], None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = f"out of memory: {str(error).splitlines()[0]}"
        # Here the frames of the failed step are gone, and what they held; cycles among them go now.
        if not self.watch.undo():
            raise InputError(
                f"step {step} ran out of memory while the weights were being written, so they are neither old nor new: "
                "resume from the last checkpoint, with more memory or speed.is_optimizer_fused"
            )
        self.optimizer.zero_grad(set_to_none=True)
        self._forget()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        restore_random(states)
        return [], reason

    def _settle(self, step: int, shape: Shape, rung: int, peak: int) -> None:
        """Decide where the next step of this shape runs, after one that was taken."""
        budget = self.ladder.budget_bytes
        if budget is not None and peak > budget:  # of what does not fail beyond it
            after = self.ladder.fail(shape, rung)
            if after is None:
                raise InputError(self._refusal(step, rung, peak))
            self._tell(step, shape, rung, after, "the measured peak is over the budget", peak)
        elif (after := self.ladder.fit(shape, rung, peak)) != rung:
            self._tell(step, shape, rung, after, "the measured peak leaves room: a trial", peak)

    def _lower(self, step: int, shape: Shape, rung: int, reason: str, peak: int) -> int:
        """Return the rung that a failed step is taken again with."""
        after = self.ladder.fail(shape, rung)
        if after is None:
            raise InputError(self._refusal(step, rung, peak))
        if self.is_shared:
            self.tell(self._move(step, shape, rung, after, reason, peak))
            raise InputError(
                f"step {step} ran out of memory on process {self.ranks.rank} of {self.ranks.world_size} while others "
                f"wait for its messages: resume the run, which begins with {told(self.ladder.rungs[after])}"
            )
        self._tell(step, shape, rung, after, reason, peak)
        return after

    def _shape(self, example: Any) -> Shape:
        """Return the shape of an example, or of the largest that any process has."""
        shape = Shape.of(example)
        if self.ranks.world_size == 1:
            return shape
        return Shape((), self.ranks.greatest(shape.num_bytes))

    def _follow(self, rung: int) -> None:
        plan = self.ladder.rungs[rung].plan
        if self._followed != plan:
            with_recompute(self.net, plan)
            self._forget()
        self._followed = plan

    def _refusal(self, step: int, rung: int, peak: int) -> str:
        choice = self.ladder.rungs[rung]
        smaller = "train.batch_size" if choice.micro_batch == 1 else "train.batch_size or micro-batches"
        return (
            f"step {step} fits in none of {len(self.ladder.rungs)} ways: even {told(choice)} took {gib(peak)} of "
            f"{gib(self.ladder.budget_bytes)}; give a larger speed.budget_gib, more processes, or a smaller {smaller}, "
            "window or network"
        )

    def _move(self, step: int, shape: Shape, rung: int | None, after: int, reason: str, peak: int | None) -> Move:
        before, now = (None if r is None else told(self.ladder.rungs[r]) for r in (rung, after))
        return Move(step, str(shape), before, str(now), reason, peak, self.ladder.budget_bytes)

    def _tell(self, step: int, shape: Shape, rung: int | None, after: int, reason: str, peak: int | None) -> None:
        if self.ranks.is_first:  # all decide alike
            self.tell(self._move(step, shape, rung, after, reason, peak))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Say whether an error is an allocator's: there was no room on a device or in host memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in FAILURES)
