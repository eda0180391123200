"""Runs side by side in a notebook: first in what they differ, then their figures, then any of their curves."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from wamlab.lab.chart import Chart, Line, line_chart
from wamlab.lab.comparison import COLORS, Comparison
from wamlab.lab.picker import Picker, svg_of
from wamlab.lab.plots import STILL_BUCKETS
from wamlab.lab.run import Run, read_evaluations, read_metrics
from wamlab.lab.series import SMOOTH, Columns, bucket_size, drawable

# What can be chosen: title, column of the metrics or of the evaluations, whether its axis is logarithmic.
CURVES = (
    ("loss", "loss", True),
    ("held-out loss", "held_out_loss", True),
    ("samples per second", "samples_per_s", False),
    ("MFU", "mfu", False),
    ("memory, GiB", "memory_gib", False),
    ("step time, s", "step_p50", False),
    ("gradient norm", "gradient_norm", True),
)


class ComparisonPanel(Picker):
    """A comparison whose curves are chosen by click or key; ``verdict`` is what a parity test said of the runs."""

    def __init__(self, comparison: Comparison, *, verdict: str = "", title: str = "") -> None:
        self.comparison = comparison
        self._columns = [_read(run) for run in comparison.runs]
        known = {name for columns in self._columns for name, (_, y, _) in columns.items() if np.isfinite(y).any()}
        self._shown = [curve for curve in CURVES if curve[1] in known] or [CURVES[0]]
        tabs = "".join(
            f'<span data-item="{number}" data-label="show {escape(name)}">{escape(name)}</span>'
            for number, (name, _, _) in enumerate(self._shown)
        )
        told = comparison.differences
        words = told._repr_html_() if len(told) else "<p>The configs are the same.</p>"
        judged = f'<div class="wl-verdict">{escape(verdict)}</div>' if verdict else ""
        index = (
            f'{judged}<div class="wl-scroll">{words}</div>'
            f'<div class="wl-scroll">{comparison.figures._repr_html_()}</div><div class="wl-tabs">{tabs}</div>'
        )
        still = self.chart(0)
        text = "\n".join(filter(None, [verdict, repr(comparison), still.text]))
        still = Chart(still.width, still.height, still.body, text)
        super().__init__(
            title or f"{len(comparison.runs)} runs", index, len(self._shown), self._draw, still, chosen=0
        )  # fmt: skip

    def chart(self, number: int) -> Chart:
        """Return the curves of a choice, all runs in one picture."""
        name, column, is_log = self._shown[number]
        lines = []
        for place, (columns, label) in enumerate(zip(self._columns, self.comparison.labels, strict=True)):
            if column in columns:
                x, y, raw = columns[column]
                is_dotted = column == "held_out_loss"
                lines.append(Line(label, COLORS[place % len(COLORS)], x, y, raw, is_dotted=is_dotted))
        return line_chart(lines, name, height=300, is_log=is_log, has_zero=not is_log)

    def _draw(self, item: int) -> str:
        return svg_of(self.chart(item))


def _read(run: Run) -> dict[str, Any]:
    """Return a run's curves: steps, values, and the values before smoothing where they were smoothed."""
    columns = Columns(read_metrics(run)[0])
    drawn = drawable(columns, bucket_size(columns.num_rows, STILL_BUCKETS))
    found: dict[str, Any] = {}
    for _, name, _ in CURVES:
        if name + SMOOTH in drawn:
            found[name] = drawn["step"], drawn[name + SMOOTH], drawn[name]
        elif name in drawn:
            found[name] = drawn["step"], drawn[name], None
    dots = [(e["step"], e["held_out_loss"]) for e in read_evaluations(run) if e.get("held_out_loss") is not None]
    if dots:
        steps, losses = np.array(dots, dtype=float).T
        found["held_out_loss"] = steps, losses, None
    return found
