"""The pictures of a run: losses, speed, where a step's time goes, losses by noise level, frame strips."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from wamlab.errors import InputError
from wamlab.lab.chart import Bar, Chart, Line, bar_chart, line_chart, stacked_chart
from wamlab.lab.colors import CURVE_COLORS, PART_COLORS, part_color
from wamlab.lab.scale import Number
from wamlab.lab.series import SMOOTH, SPLIT, Columns, bucket_size, drawable

Records = Sequence[Mapping[str, Any]]
STILL_BUCKETS = 400
LABELS = {"loss": "total", "video_loss": "video", "action_loss": "action", "samples_per_s": ""}
LABEL_GREY = (132, 141, 151, 255)  # 3.3:1 on white and 5.4:1 on dark paper


def loss_chart(
    records: Records, evaluations: Records = (), *, width: Number = 880, height: Number = 260, is_log: bool = True
) -> Chart:
    """Draw total, video and action loss over steps, smoothed over raw, with the held-out loss as dots."""
    drawn = _drawn(records)
    lines = [_curve(drawn, name) for name in ("loss", "video_loss", "action_loss") if name in drawn]
    held_out = [(e["step"], e["held_out_loss"]) for e in evaluations if e.get("held_out_loss") is not None]
    if held_out:
        steps, losses = np.array(held_out, dtype=float).T
        lines.append(Line("held-out", "purple", steps, losses, is_dotted=True))
    return line_chart(lines, "loss", width=width, height=height, is_log=is_log)


def speed_chart(records: Records, *, width: Number = 880, height: Number = 220) -> Chart:
    """Draw samples per second over steps."""
    drawn = _drawn(records)
    lines = [_curve(drawn, "samples_per_s")] if "samples_per_s" in drawn else []
    return line_chart(lines, "samples per second", width=width, height=height, has_zero=True)


def split_chart(records: Records, *, width: Number = 880, height: Number = 220) -> Chart:
    """Draw where each step's time goes, in milliseconds: data wait, encode, forward, backward, optimizer."""
    drawn = _drawn(records)
    parts = ordered_parts(name.removeprefix(SPLIT) for name in drawn if name.startswith(SPLIT))
    lines = [Line(part_label(part), part_color(part), drawn["step"], 1000 * drawn[SPLIT + part]) for part in parts]
    return stacked_chart(lines, "step time, ms", width=width, height=height)


def levels_chart(evaluations: Records, *, width: Number = 880) -> Chart:
    """Draw the newest held-out loss at each noise level (0 clean, 1 noise), marking where it began."""
    known = [e for e in evaluations if e.get("held_out_loss_by_level")]
    if not known:
        return bar_chart([], "held-out loss by noise level", width=width)
    first, last = known[0]["held_out_loss_by_level"], known[-1]["held_out_loss_by_level"]
    bars = [
        Bar(level, last[level], first.get(level) if len(known) > 1 else None)
        for level in sorted(last, key=float)
        if last[level] is not None
    ]
    title = f"held-out loss by noise level, step {known[-1]['step']:,}"
    return bar_chart(bars, title + (f" (mark: step {known[0]['step']:,})" if len(known) > 1 else ""), width=width)


def strip_png(
    rows: Sequence[Sequence[np.ndarray]],
    row_labels: Sequence[str],
    column_labels: Sequence[str] | None = None,
    *,
    min_height_px: int = 96,
) -> bytes:
    """Lay frames out in labelled rows, e.g. predicted under real ones, and return a PNG.

    ``rows`` hold uint8 [h w 3] frames of one size; small frames are enlarged by a whole factor, so that a
    pixel stays a pixel. Paper is transparent and labels mid-grey, readable in light and dark.
    """
    frames = [np.asarray(frame) for row in rows for frame in row]
    if not frames or any(f.shape != frames[0].shape or f.dtype != np.uint8 or f.ndim != 3 for f in frames):
        raise InputError("a strip needs frames of one size: give rows of uint8 arrays [h w 3]")
    if len(row_labels) != len(rows):
        raise InputError(f"a strip of {len(rows)} rows has {len(row_labels)} labels: give one a row")
    num_columns = max(map(len, rows))
    if column_labels is not None and len(column_labels) != num_columns:
        raise InputError(f"a strip of {num_columns} columns has {len(column_labels)} labels: give one a column")
    factor = max(1, -(-min_height_px // frames[0].shape[0]))
    height, width = frames[0].shape[0] * factor, frames[0].shape[1] * factor
    font = ImageFont.load_default(16)
    gap, left = 4, 10 + max((int(font.getlength(label)) for label in row_labels), default=0)
    top = 24 if column_labels is not None else 0
    size = (left + num_columns * (width + gap) - gap, top + len(rows) * (height + gap) - gap)
    canvas = Image.new("RGBA", size, (0, 0, 0, 0))
    draw = ImageDraw.Draw(canvas)
    for i, label in enumerate(column_labels or ()):
        draw.text((left + i * (width + gap) + width / 2, top / 2), label, LABEL_GREY, font, anchor="mm")
    for j, (row, label) in enumerate(zip(rows, row_labels, strict=True)):
        y = top + j * (height + gap)
        draw.text((0, y + height / 2), label, LABEL_GREY, font, anchor="lm")
        for i, frame in enumerate(row):
            picture = Image.fromarray(frame).resize((width, height), Image.Resampling.NEAREST)
            canvas.paste(picture, (left + i * (width + gap), y))
    data = io.BytesIO()
    canvas.save(data, "PNG")
    return data.getvalue()


def analysis_figure(records: Records) -> Any:
    """Return a static plotly figure of all curves, to zoom and hover in; needs no widget.

    The long ones are thinned to their extremes, so that the notebook stays small.
    """
    import plotly.graph_objects as go  # 0.2 s, and only this function wants it

    drawn = _drawn(records)
    figure = go.Figure()
    for name, values in drawn.items():
        if name == "step" or name.endswith(SMOOTH):
            continue
        is_shown = None if name in ("loss", "video_loss", "action_loss") else "legendonly"
        figure.add_scatter(x=drawn["step"], y=values.astype(np.float32), name=name, visible=is_shown)
    figure.update_layout(xaxis_title="step", hovermode="x unified", template="none", height=420)
    figure.update_yaxes(type="log")
    return figure


def ordered_parts(parts: Any) -> list[str]:
    """Put the parts of a step in the order they happen; unknown ones come before ``other``."""
    order = [*PART_COLORS]
    return sorted(parts, key=lambda p: (order.index(p) if p in order else len(order) + (p == "other"), p))


def part_label(part: str) -> str:
    """Return the name a person reads for a part of a step."""
    return "data wait" if part == "data" else part


def _drawn(records: Records) -> dict[str, np.ndarray]:
    columns = Columns(records)
    return drawable(columns, bucket_size(columns.num_rows, STILL_BUCKETS))


def _curve(drawn: Mapping[str, np.ndarray], name: str) -> Line:
    return Line(LABELS[name], CURVE_COLORS[name], drawn["step"], drawn[name + SMOOTH], raw=drawn[name])
