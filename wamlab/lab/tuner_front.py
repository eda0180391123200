"""The tuner's front: memory against step time of every choice; one choice's plan as a picture, with its command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from wamlab.errors import InputError
from wamlab.lab.chart import CHAR_PX, Chart, text_at
from wamlab.lab.picker import Picker, svg_of
from wamlab.lab.scale import Scale, tick_text
from wamlab.lab.table import Table, short

Choice = Mapping[str, Any]
NEEDED = ("memory_gib", "step_s", "runs")
# What a block keeps of its forward pass; light where nothing is kept.
POLICY_COLORS = {"keep": "blue", "full": "grey", "attention": "purple", "matmuls": "sky", "offload": "orange"}
LEFT, TOP, HEIGHT = 60, 34, 300


def front_chart(choices: Sequence[Choice], *, limit_gib: float | int | None = None, width: int = 880) -> Chart:
    """Draw choices as points, memory to the right and time upwards, and the front of those that none beats in both.

    Each choice has ``memory_gib``, ``step_s`` and ``runs``, its plan as (policy, number of blocks) in order; ``label``
    names it. ``limit_gib`` is what a device has. Raises InputError for a choice without these.
    """
    _check(choices)
    memory, times_ms = (np.array([float(c[name]) for c in choices]) for name in ("memory_gib", "step_s"))
    times_ms = 1000 * times_ms
    edges = [*memory, *([limit_gib] if limit_gib is not None else [])]
    pad = 0.06 * (max(edges) - min(edges)) or 0.1 * max(edges)
    x = Scale(max(0.0, min(edges) - pad), max(edges) + pad, LEFT, width - 24)
    pad = 0.08 * np.ptp(times_ms) or 0.1 * times_ms.max()
    y = Scale(max(0.0, times_ms.min() - pad), times_ms.max() + pad, HEIGHT - 40, TOP)
    body = [text_at(0, 14, "step time, ms, against memory, GiB", "fill-ink title")]
    for tick in y.ticks(5):
        at = float(y(tick))
        body.append(f'<path d="M{LEFT} {at:.1f}H{width - 24}" class="line-line"/>')
        body.append(text_at(LEFT - 8, at + 4, tick_text(tick), "fill-soft", "end"))
    for tick in x.ticks(7):
        body.append(text_at(float(x(tick)), HEIGHT - 22, tick_text(tick), "fill-soft", "middle"))
    body.append(text_at((LEFT + width) / 2, HEIGHT - 4, "memory of a device, GiB", "fill-soft", "middle"))
    if limit_gib is not None:
        at = float(x(limit_gib))
        body.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - 40}" class="line-orange" stroke-dasharray="5 4"/>')
        body.append(text_at(at - 6, TOP + 10, f"{limit_gib:g} GiB there are", "fill-soft", "end"))
    front = front_of(choices)
    steps = "".join(f"H{x(memory[i]):.1f}V{y(times_ms[i]):.1f}" for i in front[1:])
    start = f"M{x(memory[front[0]]):.1f} {y(times_ms[front[0]]):.1f}"
    body.append(f'<path d="{start}{steps}" class="line-blue" stroke-width="1.8"/>')
    for number, choice in enumerate(choices):
        is_best = number in front
        label = f"{_name(choice, number)}: {memory[number]:.3g} GiB, {times_ms[number]:.4g} ms a step"
        label += ", on the front" if is_best else ""
        color, radius = ("blue", 6) if is_best else ("grey", 4.5)
        body.append(
            f'<circle cx="{x(memory[number]):.1f}" cy="{y(times_ms[number]):.1f}" r="{radius}" class="fill-{color}" '
            f'data-item="{number}" data-label="{escape(label)}"><title>{escape(label)}</title></circle>'
        )
    fastest, leanest = choices[front[-1]], choices[front[0]]
    text = (
        f"{len(choices)} choices, {len(front)} on the front: from {leanest['memory_gib']:.3g} GiB and "
        f"{1000 * leanest['step_s']:.4g} ms to {fastest['memory_gib']:.3g} GiB and {1000 * fastest['step_s']:.4g} ms"
    )
    return Chart(width, HEIGHT, "".join(body), text)


def front_of(choices: Sequence[Choice]) -> list[int]:
    """Return the numbers of the choices that no other beats in memory and in time, leanest first."""
    order = sorted(range(len(choices)), key=lambda i: (choices[i]["memory_gib"], choices[i]["step_s"]))
    found: list[int] = []
    for i in order:
        if not found or choices[i]["step_s"] < choices[found[-1]]["step_s"]:
            found.append(i)
    return found


def plan_picture(runs: Sequence[tuple[str, int]], *, width: int = 880) -> Chart:
    """Draw what each block keeps, from the first block to the last, with the policies' names."""
    total = sum(count for _, count in runs)
    cell = min(28.0, width / max(1, total))
    body, x, first = [], 0.0, 0
    for policy, count in runs:
        color = POLICY_COLORS.get(policy, "green")
        for _ in range(count):
            body.append(
                f'<rect x="{x:.1f}" y="6" width="{max(1.0, cell - 2):.1f}" height="26" rx="3" class="fill-{color}"/>'
            )
            x += cell
        words = f"{first}–{first + count - 1} {policy}" if count > 1 else f"{first} {policy}"
        if len(words) * CHAR_PX < count * cell:
            body.append(text_at(x - count * cell / 2, 48, words, "fill-soft", "middle"))
        first += count
    text = ", ".join(f"{count} {policy}" for policy, count in runs)
    legend_x = 0.0
    for policy in dict.fromkeys(policy for policy, _ in runs):
        color = POLICY_COLORS.get(policy, "green")
        body.append(f'<rect x="{legend_x:.1f}" y="60" width="10" height="10" rx="2" class="fill-{color}"/>')
        body.append(text_at(legend_x + 15, 69.5, policy, "fill-soft"))
        legend_x += 34 + CHAR_PX * len(policy)
    return Chart(width, 76, "".join(body), f"plan of {total} blocks: {text}")


class TunerFront(Picker):
    """The front in a notebook: click a point, or go along by arrow keys, to see its plan and command."""

    def __init__(
        self, choices: Sequence[Choice], *, limit_gib: float | int | None = None, title: str = "Tuner"
    ) -> None:
        """``choices`` as in ``front_chart``; ``command`` of a choice is shown to copy, other keys as a table."""
        chart = front_chart(choices, limit_gib=limit_gib)
        # The arrow keys go along the memory axis.
        self.choices = sorted(choices, key=lambda c: (c["memory_gib"], c["step_s"]))
        fits = [i for i in front_of(self.choices) if limit_gib is None or self.choices[i]["memory_gib"] <= limit_gib]
        index = svg_of(front_chart(self.choices, limit_gib=limit_gib))
        super().__init__(title, index, len(choices), self._describe, chart, chosen=fits[-1] if fits else None)

    @property
    def choice(self) -> Choice | None:
        """The chosen one; the fastest that fits until another is chosen."""
        return None if self.chosen is None else self.choices[self.chosen]

    def _describe(self, item: int) -> str:
        choice = self.choices[item]
        facts = {
            name: value
            for name, value in choice.items()
            if name not in ("runs", "command", "label") and isinstance(value, int | float | str)
        }
        table = Table([{"figure": name.replace("_", " "), "value": short(value)} for name, value in facts.items()])
        command = f'<div class="wl-code">{escape(choice["command"])}</div>' if choice.get("command") else ""
        plan = plan_picture(choice["runs"])
        heading = f"<b>{escape(_name(choice, item))}</b> · {escape(plan.text)}"
        return heading + svg_of(plan) + table._repr_html_() + command


def _name(choice: Choice, number: int) -> str:
    return str(choice.get("label") or f"choice {number + 1}")


def _check(choices: Sequence[Choice]) -> None:
    if not choices:
        raise InputError("a front needs at least one choice: the tuner found none that fits")
    for number, choice in enumerate(choices):
        if missing := [name for name in NEEDED if choice.get(name) is None]:
            raise InputError(f"choice {number} has no {', '.join(missing)}: give {', '.join(NEEDED)}")
