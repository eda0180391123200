"""Run by test_fit_in.py in two processes of their own: compiled steps, then steps of both, then one that fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sharded_law import CONFIG, batches, build, share  # pyright: ignore[reportMissingImports]
from squeezed import Scripted  # pyright: ignore[reportMissingImports]

from wamlab.flow import flow_loss
from wamlab.lab.records import append_line
from wamlab.speed.compile import compiled
from wamlab.speed.config import ShardConfig
from wamlab.speed.guard import Guard
from wamlab.speed.ladder import Ladder, Move, plain_rungs
from wamlab.speed.ranks import Ranks, join_ranks, leave_ranks, read_ranks
from wamlab.speed.recompute import plan_of, with_recompute
from wamlab.train import TrainConfig, make_optimizer, noised_examples, train

PEAKS = (100, 80, 60, 30)  # of the rungs; the second process takes 30 more
BUDGET = 100


def steps(
    net: Any, config: TrainConfig, ranks: Ranks, fail: Callable[[int], object] = lambda step: None,
    peak: Callable[[], int] = lambda: 0, tell: Callable[[Move], object] = lambda move: None,
) -> list[tuple[float, float, str]]:  # fmt: skip
    """Return losses, gradient norms and the plans that the steps ended with; ``fail`` is called between passes."""
    optimizer, at = make_optimizer(net, config), [1]
    rungs = plain_rungs(config.batch_size // ranks.world_size, 3)[:4]
    guard = Guard(
        net, optimizer, Ladder(rungs, budget_bytes=BUDGET), Scripted(peak), ranks=ranks,
        is_shared=ranks.world_size > 1, tell=tell,
    )  # fmt: skip

    def loss(example: Any) -> Any:
        terms = flow_loss(net, example)
        fail(at[0])
        return terms

    found = []
    examples = noised_examples(batches(ranks, config.batch_size), seed=0, ranks=ranks)
    set_sync = getattr(net, "set_requires_gradient_sync", None)
    for record in train(loss, examples, optimizer, config, ranks=ranks, set_sync=set_sync, guard=guard):
        found.append((record.loss, record.gradient_norm, str(plan_of(net))))
        at[0] = record.step + 1
    return found


def raise_once(step: int, *, now: list[int]) -> None:
    if step in now:
        now.remove(step)
        raise torch.OutOfMemoryError("no room")


def measure(ranks: Ranks, folder: Path) -> dict[str, Any]:
    config = replace(CONFIG, num_steps=3)
    alone, again = steps(build(config), config, Ranks()), []
    if ranks.is_first:
        net = compiled(with_recompute(build(config)), backend="eager", is_strict=True)
        again = steps(net, config, Ranks(), fail=partial(raise_once, now=[2]))
    net = share(with_recompute(build(config)), ShardConfig(), ranks)

    def peak() -> int:
        return PEAKS[[str(rung.plan) for rung in plain_rungs(4, 3)].index(str(plan_of(net)))] + 30 * ranks.rank

    moves: list[dict[str, Any]] = []
    together = steps(net, config, ranks, peak=peak, tell=lambda move: moves.append(move.record()))
    return {"alone": alone, "compiled again": again, "together": together, "moves": moves}


def fail_together(ranks: Ranks, folder: Path) -> None:
    """Let the second process run out of memory while the first waits for its messages."""
    config = replace(CONFIG, num_steps=2)
    net = share(with_recompute(build(config)), ShardConfig(), ranks)
    fail = partial(raise_once, now=[2] if ranks.rank == 1 else [])
    steps(net, config, ranks, fail=fail, tell=lambda move: append_line(folder / "memory.jsonl", move.record()))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    torch.set_num_threads(1)
    ranks = read_ranks()
    join_ranks(ranks, "cpu")
    (target / f"{ranks.rank}.json").write_text(json.dumps(measure(ranks, target)))
    ranks.wait()
    fail_together(ranks, target)
    leave_ranks()
