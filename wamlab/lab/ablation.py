"""What an ablation found: its table, the waterfall of step times, where each variant's step goes; imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from wamlab.errors import explained_damage
from wamlab.lab.colors import LIGHT, part_color
from wamlab.lab.plots import ordered_parts, part_label
from wamlab.lab.records import read_json, write_whole
from wamlab.lab.table import Table

OFFICIAL, FSDP2, FULL = "official baseline", "FSDP2 base", "all tricks"
RESULT = "ablation.json"
Result = Mapping[str, Any]


def read_ablation(folder: Path | str) -> Result:
    """Read an ablation's result as far as it has come; InputError where it says what no ablation writes."""
    path = Path(folder) / RESULT
    result = read_json(path)
    with explained_damage(path, "restore it from a copy, or measure in another folder"):
        _check(result)
    return result


def _check(result: Result) -> None:
    """Raise an error where a turn lacks what the tables and figures need."""
    if not all(isinstance(name, str) for name in [*result["tricks"], *result.get("quality", {}).values()]):
        raise TypeError("a trick or a verdict is no text")
    if not isinstance(result["tricks"], list) or not result["tricks"]:
        raise ValueError("there is no trick")
    for turns in result["turns"].values():
        if not isinstance(turns, list):
            raise TypeError("the turns of a variant are no list")
        for turn in turns:
            for name in ("step_s", "cpu_s", "num_samples", "num_processes", "memory_gib", "warmup_s"):
                _check_number(turn[name], name, least=0.0 if name in ("memory_gib", "warmup_s") else 1e-12)
            for name, value in turn["split_s"].items():
                _check_number(value, name, least=0.0)
            for loss in turn["losses"]:
                if loss is not None:  # one that was no number
                    _check_number(loss, "losses", least=1e-12)
            if turn["used"]["mfu"] is not None:
                _check_number(turn["used"]["mfu"], "mfu", least=0.0)


def _check_number(value: Any, name: str, *, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e15:
        raise ValueError(f"{name} is {str(value)[:40]}")


def ratios(result: Result, slow: str, fast: str, measure: str = "step_s") -> list[float]:
    """Return how many times faster one variant's step is than another's in each round that has both."""
    pairs = zip(result["turns"].get(slow, ()), result["turns"].get(fast, ()), strict=False)
    return [a[measure] / b[measure] for a, b in pairs]


def median_of(result: Result, variant: str, measure: str) -> float | None:
    """Return a variant's median over rounds; nothing before its first turn."""
    values = [turn[measure] for turn in result["turns"].get(variant, ())]
    return float(statistics.median(values)) if values else None


def loss_difference(result: Result, variant: str) -> float | None:
    """Return the largest relative difference of a step's loss from the official baseline's, over all turns.

    It is without limit where a loss was no number.
    """
    wanted = result["turns"].get(OFFICIAL)
    if not wanted:
        return None
    base = wanted[0]["losses"]
    turns = result["turns"].get(variant, ())
    pairs = [pair for turn in turns for pair in zip(turn["losses"], base, strict=False)]
    return max((float("inf") if None in pair else abs(pair[0] / pair[1] - 1) for pair in pairs), default=None)


def rows(result: Result) -> list[dict[str, Any]]:
    """Return a row for each variant that has a turn, in the shape of published speed tables."""
    found = []
    for name, turns in result["turns"].items():
        if not turns:
            continue
        speedups = sorted(ratios(result, OFFICIAL, name))
        cpu = ratios(result, OFFICIAL, name, "cpu_s")
        used = turns[-1]["used"]
        step_s = median_of(result, name, "step_s")
        assert step_s is not None
        found.append(
            {
                "variant": name,
                "step ms": 1000 * step_s,
                "samples/s/device": turns[0]["num_samples"] / step_s / turns[0]["num_processes"],
                "speed-up": statistics.median(speedups) if speedups else None,
                "spread": f"{speedups[0]:.2f}–{speedups[-1]:.2f}" if speedups else None,
                "in CPU time": statistics.median(cpu) if cpu else None,
                "peak GiB": max(turn["memory_gib"] for turn in turns),
                "MFU": used["mfu"],
                "warm-up s": statistics.median(turn["warmup_s"] for turn in turns),
                "loss differs by": loss_difference(result, name),
                "quality": result.get("quality", {}).get(name),
            }
        )
    return found


def ablation_table(result: Result) -> Table:
    """Return all variants as a table."""
    return Table(rows(result))


def factors(result: Result, measure: str = "step_s") -> dict[str, dict[str, float | None]]:
    """Return each trick's factor: where it is added to those before it, and where it is taken from all."""
    names = [OFFICIAL, *(f"+ {trick}" for trick in result["tricks"][:-1]), FULL]
    found: dict[str, dict[str, float | None]] = {}
    for number, trick in enumerate(result["tricks"]):
        added = ratios(result, names[number], names[number + 1], measure)
        is_last = trick == result["tricks"][-1]
        lost = ratios(result, names[-2] if is_last else f"all but {trick}", FULL, measure)
        found[trick] = {
            "added": statistics.median(added) if added else None,
            "left out": statistics.median(lost) if lost else None,
        }
    return found


def factor_table(result: Result, measure: str = "step_s") -> Table:
    """Return each trick's two factors as a table."""
    return Table([{"trick": name, **values} for name, values in factors(result, measure).items()])


def waterfall_figure(result: Result) -> Any:
    """Draw how each added trick shortens the step, from the official baseline to all tricks."""
    from plotly import graph_objects  # half a second to import

    names = [OFFICIAL, *(f"+ {trick}" for trick in result["tricks"][:-1]), FULL]
    known = [(name, ms) for name in names if (ms := median_of(result, name, "step_s")) is not None]
    labels = [name if name in (OFFICIAL, FULL) else name.removeprefix("+ ") for name, _ in known]
    times = [1000 * s for _, s in known]
    figure = graph_objects.Figure()
    for number, label in enumerate(labels):
        before = times[number - 1] if number else 0.0
        is_total = number in (0, len(labels) - 1)
        low, high = (0.0, times[number]) if is_total else sorted((before, times[number]))
        color = LIGHT["soft" if is_total else "blue" if times[number] <= before else "orange"]
        text = f"{times[number]:,.0f} ms" if is_total else f"÷ {before / times[number]:.2f}"
        figure.add_bar(
            x=[label], y=[high - low], base=[low], marker_color=color, text=text, textposition="outside",
            hovertext=f"{label}: {times[number]:,.0f} ms", hoverinfo="text", showlegend=False,
        )  # fmt: skip
    return _styled(figure, "What each trick takes off a step", "ms a step")


def split_figure(result: Result, variants: Sequence[str] | None = None) -> Any:
    """Draw where the step of every variant goes, as stacked bars."""
    from plotly import graph_objects

    chosen = [name for name in variants or result["turns"] if result["turns"].get(name)]
    parts = ordered_parts({part for name in chosen for part in result["turns"][name][0]["split_s"]})
    figure = graph_objects.Figure()
    for part in parts:
        figure.add_bar(
            y=chosen[::-1],
            x=[1000 * _part_s(result, name, part) for name in chosen[::-1]],
            name=part_label(part),
            orientation="h",
            marker_color=LIGHT[part_color(part)],
        )
    figure.update_layout(barmode="stack", height=180 + 26 * len(chosen))
    figure.update_layout(legend={"traceorder": "normal"})
    return _styled(figure, "Where a step goes", "ms a step", is_horizontal=True)


def _part_s(result: Result, variant: str, part: str) -> float:
    return statistics.median(turn["split_s"].get(part, 0.0) for turn in result["turns"][variant])


def _styled(figure: Any, title: str, axis: str, *, is_horizontal: bool = False) -> Any:
    figure.update_layout(
        title=title, template="plotly_white", font={"size": 13}, margin={"l": 10, "r": 20, "t": 60, "b": 40}
    )
    (figure.update_xaxes if is_horizontal else figure.update_yaxes)(title=axis)
    (figure.update_yaxes if is_horizontal else figure.update_xaxes)(automargin=True)
    return figure


def write_figures(folder: Path | str) -> Path:
    """Write a page with the table and both figures that needs nothing else, and return its path."""
    result = read_ablation(folder)
    with explained_damage(Path(folder) / RESULT):
        environment = result["environment"]
        devices = environment["gpus"] or [environment["cpu"]]
        hardware = ", ".join(str(device["name"]) for device in devices)
    parts = [
        "<!doctype html><meta charset='utf-8'><title>ablation</title>",
        "<style>body{font:14px system-ui;max-width:1180px;margin:24px auto}td,th{padding:3px 6px}</style>",
        f"<h1>What each trick does</h1><p>{escape(hardware)}</p>",
        ablation_table(result)._repr_html_(),
        waterfall_figure(result).to_html(full_html=False, include_plotlyjs=True),
        split_figure(result).to_html(full_html=False, include_plotlyjs=False),
        "<h2>Factors</h2>" + factor_table(result)._repr_html_(),
    ]
    path = Path(folder) / "ablation.html"
    write_whole(path, "\n".join(parts))
    return path
