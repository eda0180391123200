"""Compare ways to do one thing: interleaved rounds, CPU time, the median and spread of paired ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """One way's seconds in every round, and what it is compared with."""

    name: str
    seconds: tuple[float, ...]
    baseline_s: tuple[float, ...]
    warmup_s: float  # of the first call, compilation included

    @property
    def speedups(self) -> tuple[float, ...]:
        """Return how many times faster than the baseline each round was."""
        return tuple(base / own for base, own in zip(self.baseline_s, self.seconds, strict=True))

    def row(self) -> dict[str, Any]:
        """Return the line of a table."""
        ratios = sorted(self.speedups)
        return {
            "variant": self.name,
            "ms, median": 1000 * statistics.median(self.seconds),
            "speed-up, median": statistics.median(ratios),
            "lowest": ratios[0],
            "highest": ratios[-1],
            "first call s": self.warmup_s,
        }


def compare(
    variants: Mapping[str, Callable[[], Any]],
    *,
    num_rounds: int,
    budget_s: float = float("inf"),
    device: torch.device | str = "cpu",
) -> dict[str, Timing]:
    """Time every variant once a round, in turn, after one call of each; the first one is the baseline.

    On a CPU it is the process's CPU time, which other programs disturb less than wall time; on CUDA the wall time of
    finished work. No round begins after ``budget_s`` seconds of rounds, but two always run.
    """
    clock = _device_clock(torch.device(device))
    warmups = {name: _seconds(call, clock) for name, call in variants.items()}
    rounds: dict[str, list[float]] = {name: [] for name in variants}
    start_s = time.perf_counter()
    for index in range(num_rounds):
        if index >= 2 and time.perf_counter() - start_s > budget_s:
            break
        for name, call in variants.items():
            rounds[name].append(_seconds(call, clock))
    baseline = tuple(next(iter(rounds.values())))
    return {name: Timing(name, tuple(seconds), baseline, warmups[name]) for name, seconds in rounds.items()}


def _seconds(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    start_s = clock()
    call()
    return clock() - start_s


def _device_clock(device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return time.process_time

    def finished_s() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return finished_s
