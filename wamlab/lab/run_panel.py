"""Start, pause, stop and resume a run from one cell, over its live chart."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.control import ask
from wamlab.lab.feed import Feed
from wamlab.lab.launch import POLL_S, Launched, launch
from wamlab.lab.records import Record
from wamlab.lab.run import Run
from wamlab.lab.watch import has_front_end

# What can be pressed in which state.
BUTTONS = {
    "new": ("start",),
    "starting": ("stop",),
    "running": ("pause", "stop"),
    "paused": ("pause", "stop"),
    "stopping": (),
    "stopped": ("start", "resume"),
    "finished": ("start",),
    "failed": ("start", "resume"),
    "lost": ("start", "resume"),
}


class RunPanel:
    """Buttons that act on a run of other processes through its folder, and the chart that reads it from there.

    The cell's output keeps the still picture of the newest run, so that a saved notebook shows it.
    """

    def __init__(
        self,
        recipe: Any,
        changes: Mapping[str, Any] | None = None,
        *,
        num_processes: int = 1,
        runs: str | Path = "runs",
        is_tied: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Take what ``launch`` takes; raise InputError outside a notebook."""
        if not has_front_end():
            raise InputError("the panel needs a notebook: call launch(...) in a script, or wamlab train")
        import ipywidgets as widgets

        self.recipe, self.changes = recipe, dict(changes or {})
        self.launched: Launched | None = None  # newest start
        self.state = "new"
        self._options: dict[str, Any] = {
            "num_processes": num_processes,
            "runs": runs,
            "is_tied": is_tied,
            "environment": environment,
        }
        self._chart: Any = None
        self._still: Any = None
        self._thread: threading.Thread | None = None
        words = {
            "start": ("Start", "train in processes of their own", "primary"),
            "pause": ("Pause", "wait after this step, keeping all memory; press again to go on", ""),
            "stop": ("Stop", "end the run after this step, with a checkpoint", ""),
            "resume": ("Resume", "go on from the newest checkpoint", ""),
        }
        self.buttons = {
            name: widgets.Button(description=label, tooltip=why, button_style=style, layout={"width": "auto"})
            for name, (label, why, style) in words.items()
        }
        for name, act in (("start", self.start), ("pause", self.pause), ("stop", self.stop), ("resume", self.resume)):
            self.buttons[name].on_click(lambda _, act=act: act())
        self.status = widgets.Label("not started")
        self.view = widgets.VBox([widgets.HBox([*self.buttons.values(), self.status])])
        self._set_state("new")

    @property
    def run(self) -> Run | None:
        """The run folder, open for reading; None until the program has made it."""
        return self.launched.run if self.launched else None

    def start(self) -> None:
        """Start a new run."""
        self._begin(launch(self.recipe, self.changes, **self._options))

    def resume(self) -> None:
        """Go on with the stopped run from its newest checkpoint, under the config it had."""
        run = self.run
        if run is None:
            raise InputError("there is no run to go on with: start one")
        options: dict[str, Any] = self._options | {"runs": run.folder.parent}
        self._begin(launch(run.folder / "config.json", **options, resume=True))

    def pause(self) -> None:
        """Let the run wait after its step, or go on if it waits."""
        self._ask("go on" if self.state == "paused" else "pause")

    def stop(self) -> None:
        """End the run after its step with a checkpoint, without waiting for that."""
        if self.run is None and self.launched is not None and self.launched.process is not None:
            self.launched.process.terminate()
        else:
            self._ask("stop")
        self._set_state("stopping")

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the run has ended and the panel shows it; return its state, raise TimeoutError if it is late."""
        if self._thread is None:
            raise InputError("nothing was started: call start()")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the run is {self.state} after {timeout_s} s")
        return self.state

    def show(self, records: Sequence[Record], head: Record, evaluations: Sequence[tuple[int, float]]) -> None:
        """Hand on to the chart what its feed read; the buttons follow the run's state."""
        self._chart.show(records, head | {"has_still": True}, evaluations)
        if head["state"] in ("running", "paused") and self.state != "stopping":
            self._set_state(head["state"])

    def forget(self) -> None:
        """Let the chart start again without records."""
        self._chart.forget()

    def _ask(self, wish: str) -> None:
        if self.run is not None:
            with suppress(InputError):  # it ended just now
                ask(self.run, wish)

    def _begin(self, launched: Launched) -> None:
        self.launched = launched
        self._set_state("starting")
        self._thread = threading.Thread(target=self._follow, args=(launched,), name="run panel", daemon=True)
        self._thread.start()

    def _follow(self, launched: Launched) -> None:
        from wamlab.lab.live import LiveChart

        pause = threading.Event()
        while launched.run is None and launched.is_running:
            pause.wait(POLL_S)
        if launched.run is not None:
            self._chart = LiveChart()
            bar, *_ = self.view.children
            self.view.children = (bar, self._chart)
            Feed(launched.run, self, has_buttons=False).run_until_end()
            if self._still is not None:
                self._still.update(launched.run.chart())
            self.view.children = (bar,)
            self._chart.close()
        while launched.is_running:  # its processes leave after its last word
            pause.wait(POLL_S)
        self._set_state(launched.state, launched.error)

    def _set_state(self, state: str, error: str = "") -> None:
        self.state = state
        for name, button in self.buttons.items():
            button.disabled = name not in BUTTONS[state]
        self.buttons["pause"].description = "Go on" if state == "paused" else "Pause"
        name = f" · {self.run.name}" if self.run else ""
        words = {"new": "not started", "starting": "starting: loading torch and the data"}
        reason = error.strip().splitlines()
        self.status.value = words.get(state, state) + name + (f" · {reason[0][:200]}" if reason else "")

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.view)
        self._still = display({"text/plain": ""}, raw=True, display_id=True)
