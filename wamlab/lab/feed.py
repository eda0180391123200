"""Keeps a live chart up to date with a run folder, taking little of the process it works in."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from wamlab.lab.card import duration_text, headline, key_figures, num_steps_of
from wamlab.lab.colors import STATE_COLORS
from wamlab.lab.records import Record
from wamlab.lab.run import Run
from wamlab.lab.tail import PIECE_BYTES, Tail

RECENT = 20  # records that key figures average over
STATUS_S = 1.0  # how often the state, the evaluations and the time are read
SHARE = 0.006  # of the CPU time of a process that trains that updates of its own chart may take; twice that is lost
WAIT_S = 0.4  # longest wait between updates for the sake of that share


@runtime_checkable
class LiveView(Protocol):
    """What shows a run: the chart in a notebook."""

    def show(self, records: Sequence[Record], head: Record, evaluations: Sequence[tuple[int, float]], /) -> Any: ...

    def forget(self) -> Any: ...


class Feed:
    """Reads a run's files and hands what is new to a chart, in whatever thread calls ``run_until_end``."""

    def __init__(self, run: Run, view: LiveView, *, poll_s: float = 0.1, has_buttons: bool = True) -> None:
        self.run, self._view, self._poll_s, self._has_buttons = run, view, poll_s, has_buttons
        self.update_s: deque[float] = deque(maxlen=1000)  # CPU time of this thread in each of the last updates
        self.spent_s = 0.0  # CPU time of this thread in all looks at the files
        self.num_records = 0
        self._num_shown = 0
        self._config = run.config
        self._metrics = Tail(run, num_bytes=PIECE_BYTES)
        self._evaluations = Tail(run, "evaluations.jsonl")
        self._known_evaluations: list[Record] = []
        self._recent: list[Record] = []
        self._is_asked_to_end = threading.Event()
        self._is_free = threading.Event()
        self._is_free.set()
        self._looked_s = -STATUS_S
        self._status: Record = {}

    def end(self) -> None:
        """Let ``run_until_end`` return; the run goes on."""
        self._is_asked_to_end.set()
        self._is_free.set()

    def freeze(self) -> None:
        """Leave the chart as it is, e.g. to look at it; ``go_on`` catches up."""
        self._is_free.clear()

    def go_on(self) -> None:
        """End what ``freeze`` began."""
        self._is_free.set()

    def run_until_end(self) -> None:
        """Update until the run has ended or ``end`` is called."""
        while not self._is_asked_to_end.is_set():
            self._is_free.wait()
            start_s, num_shown = time.thread_time(), self._num_shown
            has_ended = self.update()
            took_s = time.thread_time() - start_s
            self.spent_s += took_s
            if self._num_shown > num_shown:
                self.update_s.append(took_s)
            if has_ended and not self._metrics.has_more:
                return
            if not self._metrics.has_more:
                self._rest(took_s)

    def _rest(self, took_s: float) -> None:
        """Wait; where this process trains, until it has worked so much more that ``took_s`` is a small share."""
        if not is_of_this_process(self._status):
            took_s = 0.0
        end_cpu_s, end_s = time.process_time() + took_s / SHARE, time.monotonic() + WAIT_S
        while not self._is_asked_to_end.wait(self._poll_s):
            if time.process_time() >= end_cpu_s or time.monotonic() >= end_s:
                return

    def update(self) -> bool:
        """Show what is new; return whether the run had ended before."""
        is_time = time.monotonic() - self._looked_s >= STATUS_S
        if is_time:
            # Before the records: what a run logs before it says that it has ended is then not missed.
            self._status = self.run.status
            self._looked_s = time.monotonic()
            evaluations, is_restarted = self._evaluations.read()
            self._known_evaluations = [*([] if is_restarted else self._known_evaluations), *evaluations]
        records, is_restarted = self._metrics.read()
        if is_restarted:
            self._view.forget()
            self._recent, self.num_records = [], 0
        self.num_records += len(records)
        if records or is_restarted or is_time:
            self._recent = [*self._recent, *records][-RECENT:]
            known = self._known_evaluations
            dots = [(e["step"], e["held_out_loss"]) for e in known if e.get("held_out_loss") is not None]
            self._view.show(records, self._head(), dots)
            self._num_shown += 1
        return self._status["state"] != "running"

    def look_again(self) -> None:
        """Let the next update read the state, e.g. after something was asked of the run."""
        self._looked_s = -STATUS_S

    def _head(self) -> dict[str, Any]:
        status = self._status
        line = headline(status, self._config, self._recent)
        left = time_left_text(self._config, self._recent)
        is_inside = self._has_buttons and is_of_this_process(status)
        hint = "interrupt the kernel to stop it" if is_inside and status["state"] == "running" else ""
        state = "paused" if status["state"] == "running" and status.get("is_paused") else status["state"]
        return {
            "name": self.run.name,
            "state": state,
            "state_color": STATE_COLORS[status["state"]],
            "headline": " · ".join(filter(None, [line, left, hint, status.get("error")])),
            "figures": key_figures(self._recent, self._known_evaluations),
            "buttons": buttons_for(state) if self._has_buttons and not is_inside else [],
        }


def is_of_this_process(status: Record) -> bool:
    """Say whether this very process trains: a cell that trains keeps the kernel from hearing a button."""
    return status.get("pid") == os.getpid() and status.get("host") == socket.gethostname()


def buttons_for(state: str) -> list[tuple[str, str, str]]:
    """Return what may be asked of a run in a state, as (wish, label, explanation)."""
    stop = ("stop", "Stop", "end the run after this step, with a checkpoint")
    if state == "running":
        return [("pause", "Pause", "wait after this step, keeping all memory"), stop]
    if state == "paused":
        return [("go on", "Go on", "end the pause"), stop]
    return []


def time_left_text(config: Record, recent: list[Record]) -> str:
    """Estimate the time to the last step from recent steps; empty when it cannot be known."""
    total = num_steps_of(config)
    times = [record["step_s"] for record in recent if record.get("step_s") is not None]
    if not (total and times) or recent[-1]["step"] >= total:
        return ""
    return f"{duration_text((total - recent[-1]['step']) * sum(times) / len(times))} left"
