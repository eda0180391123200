"""`wamlab simulate`: which rule of who plays next pays, on how many workers, before any of them is rented."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wamlab.errors import InputError
from wamlab.lab.table import Table
from wamlab.recipes.commands import check_numbers

if TYPE_CHECKING:
    from wamlab.rl.service import Service


def simulated_table(
    lengths: Sequence[str],
    rules: Sequence[str],
    service: Service,
    *,
    num_workers: int = 8,
    num_slots: int = 8,
    num_groups: int = 24,
    group_size: int = 8,
    num_seeds: int = 3,
) -> Table:
    """Return a row for each length model and rule: medians over seeds, all rules playing the same episodes."""
    from wamlab.rl.jobs import WorkerLimits
    from wamlab.rl.length_models import LENGTH_MODELS, draw_lengths
    from wamlab.rl.rules import RULES
    from wamlab.rl.simulate import simulate

    limits = [WorkerLimits(num_slots)] * num_workers
    rows: list[dict[str, Any]] = []
    for model in lengths:
        drawn = [draw_lengths(LENGTH_MODELS[model], num_groups, group_size, seed=seed) for seed in range(num_seeds)]
        for rule in rules:
            played = [simulate(own, RULES[rule], service, workers=limits, seed=seed) for seed, own in enumerate(drawn)]
            rows.append(
                {
                    "lengths": model,
                    "rule": rule,
                    "makespan s": statistics.median(t.makespan_s for t in played),
                    "episodes/s": statistics.median(t.episodes_per_s for t in played),
                    "tail s": statistics.median(t.tail_s for t in played),
                    "busy": statistics.median(t.utilisation for t in played),
                    "moves": statistics.median(t.num_moves for t in played),
                }
            )
    return Table(rows)


def simulate_rollouts(
    lengths: str = "",
    rule: str = "",
    service: str = "balanced",
    workers: int = 8,
    slots: int = 8,
    groups: int = 24,
    group_size: int = 8,
    seeds: int = 3,
) -> None:
    """Play an iteration of rollouts in simulated time; every rule on every length model unless one is named.

    Args:
        lengths: model of episode lengths: LIBERO-40-mix, LIBERO-10 or RoboTwin-50
        rule: of who plays next: padded, static, fifo, rounds, longest group, expected, context or oracle
        service: line of service times: latency-bound, balanced or compute-bound
        workers: that play side by side
        slots: episodes that a worker plays at a time
        groups: of an iteration
        group_size: episodes of a group
        seeds: draws of lengths to take medians over
    """
    from wamlab.rl.length_models import LENGTH_MODELS  # only where it runs: the command line names this function
    from wamlab.rl.rules import RULES
    from wamlab.rl.service import SERVICES

    for what, name, known in (
        ("lengths", lengths, LENGTH_MODELS), ("rule", rule, RULES), ("service", service, SERVICES),
    ):  # fmt: skip
        if name not in known and (name or what == "service"):
            raise InputError(f'there is no {what} "{name}": give one of {", ".join(known)}')
    check_numbers(1, workers=workers, slots=slots, groups=groups, group_size=group_size, seeds=seeds)
    print(
        simulated_table(
            [lengths] if lengths else list(LENGTH_MODELS),
            [rule] if rule else list(RULES),
            SERVICES[service],
            num_workers=workers,
            num_slots=slots,
            num_groups=groups,
            group_size=group_size,
            num_seeds=seeds,
        )
    )
