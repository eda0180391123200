"""CPU time of loaders, each in a process of its own, in turns."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from loader_parts.pixels import digest

QUIET_S = 0.05  # a loader whose processes used next to nothing for so long has read ahead all it will
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Way:
    """A loader to measure."""

    make: Callable[[], Iterator[Any]]  # of batches
    batches: int  # a turn: those after which it has done all of its work as often
    samples: int  # a batch
    is_in_order: bool = True  # delivers the same samples as all others that do


@dataclass
class Costs:
    """CPU seconds a sample of one loader, by round."""

    seconds: list[float] = field(default_factory=list)
    error: str = ""
    frames: int = 0  # checksum of the first batch's

    @property
    def ms(self) -> float:
        return 1000 * statistics.median(self.seconds)


def ratios(costs: Costs, other: Costs) -> list[float]:
    """Return how many times dearer the one was than the other, round by round, sorted."""
    return sorted(a / b for a, b in zip(costs.seconds, other.seconds, strict=False))


def measure(
    ways: Mapping[str, Way], *, num_rounds: int, budget_s: float, say: Callable[[str], Any]
) -> dict[str, Costs]:
    """Let every loader deliver a turn's batches in each round, one after another; name it to ``say`` before.

    A turn ends when the loader has read ahead as far as before it, so that what a turn costs is what its batches cost.
    No round begins ``budget_s`` after the warm-up, but one always runs.
    """
    turns = {name: _Turns(way) for name, way in ways.items()}
    costs = {name: Costs() for name in ways}
    try:
        for name, turn in turns.items():
            say(name)
            costs[name].frames, costs[name].error = turn.warm_up()
        start_s = time.perf_counter()
        for index in range(num_rounds):
            if index and time.perf_counter() - start_s > budget_s:
                break
            for name, turn in turns.items():
                say(name)
                if not costs[name].error:
                    costs[name].seconds.append(turn.take() / ways[name].batches / ways[name].samples)
    finally:
        for turn in turns.values():
            turn.close()
    return costs


class _Turns:
    def __init__(self, way: Way):
        self._way = way
        self._connection, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(theirs, way.make))
        self._is_started = False
        self._theirs = theirs

    def warm_up(self) -> tuple[int, str]:
        """Start the loader and take one turn; return its first batch's checksum and what went wrong."""
        self._process.start()
        self._is_started = True
        self._theirs.close()
        try:
            self.take()
            return self._receive(), ""
        except RuntimeError as error:
            return 0, str(error)

    def take(self) -> float:
        self._connection.send(self._way.batches)
        return self._receive()

    def _receive(self) -> Any:
        try:
            found = self._connection.recv()
        except EOFError:
            raise RuntimeError("the process of this loader died") from None
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    def close(self) -> None:
        if self._is_started:
            with suppress(OSError):  # it died
                self._connection.send(0)  # closing is not enough: later loaders' processes hold the same pipe
            self._connection.close()
            self._process.join(5)
            if self._process.is_alive():
                self._process.terminate()
                self._process.join()


def _serve(connection: Any, make: Callable[[], Iterator[Any]]) -> None:
    try:
        batches = make()
        is_first = True
        while number := connection.recv():
            start_s = cpu_s()
            first = next(batches)
            frames = digest(first) if is_first else 0  # of the warm-up, whose time is not counted
            del first
            for _ in range(number - 1):
                next(batches)
            wait_until_quiet()
            connection.send(cpu_s() - start_s)
            if is_first:
                connection.send(frames)
                is_first = False
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except BaseException as error:
        line = traceback.format_exception_only(error)[-1].strip().split("\n")[-1]
        connection.send(line[:200])
    for child in multiprocessing.active_children():
        child.terminate()


def wait_until_quiet() -> None:
    """Wait until this process and its workers have done all they will."""
    before_s = cpu_s()
    while True:
        time.sleep(QUIET_S)
        now_s = cpu_s()
        if now_s - before_s < 0.02 * QUIET_S:
            return
        before_s = now_s


def cpu_s() -> float:
    """Return the CPU time of this process and its workers, dead or alive."""
    done = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = sum(process_cpu_s(child.pid) for child in multiprocessing.active_children() if child.pid)
    return time.process_time() + done.ru_utime + done.ru_stime + alive


def process_cpu_s(pid: int) -> float:
    """Return the CPU time of another process, to the nanosecond on Linux."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock that clock_getcpuclockid(3) names
