"""The card that stands for a run: its state, key figures and curves in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from wamlab.lab.chart import CHAR_PX, Chart, placed, text_at
from wamlab.lab.colors import STATE_COLORS
from wamlab.lab.plots import Records, loss_chart, speed_chart, split_chart
from wamlab.lab.table import Table, short

WIDTH = 880


def key_figures(records: Records, evaluations: Records) -> list[tuple[str, str, str]]:
    """Return what one asks of a run first, as (name, value, remark)."""
    figures = []
    if records:
        last, recent = records[-1], records[-20:]
        figures.append(("loss", short(_mean(recent, "loss")), f"mean of {len(recent)} steps"))
    evaluation = evaluations[-1] if evaluations else {}
    for key, name, baseline, word in (
        ("held_out_loss", "held-out loss", "", ""),
        ("action_error", "action error", "action_error_mean_baseline", "mean action"),
        ("video_psnr_db", "video PSNR", "video_psnr_copy_db", "copying"),
    ):
        if evaluation.get(key) is not None:
            unit = " dB" if key.endswith("_db") else ""
            has_baseline = evaluation.get(baseline) is not None
            remark = f"{word} {short(evaluation[baseline])}{unit}" if has_baseline else f"step {evaluation['step']:,}"
            figures.append((name, short(evaluation[key]) + unit, remark))
    if records:
        figures.append(("samples/s", short(_mean(recent, "samples_per_s")), f"mean of {len(recent)} steps"))
        if last.get("memory_gib") is not None:
            figures.append(("memory", f"{last['memory_gib']:.3g} GiB", "peak"))
    return figures


def headline(status: Mapping[str, Any], config: Mapping[str, Any], records: Records) -> str:
    """Return steps done, time taken and when, in one line."""
    words = []
    if records:
        total = num_steps_of(config)
        words.append(f"step {records[-1]['step']:,}" + (f" of {total:,}" if total else ""))
    words.append(duration_text(elapsed_s(status)))
    words.append(f"started {status['started'][:16].replace('T', ' ')}")
    if status.get("is_paused"):
        words.append("paused")
    if status.get("num_resumes"):
        words.append(f"resumed {status['num_resumes']}×")
    return " · ".join(words)


def run_text(
    name: str, status: Mapping[str, Any], config: Mapping[str, Any], records: Records, evaluations: Records
) -> str:
    """Describe a run in aligned plain text."""
    lines = [f"{name}: {status['state']}", headline(status, config, records)]
    if status.get("error"):
        lines.append(status["error"])
    figures = key_figures(records, evaluations)
    if figures:
        lines += ["", repr(Table([{"figure": f, "value": v, "remark": r} for f, v, r in figures]))]
    return "\n".join(lines)


def run_chart(
    name: str, status: Mapping[str, Any], config: Mapping[str, Any], records: Records, evaluations: Records
) -> Chart:
    """Draw the card of a run."""
    body = [text_at(0, 18, name, "fill-ink name"), _badge(status["state"])]
    body.append(text_at(0, 40, headline(status, config, records), "fill-soft"))
    y = 58
    if status.get("error"):
        body.append(text_at(0, y, cut(str(status["error"]), 125), "fill-orange"))
        y += 18
    figures = key_figures(records, evaluations)
    if figures:
        body += _tiles(figures, y)
        y += 74
    half = (WIDTH - 24) / 2
    body.append(placed(loss_chart(records, evaluations, width=WIDTH), 0, y + 6))
    body.append(placed(speed_chart(records, width=half), 0, y + 280))
    body.append(placed(split_chart(records, width=half), half + 24, y + 280))
    return Chart(WIDTH, y + 500, "".join(body), run_text(name, status, config, records, evaluations))


def num_steps_of(config: Mapping[str, Any]) -> int | None:
    """Return how many steps a run will take, where its config says so in the usual place."""
    train = config.get("train", config)
    value = train.get("num_steps") if isinstance(train, Mapping) else None
    return value if isinstance(value, int) else None


def elapsed_s(status: Mapping[str, Any]) -> float:
    """Return the seconds from the run's start to its end, to now while it runs, or to its last sign of life."""
    start = datetime.fromisoformat(status["started"])
    if status["state"] == "running":
        return (datetime.now().astimezone() - start).total_seconds()
    return (datetime.fromisoformat(status["ended"] or status["heartbeat"]) - start).total_seconds()


def duration_text(seconds: float | int) -> str:
    """Write a duration for a person: 42 s, 5 min 10 s, 3 h 20 min, 2 d 4 h."""
    parts = [("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)]
    left, words = max(0, round(seconds)), []
    for unit, size in parts:
        count, left = divmod(left, size)
        if count or (unit == "s" and not words):
            words.append(f"{count} {unit}")
    return " ".join(words[:2])


def cut(text: str, length: int) -> str:
    """Shorten a text to what fits a line."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _badge(state: str) -> str:
    width = 20 + CHAR_PX * len(state)
    color = STATE_COLORS[state]
    return (
        f'<rect x="{WIDTH - width:.1f}" y="2" width="{width:.1f}" height="22" rx="11" class="fill-{color}" '
        f'fill-opacity=".16"/><circle cx="{WIDTH - width + 10:.1f}" cy="13" r="3.5" class="fill-{color}"/>'
        + text_at(WIDTH - width + 18, 17, state)
    )


def _tiles(figures: Sequence[tuple[str, str, str]], y: int) -> list[str]:
    step = WIDTH / max(6, len(figures))
    marks = []
    for i, (name, value, remark) in enumerate(figures):
        marks.append(text_at(i * step, y + 12, name, "fill-soft"))
        marks.append(text_at(i * step, y + 34, value, "fill-ink big"))
        marks.append(text_at(i * step, y + 51, cut(remark, 21), "fill-soft"))
    return marks


def _mean(records: Records, key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return sum(values) / len(values) if values else None
