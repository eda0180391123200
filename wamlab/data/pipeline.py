"""Stages that hand items on in order, each with threads of its own and a bounded queue behind it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class StageReport:
    """What a stage did so far."""

    name: str
    num_items: int
    busy_s: float  # of all its threads together
    num_threads: int
    depth: int  # items it may hold, in work or finished
    mean_ready: float  # finished items that waited when one was taken

    @property
    def item_s(self) -> float:
        """Return the time between two items when this stage alone sets the pace."""
        return self.busy_s / max(1, self.num_items) / max(1, self.num_threads)


@dataclass
class _Cell:
    """The place of one item in the order of results."""

    value: Any = None
    error: BaseException | None = None
    is_done: bool = False


class Stage(Iterator[U], Generic[T, U]):
    """Do ``work`` on each item of ``upstream`` in ``num_threads`` threads; results come in the order of the items.

    A stage holds at most ``depth`` items in work or finished, so that a slow consumer stops all stages before it.
    What ``work`` or the upstream raises is raised at that item's turn. Without threads the consumer does the work.
    """

    def __init__(
        self, name: str, upstream: Iterator[T], work: Callable[[T], U], *, num_threads: int = 1, depth: int = 2
    ):
        self.name, self._upstream, self._work = name, upstream, work
        self.depth, self.num_threads = max(depth, num_threads), 0
        self._cells: deque[_Cell] = deque()
        self._claim = threading.Lock()  # items are taken one by one, in order
        self._changed = threading.Condition()
        self._is_ended = self._is_stopped = False
        self._threads: list[threading.Thread] = []
        self._busy_s, self._num_done, self._num_taken, self._num_ready = 0.0, 0, 0, 0
        for _ in range(num_threads):
            self.add_thread()

    def add_thread(self) -> None:
        """Let one more thread work."""
        name = f"{self.name}-{self.num_threads}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        self.num_threads += 1
        self.depth = max(self.depth, self.num_threads)
        thread.start()

    def deepen(self, num_items: int = 1) -> None:
        """Let the stage hold more items."""
        with self._changed:
            self.depth += max(0, num_items)
            self._changed.notify_all()

    def __next__(self) -> U:
        if not self._threads:
            if self._is_stopped:
                raise StopIteration
            item = next(self._upstream)
            start_s = time.perf_counter()
            value = self._work(item)
            self._busy_s += time.perf_counter() - start_s
            self._num_done += 1
            return value
        with self._changed:
            while not (self._cells and self._cells[0].is_done):
                if self._is_stopped or (self._is_ended and not self._cells):
                    raise StopIteration
                self._changed.wait()
            self._num_taken += 1
            self._num_ready += sum(cell.is_done for cell in self._cells)
            cell = self._cells.popleft()
            self._changed.notify_all()
        if cell.error is not None:
            raise cell.error
        return cell.value

    def report(self) -> StageReport:
        """Return what was done so far; safe to call from any thread."""
        mean_ready = self._num_ready / max(1, self._num_taken)
        return StageReport(self.name, self._num_done, self._busy_s, self.num_threads, self.depth, mean_ready)

    def stop(self) -> None:
        """Take no more items; threads end after the one they have."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the threads of a stopped stage, and forget its items."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._cells.clear()

    def _run(self) -> None:
        while (claimed := self._next_item()) is not None:
            cell, item = claimed
            start_s = time.perf_counter()
            try:
                cell.value = self._work(item)
            except BaseException as error:  # raised where the result is awaited
                cell.error = error
            del item, claimed
            with self._changed:
                self._busy_s += time.perf_counter() - start_s
                self._num_done += 1
                cell.is_done = True
                del cell
                self._changed.notify_all()

    def _next_item(self) -> tuple[_Cell, T] | None:
        with self._claim:
            with self._changed:
                while len(self._cells) >= self.depth and not self._is_stopped:
                    self._changed.wait()
                if self._is_stopped or self._is_ended:
                    return None
            cell = _Cell()
            try:
                item = next(self._upstream)
            except StopIteration:
                with self._changed:
                    self._is_ended = True
                    self._changed.notify_all()
                return None
            except BaseException as error:  # raised where the result is awaited
                cell.error, cell.is_done = error, True
                with self._changed:
                    self._cells.append(cell)
                    self._is_ended = True
                    self._changed.notify_all()
                return None
            with self._changed:
                self._cells.append(cell)
            return cell, item


def close(stages: list[Stage]) -> None:
    """Stop all stages of a pipeline, then wait for their threads."""
    for stage in stages:
        stage.stop()
    for stage in stages:
        stage.join()
