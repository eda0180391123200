"""One iteration of rollouts: who played what when, how long every episode was, and where the time went in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from wamlab.errors import InputError
from wamlab.lab.chart import Chart, placed, text_at
from wamlab.lab.picker import Picker, svg_of
from wamlab.lab.scale import Scale, tick_text
from wamlab.lab.table import Table

Bar = Mapping[str, Any]
NEEDED = ("worker", "group", "member", "start_s", "end_s", "chunks")
HUES = ("blue", "orange", "green", "purple", "sky", "grey")
LEFT, ROW_PX, CELL_PX = 84, 26, 22


@dataclass(frozen=True)
class Iteration:
    """What the bars of an iteration amount to."""

    num_workers: int
    num_episodes: int
    makespan_s: float | int
    busy_s: tuple[float | int, ...]  # of each worker
    end_s: tuple[float | int, ...]  # of each worker
    tail_s: float | int  # with only the last tenth of the episodes left
    longest: tuple[int, int]  # group and member of the episode that was played longest
    longest_chunks: int
    longest_s: float | int  # on any worker
    last: tuple[int, int]  # that ended last

    @property
    def utilisation(self) -> float:
        """The share of all workers' time in which they played."""
        return sum(self.busy_s) / (self.num_workers * self.makespan_s)

    @property
    def least_s(self) -> float | int:
        """What no schedule of this play on these workers can beat: equal shares, or the longest episode alone."""
        return max(sum(self.busy_s) / self.num_workers, self.longest_s)


def summarize_iteration(bars: Sequence[Bar], num_workers: int | None = None) -> Iteration:
    """Add up bars, each a stretch of an episode on a worker: worker, group, member, start_s, end_s, chunks played.

    A worker that plays several episodes side by side is busy where at least one is played. Raises InputError for
    bars that lack one of these, end before they start, or are on a worker that there is not.
    """
    _check(bars)
    num_workers = num_workers or 1 + max(int(bar["worker"]) for bar in bars)
    if (worst := max(int(bar["worker"]) for bar in bars)) >= num_workers:
        raise InputError(f"a bar is of worker {worst}, and there are {num_workers}: workers count from 0")
    zero_s = min(bar["start_s"] for bar in bars)
    chunks: dict[tuple[int, int], int] = {}
    ends_s: dict[tuple[int, int], float] = {}
    played_s: dict[tuple[int, int], float] = {}
    for bar in bars:
        key = int(bar["group"]), int(bar["member"])
        chunks[key] = chunks.get(key, 0) + int(bar["chunks"])
        ends_s[key] = max(ends_s.get(key, 0.0), bar["end_s"] - zero_s)
        played_s[key] = played_s.get(key, 0.0) + bar["end_s"] - bar["start_s"]
    finishes_s = sorted(ends_s.values())
    of_worker = [[bar for bar in bars if bar["worker"] == worker] for worker in range(num_workers)]
    longest = max(played_s, key=lambda key: (played_s[key], key))
    return Iteration(
        num_workers=num_workers,
        num_episodes=len(ends_s),
        makespan_s=finishes_s[-1],
        busy_s=tuple(_covered_s(own) for own in of_worker),
        end_s=tuple(max((bar["end_s"] - zero_s for bar in own), default=0.0) for own in of_worker),
        tail_s=finishes_s[-1] - finishes_s[math.ceil(0.9 * len(finishes_s)) - 1],
        longest=longest,
        longest_chunks=chunks[longest],
        longest_s=played_s[longest],
        last=max(ends_s, key=lambda key: ends_s[key]),
    )


def explain_iteration(bars: Sequence[Bar], num_workers: int | None = None) -> str:
    """Say in a few sentences where an iteration's time went and what would shorten it."""
    found = summarize_iteration(bars, num_workers)
    early = sum(found.makespan_s - end_s for end_s in found.end_s)
    between = sum(end_s - busy_s for end_s, busy_s in zip(found.end_s, found.busy_s, strict=True))
    whole = found.num_workers * found.makespan_s
    lines = [
        f"{found.num_episodes} episodes on {found.num_workers} workers took {found.makespan_s:.3g} s; workers played "
        f"{found.utilisation:.0%} of that time.",
        f"{early / whole:.0%} was lost by workers that had ended while others still played, {between / whole:.0%} by "
        "waits before that.",
        f"The last tenth of the episodes took {found.tail_s:.3g} s; group {found.last[0]}, member {found.last[1]} "
        f"ended last. The longest episode is group {found.longest[0]}, member {found.longest[1]}, with "
        f"{found.longest_chunks} chunks.",
    ]
    gain = found.makespan_s / found.least_s - 1
    if gain < 0.03:
        lines.append("No order of this play on these workers would be more than 3 % faster.")
    elif found.least_s <= found.longest_s + 1e-9:
        lines.append(
            f"Starting the longest episode first would save up to {gain / (1 + gain):.0%}; below its "
            f"{found.longest_s:.3g} s only faster play helps."
        )
    else:
        lines.append(f"Equal shares would save up to {gain / (1 + gain):.0%}: long episodes first, short ones last.")
    return "\n".join(lines)


def gantt_chart(bars: Sequence[Bar], num_workers: int | None = None, *, width: int = 880) -> Chart:
    """Draw every bar on its worker's row; a group has one hue, episodes side by side on a worker share its height."""
    found = summarize_iteration(bars, num_workers)
    zero_s = min(bar["start_s"] for bar in bars)
    x = Scale(0.0, found.makespan_s, LEFT, width - 16)
    bottom = 26 + ROW_PX * found.num_workers
    body = [text_at(0, 14, "who plays when; colours are groups", "fill-ink title")]
    for worker in range(found.num_workers):
        top = 26 + ROW_PX * worker
        body.append(text_at(LEFT - 10, top + 15, f"worker {worker}", "fill-soft", "end"))
        body.append(f'<path d="M{LEFT} {top + ROW_PX - 2}H{width - 16}" class="line-line"/>')
    for number, (bar, lane, num_lanes) in enumerate(_laned(bars)):
        height = (ROW_PX - 5) / num_lanes
        top = 26 + ROW_PX * bar["worker"] + lane * height
        left, right = float(x(bar["start_s"] - zero_s)), float(x(bar["end_s"] - zero_s))
        label = f"group {bar['group']}, member {bar['member']}: {bar['chunks']} chunks in "
        label += f"{bar['end_s'] - bar['start_s']:.3g} s on worker {bar['worker']}"
        is_last = (bar["group"], bar["member"]) == found.last
        body.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(1.0, right - left - 0.8):.1f}" '
            f'height="{max(1.0, height - 0.8):.1f}" rx="1.5" class="fill-{HUES[int(bar["group"]) % len(HUES)]}" '
            f'fill-opacity="{1 if is_last else 0.72}" data-item="{number}" data-label="{escape(label)}">'
            f"<title>{escape(label)}</title></rect>"
        )
    for tick in x.ticks(8):
        body.append(text_at(float(x(tick)), bottom + 14, tick_text(tick), "fill-soft", "middle"))
    body.append(text_at((LEFT + width) / 2, bottom + 30, "seconds since the iteration began", "fill-soft", "middle"))
    return Chart(width, bottom + 34, "".join(body), explain_iteration(bars, num_workers))


def length_map(bars: Sequence[Bar], *, width: int = 880) -> Chart:
    """Draw the chunks of every episode, a row a group and a column a member; darker is longer."""
    _check(bars)
    groups = sorted({int(bar["group"]) for bar in bars})
    num_members = 1 + max(int(bar["member"]) for bar in bars)
    lengths = np.zeros((len(groups), num_members), dtype=int)
    for bar in bars:
        lengths[groups.index(int(bar["group"])), int(bar["member"])] += int(bar["chunks"])
    cell = min(44.0, (width - LEFT) / num_members)
    body = [text_at(0, 14, "chunks of every episode: a row a group", "fill-ink title")]
    for row, group in enumerate(groups):
        y = 26 + CELL_PX * row
        body.append(text_at(LEFT - 10, y + 15, f"group {group}", "fill-soft", "end"))
        for member, count in enumerate(lengths[row]):
            share = count / max(1, lengths.max())
            body.append(
                f'<rect x="{LEFT + cell * member:.1f}" y="{y}" width="{cell - 2:.1f}" height="{CELL_PX - 2}" rx="2" '
                f'class="fill-blue" fill-opacity="{0.08 + 0.52 * share:.2f}"/>'
            )
            if cell >= 24:
                body.append(text_at(LEFT + cell * (member + 0.5) - 1, y + 14.5, str(count), "fill-ink", "middle"))
    text = f"{len(groups)} groups of up to {num_members}: {lengths[lengths > 0].min()} to {lengths.max()} chunks"
    return Chart(width, 30 + CELL_PX * len(groups), "".join(body), text)


class RolloutPanel(Picker):
    """An iteration in a notebook: the Gantt chart, the explanation, the lengths; a chosen bar tells of its episode."""

    def __init__(self, bars: Sequence[Bar], num_workers: int | None = None, *, title: str = "Rollouts") -> None:
        self.bars = sorted(bars, key=lambda bar: (bar["worker"], bar["start_s"]))
        gantt, lengths = gantt_chart(self.bars, num_workers), length_map(self.bars)
        words = "".join(f"<div>{escape(line)}</div>" for line in gantt.text.splitlines())
        index = f'<div class="wl-verdict">{words}</div>{svg_of(gantt)}{svg_of(lengths)}'
        still = Chart(
            gantt.width, gantt.height + 16 + lengths.height,
            gantt.body + placed(lengths, 0, gantt.height + 16), f"{gantt.text}\n{lengths.text}",
        )  # fmt: skip
        super().__init__(title, index, len(bars), self._describe, still)

    def _describe(self, item: int) -> str:
        chosen = self.bars[item]
        key = chosen["group"], chosen["member"]
        own = sorted((bar for bar in self.bars if (bar["group"], bar["member"]) == key), key=lambda bar: bar["start_s"])
        names = {"worker": "worker", "from s": "start_s", "to s": "end_s", "chunks": "chunks"}
        rows = [{title: bar[name] for title, name in names.items()} for bar in own]
        moves = sum(a["worker"] != b["worker"] for a, b in pairwise(own))
        pieces = "one piece" if len(own) == 1 else f"{len(own)} pieces, moved to another worker {moves} times"
        words = f"{sum(bar['chunks'] for bar in own)} chunks in {pieces}"
        return f"<b>group {key[0]}, member {key[1]}</b> · {words}{Table(rows)._repr_html_()}"


def _laned(bars: Sequence[Bar]) -> list[tuple[Bar, int, int]]:
    """Give bars of a worker that overlap lanes of their own; return each with its lane and their number there."""
    lanes: dict[int, list[float]] = {}
    placed_bars = []
    for bar in bars:
        ends = lanes.setdefault(bar["worker"], [])
        lane = next((i for i, end_s in enumerate(ends) if end_s <= bar["start_s"] + 1e-9), len(ends))
        ends[lane : lane + 1] = [bar["end_s"]]
        placed_bars.append((bar, lane))
    return [(bar, lane, len(lanes[bar["worker"]])) for bar, lane in placed_bars]


def _covered_s(bars: Sequence[Bar]) -> float | int:
    """Return how long at least one of the bars lasts."""
    total, end_s = 0.0, -math.inf
    for bar in sorted(bars, key=lambda bar: bar["start_s"]):
        total += max(0.0, bar["end_s"] - max(end_s, bar["start_s"]))
        end_s = max(end_s, bar["end_s"])
    return total


def _check(bars: Sequence[Bar]) -> None:
    if not bars:
        raise InputError("an iteration without a bar has nothing to show: give what was played")
    for number, bar in enumerate(bars):
        if missing := [name for name in NEEDED if bar.get(name) is None]:
            raise InputError(f"bar {number} has no {', '.join(missing)}: give {', '.join(NEEDED)}")
        if bar["end_s"] < bar["start_s"]:
            raise InputError(f"bar {number} ends at {bar['end_s']} s, before it starts at {bar['start_s']} s")
