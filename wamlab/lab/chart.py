"""Still charts as SVG: drawings that know their size, put together and shown by anything with a browser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from wamlab.lab.colors import style
from wamlab.lab.scale import Number, Scale, tick_text

CHAR_PX = 6.7  # mean width of a character at 12 px
LINE_PX = 15  # distance of direct labels


@dataclass(frozen=True)
class Chart:
    """An SVG drawing with its plain-text reading; shows itself in a notebook."""

    width: Number
    height: Number
    body: str
    text: str

    @property
    def svg(self) -> str:
        """The whole document; it scales with the width it is given."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="wl" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" style="max-width:100%;height:auto" role="img">'
            f"<title>{escape(self.text.splitlines()[0])}</title><style>{style('.wl')}</style>{self.body}</svg>"
        )

    def __str__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        # The SVG is shown as an image, which does not know the theme of the page around it: give it paper.
        return {"image/svg+xml": on_paper(self).svg, "text/plain": self.text}


@dataclass(frozen=True)
class Line:
    """One curve: ``y`` over ``x``, drawn with its unsmoothed twin behind it, or as dots."""

    label: str
    color: str  # of wamlab.lab.colors
    x: np.ndarray
    y: np.ndarray  # NaN leaves a gap
    raw: np.ndarray | None = None
    band: tuple[np.ndarray, np.ndarray] | None = None  # lower and upper end of its intervals, shaded
    is_dotted: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Bar:
    """One row of a bar table; ``before`` is marked on the bar, e.g. the value at the start of a run."""

    label: str
    value: Number
    before: Number | None = None


def text_at(x: Number, y: Number, text: str, classes: str = "fill-ink", anchor: str = "start") -> str:
    """Place one line of text; ``y`` is its base line."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}"{where}>{escape(text)}</text>'


def placed(chart: Chart, x: Number, y: Number) -> str:
    """Return a chart's body moved to a place of a larger one."""
    return f'<g transform="translate({x:g} {y:g})">{chart.body}</g>'


def on_paper(chart: Chart, margin: Number = 16) -> Chart:
    """Return the chart on a card of its own, readable on any background."""
    width, height = chart.width + 2 * margin, chart.height + 2 * margin
    card = f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8" class="fill-paper line-line"/>'
    return Chart(width, height, card + placed(chart, margin, margin), chart.text)


def line_chart(
    lines: Sequence[Line],
    title: str,
    *,
    width: Number = 880,
    height: Number = 260,
    x_label: str = "step",
    is_log: bool = False,
    has_zero: bool = False,
) -> Chart:
    """Draw curves with their names and last values at their right end; ``has_zero`` starts the axis at 0."""
    lines = [_positive(line) if is_log else line for line in lines]
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return empty_chart(title, width, height)
    low, high = _range(lines, is_log=is_log, has_zero=has_zero)
    names = [f"{line.label} {_last(line.y):.3g}".strip() for line in lines]
    right = width - 14 - CHAR_PX * max(map(len, names))
    y = Scale(low, high, height - 36, 34, is_log=is_log)
    x = Scale(
        min(np.nanmin(line.x) for line in lines),
        max(np.nanmax(line.x) for line in lines),
        left := _left_of(y),
        right,
    )
    body = [text_at(0, 14, title, "fill-ink title"), *_axes(x, y, left, right, x_label)]
    for line in lines:
        if line.band is not None:
            body.append(_band(x(line.x), y(line.band[0]), y(line.band[1]), line.color))
        if line.raw is not None:
            body.append(_path(x(line.x), y(line.raw), f"line-{line.color}", 'stroke-opacity=".28"'))
    for line in lines:
        if line.is_dotted:
            body.append(_path(x(line.x), y(line.y), f"line-{line.color}", 'stroke-dasharray="2 4"'))
            body += _dots(x(line.x), y(line.y), line.color)
        else:
            body.append(_path(x(line.x), y(line.y), f"line-{line.color}", 'stroke-width="1.8"'))
    ends = [float(y(_last(line.y))) for line in lines]
    for line, name, end, place in zip(lines, names, ends, spread(ends, height - 36), strict=True):
        body.append(
            f'<path d="M{right + 2:.1f} {end:.1f}L{right + 9:.1f} {place:.1f}" class="line-{line.color}" '
            f'stroke-width="1.8"/>' + text_at(right + 12, place + 4, name)
        )
    text = f"{title}: " + ", ".join(
        f"{line.label} {_first(line.y):.3g} → {_last(line.y):.3g}".strip() for line in lines
    )
    return Chart(width, height, "".join(body), text)


def stacked_chart(
    lines: Sequence[Line], title: str, *, width: Number = 880, height: Number = 220, x_label: str = "step"
) -> Chart:
    """Draw parts of a whole as areas on top of each other, with each part's share in the legend."""
    lines = [line for line in lines if np.nansum(line.y) > 0]
    if not lines:
        return empty_chart(title, width, height)
    sums = np.cumsum([np.nan_to_num(line.y) for line in lines], axis=0)
    legend = _legend([(f"{line.label} {_share(line, sums):.0%}", line.color) for line in lines], width)
    top = 30 + LINE_PX * legend.count("<g>")
    y = Scale(0, float(np.quantile(sums[-1], 0.995)) * 1.05 or 1.0, height - 36, top)
    left = _left_of(y)
    right = width - 18  # room for half of the last tick's text
    x = Scale(lines[0].x[0], lines[0].x[-1], left, right)
    body = [text_at(0, 14, title, "fill-ink title"), legend]
    clip = np.minimum(sums, y.high)  # one slow step must not flatten all others
    for line, lower, upper in zip(lines, [np.zeros_like(clip[0]), *clip[:-1]], clip, strict=True):
        edge = np.concatenate([np.stack([x(line.x), y(upper)], 1), np.stack([x(line.x), y(lower)], 1)[::-1]])
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in edge)
        body.append(f'<polygon points="{points}" class="fill-{line.color}"/>')
    body += _axes(x, y, left, right, x_label)
    text = f"{title}: " + ", ".join(f"{line.label} {_share(line, sums):.0%}" for line in lines)
    return Chart(width, height, "".join(body), text)


def bar_chart(bars: Sequence[Bar], title: str, *, width: Number = 880, color: str = "blue") -> Chart:
    """Draw a table of labelled bars from 0; a bar's ``before`` is a thin mark across it."""
    if not bars:
        return empty_chart(title, width, 60)
    names = max(len(bar.label) for bar in bars) * CHAR_PX + 10
    reach = max(max(bar.value, bar.before or 0) for bar in bars) or 1.0
    scale = (width - names - 64) / reach
    body = [text_at(0, 14, title, "fill-ink title")]
    for i, bar in enumerate(bars):
        top = 30 + 24 * i
        length = max(1.0, bar.value * scale)
        body.append(text_at(names - 10, top + 12, bar.label, "fill-soft", "end"))
        body.append(f'<rect x="{names:.1f}" y="{top}" width="{length:.1f}" height="16" rx="2" class="fill-{color}"/>')
        label = length + 8
        if bar.before is not None:
            mark = bar.before * scale
            body.append(f'<path d="M{names + mark:.1f} {top - 2}v20" class="line-ink" stroke-width="1.6"/>')
            if length - 4 < mark < label + 50:  # the number would lie on the mark
                label = max(length, mark) + 8
        body.append(text_at(names + label, top + 12, f"{bar.value:.4g}"))
    text = f"{title}: " + ", ".join(f"{bar.label} {bar.value:.4g}" for bar in bars)
    return Chart(width, 30 + 24 * len(bars), "".join(body), text)


def empty_chart(title: str, width: Number, height: Number) -> Chart:
    """Say that there is nothing to draw yet."""
    body = text_at(0, 14, title, "fill-ink title") + text_at(0, 40, "nothing recorded yet", "fill-soft")
    return Chart(width, height, body, f"{title}: nothing recorded yet")


def spread(places: Sequence[Number], high: Number, gap: Number = LINE_PX) -> list[float]:
    """Move labels apart to ``gap`` pixels, in their order and none below ``high``: a pass down, a pass up."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = [float(place) for place in places]
    for before, i in pairwise(order):
        moved[i] = max(moved[i], moved[before] + gap)
    ceiling = float(high)
    for i in reversed(order):
        moved[i] = min(moved[i], ceiling)
        ceiling = moved[i] - gap
    return moved


def _positive(line: Line) -> Line:
    """Leave gaps where a logarithmic axis has no place for a value."""
    y, raw = (None if v is None else np.where(v > 0, v, np.nan) for v in (line.y, line.raw))
    return replace(line, y=y, raw=raw)


def _range(lines: Sequence[Line], *, is_log: bool, has_zero: bool) -> tuple[float, float]:
    """Return the axis' ends: all smooth values, and the raw ones but for their wildest half percent."""
    smooth = np.concatenate([line.y for line in lines] + [edge for line in lines for edge in line.band or ()])
    raw = np.concatenate([line.raw for line in lines if line.raw is not None] or [smooth])
    smooth, raw = (values[np.isfinite(values)] for values in (smooth, raw))
    edges = [smooth.min(), smooth.max(), *(np.quantile(raw, [0.005, 0.995]) if len(raw) else [])]
    low, high = float(min(edges)), float(max(edges))
    if is_log:
        return low / 1.15, high * 1.15
    pad = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (0.0 if has_zero else low - pad), high + pad


def _left_of(y: Scale) -> float:
    return 10 + CHAR_PX * max(len(tick_text(tick)) for tick in y.ticks(5))


def _axes(x: Scale, y: Scale, left: Number, right: Number, x_label: str) -> list[str]:
    bottom = y.start_px
    marks = []
    for tick in y.ticks(5):
        at = float(y(tick))
        marks.append(f'<path d="M{left:.1f} {at:.1f}H{right:.1f}" class="line-line" stroke-opacity=".7"/>')
        marks.append(text_at(left - 8, at + 4, tick_text(tick), "fill-soft", "end"))
    for tick in x.ticks(max(2, int((right - left) / 110))):
        at = float(x(tick))
        marks.append(f'<path d="M{at:.1f} {bottom:.1f}v4" class="line-soft"/>')
        marks.append(text_at(at, bottom + 17, tick_text(tick), "fill-soft", "middle"))
    marks.append(f'<path d="M{left:.1f} {bottom:.1f}H{right:.1f}" class="line-soft"/>')
    return [*marks, text_at((left + right) / 2, bottom + 33, x_label, "fill-soft", "middle")]


def _path(x: np.ndarray, y: np.ndarray, classes: str, attributes: str) -> str:
    """Join the points by straight lines, lifting the pen at gaps."""
    commands, is_down = [], False
    for px, py in zip(x, y, strict=True):
        if math.isfinite(py):
            commands.append(f"{'L' if is_down else 'M'}{px:.1f} {py:.1f}")
        is_down = math.isfinite(py)
    return f'<path d="{"".join(commands)}" class="{classes}" {attributes}/>'


def _band(x: np.ndarray, low: np.ndarray, high: np.ndarray, color: str) -> str:
    edge = [*zip(x, high, strict=True), *reversed([*zip(x, low, strict=True)])]
    points = " ".join(f"{px:.1f},{py:.1f}" for px, py in edge if math.isfinite(py))
    return f'<polygon points="{points}" class="fill-{color}" fill-opacity=".16"/>'


def _dots(x: np.ndarray, y: np.ndarray, color: str) -> list[str]:
    return [
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" class="fill-{color} line-paper"/>'
        for px, py in zip(x, y, strict=True)
        if math.isfinite(py)
    ]


def _legend(entries: Sequence[tuple[str, str]], width: Number) -> str:
    """Return rows of coloured squares with names, one ``<g>`` a row."""
    rows, x = [[]], 0.0
    for name, color in entries:
        length = 28 + CHAR_PX * len(name)
        if x + length > width and rows[-1]:
            rows.append([])
            x = 0.0
        y = 26 + LINE_PX * (len(rows) - 1)
        square = f'<rect x="{x:.1f}" y="{y}" width="10" height="10" rx="2" class="fill-{color}"/>'
        rows[-1].append(square + text_at(x + 15, y + 9.5, name, "fill-soft"))
        x += length
    return "".join(f"<g>{''.join(row)}</g>" for row in rows)


def _share(line: Line, sums: np.ndarray) -> float:
    return float(np.nansum(line.y) / sums[-1].sum())


def _first(values: np.ndarray) -> float:
    return float(values[np.isfinite(values)][0])


def _last(values: np.ndarray) -> float:
    return float(values[np.isfinite(values)][-1])
