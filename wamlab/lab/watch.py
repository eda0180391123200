"""Watch a run that another process, thread or host writes: live in a notebook, line by line elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from io import TextIOBase
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.card import duration_text, elapsed_s, headline, key_figures, num_steps_of
from wamlab.lab.colors import STATE_COLORS
from wamlab.lab.records import Record
from wamlab.lab.run import Run, open_run, read_evaluations, read_metrics
from wamlab.lab.table import short

RECENT = 20  # records that key figures average over
STATUS_S = 1.0  # how often the state, the evaluations and the time are read


class Tail:
    """Reads what a run's metrics gained since the last look, and notices when they were cut back."""

    def __init__(self, run: Run) -> None:
        self._path = run.folder / "metrics.jsonl"
        self._run = run
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> tuple[list[Record], bool]:
        """Return new records, and whether they replace all earlier ones (the run was resumed)."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return [], False
        identity = (found.st_dev, found.st_ino)
        is_restarted = self._identity not in (None, identity) or found.st_size < self._offset
        self._identity = identity
        records, self._offset = read_metrics(self._run, 0 if is_restarted else self._offset)
        return records, is_restarted


class Watch:
    """A live chart in a notebook cell and the thread that feeds it; made by ``watch``."""

    def __init__(self, run: Run, *, poll_s: float = 0.1, max_buckets: int = 1000) -> None:
        from IPython.display import display

        # 0.2 s of import that only a notebook needs
        from wamlab.lab.live import LiveChart

        self.run = run
        self.error: Exception | None = None  # what ended the watching early, also shown in the cell
        self._poll_s = poll_s
        self._chart = LiveChart(max_buckets=max_buckets)
        self._tail = Tail(run)
        self._recent: list[Record] = []
        self._config = run.config
        self._is_asked_to_stop = threading.Event()
        self._handle: Any = display(self._chart, display_id=True)
        self._thread = threading.Thread(target=self._watch, name=f"watch {run.name}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_records(self) -> int:
        return self._chart.num_records

    def stop(self) -> None:
        """Stop watching (the run goes on) and put the still picture in the chart's place."""
        self._is_asked_to_stop.set()
        self.wait()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the run's end; raise ``TimeoutError`` if it takes longer than ``timeout_s``."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.run.folder} still runs after {timeout_s} s")

    def __repr__(self) -> str:
        return f"Watch({str(self.run.folder)!r}, {'running' if self.is_running else 'ended'})"

    def _ipython_display_(self) -> None:
        """Show nothing more when the value of the cell: the chart is there already."""

    def _watch(self) -> None:
        try:
            self._feed()
        except Exception as error:  # a thread's traceback would land in whatever cell runs
            self.error = error
            text = f"watching {self.run.folder} ended: {type(error).__name__}: {error}"
            self._handle.update({"text/plain": text}, raw=True)
        else:
            self._handle.update(self.run.chart())
        finally:
            self._chart.close()  # takes its code and comm out of the notebook's widget state

    def _feed(self) -> None:
        looked_s = -STATUS_S
        status: Record = {}
        evaluations: list[Record] = []
        while not self._is_asked_to_stop.is_set():
            is_time = time.monotonic() - looked_s >= STATUS_S
            if is_time:
                # Before the records: what a run logs before it says that it has ended is then not missed.
                status, evaluations = self.run.status, read_evaluations(self.run)
                looked_s = time.monotonic()
            records, is_restarted = self._tail.read()
            if is_restarted:
                self._chart.forget()
                self._recent = []
            if records or is_restarted or is_time:
                self._recent = [*self._recent, *records][-RECENT:]
                dots = [(e["step"], e["held_out_loss"]) for e in evaluations if e.get("held_out_loss") is not None]
                self._chart.show(records, self._head(status, evaluations), dots)
            if status["state"] != "running":
                return
            self._is_asked_to_stop.wait(self._poll_s)

    def _head(self, status: Record, evaluations: list[Record]) -> dict[str, Any]:
        line = headline(status, self._config, self._recent)
        left = time_left_text(self._config, self._recent)
        return {
            "name": self.run.name,
            "state": status["state"],
            "state_color": STATE_COLORS[status["state"]],
            "headline": " · ".join(filter(None, [line, left, status.get("error")])),
            "figures": key_figures(self._recent, evaluations),
        }


def watch(run: Run | str | Path, *, poll_s: float = 0.1, max_buckets: int = 1000) -> Watch:
    """Show a run live in this notebook cell, without blocking it; a still picture stays when it ends.

    Works on a run of another process, thread or host, from its folder alone, so also after a kernel restart.
    Outside a notebook raises ``InputError``: there ``follow`` prints lines.
    """
    run = run if isinstance(run, Run) else open_run(run)
    if not has_front_end():
        raise InputError(f"{run.folder} can be watched in a notebook only: call follow(...) here")
    return Watch(run, poll_s=poll_s, max_buckets=max_buckets)


def follow(
    run: Run | str | Path, *, every_s: float = 5.0, poll_s: float = 0.2, file: TextIOBase | None = None
) -> Record | None:
    """Print a line of progress every few seconds until the run ends, and return its summary.

    For terminals and batch notebooks. Raises ``RuntimeError`` if the run failed or was lost.
    """
    run = run if isinstance(run, Run) else open_run(run)
    tail, config = Tail(run), run.config
    recent: list[Record] = []
    num_evaluations, printed_s, printed_step = 0, -every_s, None

    def say(text: str) -> None:
        print(text, file=file or sys.stdout, flush=True)

    say(f"following {run.folder}")
    while True:
        status = run.status
        records, is_restarted = tail.read()
        recent = [*([] if is_restarted else recent), *records][-RECENT:]
        has_ended = status["state"] != "running"
        is_due = has_ended or time.monotonic() - printed_s >= every_s
        if recent and is_due and recent[-1]["step"] != printed_step:
            say(progress_line(config, recent))
            printed_s, printed_step = time.monotonic(), recent[-1]["step"]
        evaluations = read_evaluations(run)
        for evaluation in evaluations[num_evaluations:]:
            say(evaluation_line(evaluation))
        num_evaluations = len(evaluations)
        if has_ended:
            break
        time.sleep(poll_s)
    say(f"{status['state']} after {duration_text(elapsed_s(status))}")
    if status["state"] in ("failed", "lost"):
        raise RuntimeError(f"run {status['state']}: {status['error']}; see {run.folder}")
    return run.summary


def progress_line(config: Record, recent: list[Record]) -> str:
    """Describe the newest records in one line."""
    figures = [f"{name} {value}" for name, value, _ in key_figures(recent, [])]
    total = num_steps_of(config)
    step = f"step {recent[-1]['step']:,}" + (f"/{total:,}" if total else "")
    return "  ".join(filter(None, [step, *figures, time_left_text(config, recent)]))


def evaluation_line(evaluation: Record) -> str:
    """Describe an evaluation's plain figures in one line."""
    figures = [f"{k} {short(v)}" for k, v in evaluation.items() if k != "step" and isinstance(v, int | float)]
    return f"  evaluated at step {evaluation['step']:,}: " + "  ".join(figures)


def time_left_text(config: Record, recent: list[Record]) -> str:
    """Estimate the time to the last step from recent steps; empty when it cannot be known."""
    total = num_steps_of(config)
    times = [record["step_s"] for record in recent if record.get("step_s") is not None]
    if not (total and times) or recent[-1]["step"] >= total:
        return ""
    return f"{duration_text((total - recent[-1]['step']) * sum(times) / len(times))} left"


def has_front_end() -> bool:
    """Say whether this process is a kernel that can show rich output."""
    shell = sys.modules.get("IPython")
    shell = shell.get_ipython() if shell else None
    return shell is not None and hasattr(shell, "kernel")
