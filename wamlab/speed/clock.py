"""Where a step's time goes: a clock that splits it into named parts, and the memory it took."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import profiler

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Of a training step, in order; a captured step has one "forward and backward". What overlaps with them, h2d and
# communication, is read from traces (trace_split.py).
PARTS = ("data", "h2d", "encode", "forward", "backward", "communication", "optimizer")


def marked(part: str) -> AbstractContextManager[object]:
    """Name the body of a ``with`` statement in a profiler's trace; without a profiler it costs next to nothing."""
    return torch.profiler.record_function(part) if profiler._is_profiler_enabled else nullcontext()


class Clock:
    """Adds up the wall time of named parts until ``take`` reads and clears them.

    On a CUDA device work is timed by events on its stream, which ``take`` waits for once; elsewhere by the
    host's clock. Parts must not nest.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.has_events = self.device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        """Time the body of a ``with`` statement as one part."""
        if self.has_events:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(torch.cuda.current_stream(self.device))
            with marked(part):
                yield
            end.record(torch.cuda.current_stream(self.device))
            self._events.append((part, start, end))
        else:
            start_s = time.perf_counter()
            with marked(part):
                yield
            self.add(part, time.perf_counter() - start_s)

    def timed(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with each call timed as one part."""

        def timed_function(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.measured(part):
                return function(*args, **kwargs)

        return timed_function

    def waited(self, part: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, timing on the host how long each one was waited for."""
        iterator = iter(items)
        while True:
            start_s = time.perf_counter()
            try:
                with marked(part):
                    item = next(iterator)
            except StopIteration:
                return
            self.add(part, time.perf_counter() - start_s)
            yield item

    def add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return seconds by part since the last call, and start anew."""
        if self._events:
            torch.cuda.synchronize(self.device)
        for part, start, end in self._events:
            self.add(part, start.elapsed_time(end) / 1000)
        seconds, self._seconds, self._events = self._seconds, {}, []
        return seconds


def measure_memory_gib(device: torch.device | str = "cpu") -> float:
    """Return the peak memory so far: allocated on a CUDA device, else the peak resident size of this process."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 2**30 if sys.platform == "darwin" else 2**20  # Linux counts KiB, macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
