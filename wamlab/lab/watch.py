"""Watch a run that another process, thread or host writes: live in a notebook, line by line elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from io import TextIOBase
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.card import duration_text, elapsed_s, key_figures, num_steps_of
from wamlab.lab.control import ask
from wamlab.lab.feed import RECENT, Feed, time_left_text
from wamlab.lab.records import Record
from wamlab.lab.run import Run, open_run, read_evaluations
from wamlab.lab.table import short
from wamlab.lab.tail import Tail


class Watch:
    """A live chart in a notebook cell and the thread that feeds it; made by ``watch``."""

    def __init__(self, run: Run, *, poll_s: float = 0.1, max_buckets: int = 1000) -> None:
        from IPython.display import display

        # 0.2 s of import that only a notebook needs
        from wamlab.lab.live import LiveChart

        self.run = run
        self.error: Exception | None = None  # what ended the watching early, also shown in the cell
        self._chart = LiveChart(max_buckets=max_buckets, on_wish=self._ask)
        self.feed = Feed(run, self._chart, poll_s=poll_s)
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
        self.feed.end()
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

    def _ask(self, wish: str) -> None:
        with suppress(InputError):  # the run ended just now
            ask(self.run, wish)
        self.feed.look_again()

    def _watch(self) -> None:
        try:
            self.feed.run_until_end()
        except Exception as error:  # a thread's traceback would land in whatever cell runs
            self.error = error
            text = f"watching {self.run.folder} ended: {type(error).__name__}: {error}"
            self._handle.update({"text/plain": text}, raw=True)
        else:
            self._handle.update(self.run.chart())
        finally:
            self._chart.close()  # takes its code and comm out of the notebook's widget state


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


def has_front_end() -> bool:
    """Say whether this process is a kernel that can show rich output."""
    shell = sys.modules.get("IPython")
    shell = shell.get_ipython() if shell else None
    return shell is not None and hasattr(shell, "kernel")
