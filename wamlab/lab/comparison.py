"""Runs side by side: first in what their configs differ, then their key figures, then their losses in one picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.chart import Chart, Line, line_chart
from wamlab.lab.plots import STILL_BUCKETS
from wamlab.lab.records import Record, write_whole
from wamlab.lab.report import flattened, page_html
from wamlab.lab.run import Run, read_evaluations, read_metrics
from wamlab.lab.series import SMOOTH, Columns, bucket_size, drawable
from wamlab.lab.table import Table

COLORS = ("blue", "orange", "green", "purple", "sky", "grey")
MISSING = "not there"  # a field that only other runs' configs have
FIGURES = {
    "held-out loss": "held_out_loss", "action error": "action_error", "video PSNR dB": "video_psnr_db",
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Two or more runs to compare; shows itself as text or HTML."""

    runs: tuple[Run, ...]

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise InputError("a comparison needs at least two runs: name two, or a condition that two meet")
        if len({run.folder.resolve() for run in self.runs}) < len(self.runs):
            raise InputError("a run cannot be compared with itself: name two")

    @property
    def labels(self) -> list[str]:
        """Names of the runs without what all of them begin with but for the date."""
        return [run.name for run in self.runs]

    @property
    def differences(self) -> Table:
        """A row for each field of the configs, packages and fingerprints that differs, a column a run."""
        told = [_told(run) for run in self.runs]
        names = dict.fromkeys(name for facts in told for name in facts)
        rows = []
        for name in names:
            values = [facts.get(name, MISSING) for facts in told]
            if any(value != values[0] for value in values):
                rows.append({"field": name} | dict(zip(self.labels, values, strict=True)))
        return Table(rows, ["field", *self.labels])

    @property
    def figures(self) -> Table:
        """A row a figure, a column a run: what each one did and reached."""
        columns = [_figures(run) for run in self.runs]
        rows = [
            {"figure": name} | {label: column.get(name) for label, column in zip(self.labels, columns, strict=True)}
            for name in columns[0]
        ]
        return Table(rows, ["figure", *self.labels])

    @property
    def chart(self) -> Chart:
        """The training losses of all runs over steps, smoothed, in one picture."""
        lines = []
        for number, (run, label) in enumerate(zip(self.runs, self.labels, strict=True)):
            columns = Columns(read_metrics(run)[0])
            drawn = drawable(columns, bucket_size(columns.num_rows, STILL_BUCKETS))
            if "loss" in drawn:
                color = COLORS[number % len(COLORS)]
                lines.append(Line(label, color, drawn["step"], drawn["loss" + SMOOTH], raw=drawn["loss"]))
        return line_chart(lines, "loss", height=320, is_log=True)

    def __repr__(self) -> str:
        told = self.differences
        return f"{told if len(told) else 'the configs are the same'}\n\n{self.figures}"

    def _repr_html_(self) -> str:
        told = self.differences
        words = told._repr_html_() if len(told) else "<p>The configs are the same.</p>"
        return f"{words}{self.figures._repr_html_()}<div class='scroll chart'>{self.chart.svg}</div>"


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the comparison as one HTML file, whole in itself, and return its path."""
    names = ", ".join(comparison.labels)
    tables = [comparison.differences, comparison.figures]
    words = [
        f'<div class="scroll figures-table">{table._repr_html_()}</div>' if len(table) else "<p>The same.</p>"
        for table in tables
    ]
    body = (
        f"<header><h1>{len(comparison.runs)} runs</h1></header><div class='soft'>{escape(names)}</div>"
        f"<h2>In what the configs differ</h2>{words[0]}<h2>Figures</h2>{words[1]}"
        f"<h2>Losses</h2><div class='scroll chart'>{comparison.chart.svg}</div>"
    )
    write_whole(path, page_html(f"wamlab: {names}", body))
    return path


def _told(run: Run) -> Record:
    """Return what decides a run: its config, what went in, and the versions it ran on."""
    environment = run.environment
    packages = {f"packages.{name}": version for name, version in environment["packages"].items()}
    inputs = {f"input.{name}": str(value)[:12] for name, value in environment["fingerprints"].items()}
    states = {name: state if isinstance(state, Mapping) else {} for name, state in environment["git"].items()}
    commits = {f"git.{Path(name).name}": str(state.get("commit") or "")[:12] for name, state in states.items()}
    return flattened(run.config) | inputs | commits | packages


def _figures(run: Run) -> dict[str, Any]:
    records, evaluations = read_metrics(run)[0], read_evaluations(run)
    last, recent = (evaluations[-1] if evaluations else {}), records[-20:]

    def mean(name: str) -> float | None:
        values = [record[name] for record in recent if record.get(name) is not None]
        return sum(values) / len(values) if values else None

    found = {"state": run.state, "steps": records[-1]["step"] if records else 0, "loss, last 20 steps": mean("loss")}
    found |= {title: last.get(name) for title, name in FIGURES.items()}
    memory = [record["memory_gib"] for record in records if record.get("memory_gib") is not None]
    return found | {"samples/s, last 20 steps": mean("samples_per_s"), "memory GiB": max(memory, default=None)}
