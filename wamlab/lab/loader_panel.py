"""How the clips of a run are read: a bar a stage, the slowest one named, live while another process writes the run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.chart import Chart, empty_chart, text_at
from wamlab.lab.records import Record
from wamlab.lab.run import Run, open_run, read_metrics
from wamlab.lab.tail import Tail
from wamlab.lab.watch import has_front_end

TITLE = "Loader: time between two clips if a stage alone set the pace"
ROW_PX = 30


def loader_chart(record: Record | None, *, width: int = 880) -> Chart:
    """Draw the ``loader`` figures of a step record; each stage's queue of finished items is the strip under its bar."""
    if not record or not record.get("stages"):
        return empty_chart(TITLE, width, 60)
    stages, slowest = record["stages"], record["bottleneck"]
    left, right = 90, width - 250
    reach = max(stage["item_ms"] for stage in stages.values()) or 1.0
    body = [text_at(0, 14, TITLE, "fill-ink title")]
    for i, (name, stage) in enumerate(stages.items()):
        top = 30 + ROW_PX * i
        color = "orange" if name == slowest else "blue"
        length = max(1.0, (right - left) * stage["item_ms"] / reach)
        full = (right - left) * min(1.0, stage["ready"] / max(1, stage["depth"]))
        body.append(text_at(left - 10, top + 13, name, "fill-soft", "end"))
        body.append(f'<rect x="{left}" y="{top}" width="{length:.1f}" height="16" rx="2" class="fill-{color}"/>')
        body.append(f'<rect x="{left}" y="{top + 19}" width="{right - left}" height="3" class="fill-line"/>')
        body.append(f'<rect x="{left}" y="{top + 19}" width="{full:.1f}" height="3" class="fill-green"/>')
        threads = f"{stage['num_threads']} thread{'s' * (stage['num_threads'] != 1)}"
        label = f"{stage['item_ms']:.3g} ms, {threads}, {stage['ready']:.1f} of {stage['depth']} ready"
        body.append(text_at(right + 12, top + 13, label))
    said = [f"slowest stage: {slowest}", f"training waited {record['wait_fraction']:.1%} of its time"]
    cache = record.get("cache") or {}
    said += [f"{name}: {share:.0%} of frames" for name, share in cache.get("hit_rates", {}).items()]
    if record.get("num_skipped"):
        said.append(f"{record['num_skipped']} broken clips replaced")
    height = 30 + ROW_PX * len(stages) + 18
    body.append(text_at(0, height - 4, " · ".join(said), "fill-soft"))
    items = ", ".join(f"{name} {stage['item_ms']:.3g} ms" for name, stage in stages.items())
    return Chart(width, height, "".join(body), f"{TITLE}: {items}; {'; '.join(said)}")


def newest_loader(run: Run | str | Path) -> Record | None:
    """Return the newest ``loader`` figures of a run's metrics; None while there are none."""
    records, _ = read_metrics(run)
    return next((record["loader"] for record in reversed(records) if record.get("loader")), None)


class LoaderWatch:
    """A chart of the loader in a notebook cell and the thread that keeps it up to date; ``watch_loader`` makes it."""

    def __init__(self, run: Run, *, poll_s: float = 0.5):
        from IPython.display import display

        self.run, self._poll_s = run, poll_s
        self._is_asked_to_stop = threading.Event()
        self._handle: Any = display(loader_chart(None), display_id=True)
        self._thread = threading.Thread(target=self._watch, name=f"loader of {run.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; the last chart stays."""
        self._is_asked_to_stop.set()
        self._thread.join()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the run's end; raise ``TimeoutError`` if it takes longer than ``timeout_s``."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.run.folder} still runs after {timeout_s} s")

    def __repr__(self) -> str:
        return f"LoaderWatch({str(self.run.folder)!r})"

    def _ipython_display_(self) -> None:
        """Show nothing more when the value of the cell: the chart is there already."""

    def _watch(self) -> None:
        tail = Tail(self.run)
        while True:
            has_ended = self.run.status["state"] != "running"  # before the records: none is then missed
            records, _ = tail.read()
            found = [record["loader"] for record in records if record.get("loader")]
            if found:
                self._handle.update(loader_chart(found[-1]))
            if has_ended or self._is_asked_to_stop.wait(self._poll_s):
                return


def watch_loader(run: Run | str | Path, *, poll_s: float = 0.5) -> LoaderWatch:
    """Show how a run's clips are read, live in this notebook cell; from the run's folder alone.

    Outside a notebook raises ``InputError``.
    """
    run = run if isinstance(run, Run) else open_run(run)
    if not has_front_end():
        raise InputError(f"{run.folder} can be watched in a notebook only: call loader_chart(newest_loader(...)) here")
    return LoaderWatch(run, poll_s=poll_s)
