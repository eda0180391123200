"""A panel of items and of what there is to say of the chosen one: points of a chart, rows of a list, bars of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.chart import Chart
from wamlab.lab.live import bundle
from wamlab.lab.panel import Panel


class Picker(Panel):
    """Items that mouse or arrow keys choose; a choice shows its details, and ``chosen`` is its number in Python.

    ``index`` is HTML or SVG whose items have ``data-item`` (their number) and ``data-label`` (what is read aloud);
    ``detail`` returns the HTML of an item. Whoever writes them escapes what users wrote.
    """

    _esm = bundle("dom.js", "picker.js")

    def __init__(
        self,
        title: str,
        index: str,
        num_items: int,
        detail: Callable[[int], str],
        still: Chart,
        *,
        chosen: int | None = None,
        has_filter: bool = False,
        is_wide: bool = True,
    ) -> None:
        super().__init__()
        if chosen is not None and not 0 <= chosen < num_items:
            raise InputError(f"item {chosen} cannot be chosen: there are {num_items}")
        self.title, self.index, self.num_items = title, index, num_items
        self.chosen = chosen
        self._detail, self._still = detail, still
        self._has_filter, self._is_wide = has_filter, is_wide

    def content(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the items and the details of the chosen one."""
        shown = self._detail(self.chosen) if self.chosen is not None else ""
        return {
            "title": self.title, "index": self.index, "chosen": self.chosen, "detail": shown,
            "has_filter": self._has_filter, "is_wide": self._is_wide,
        }, []  # fmt: skip

    def still(self) -> Chart:
        """Return the picture for saved notebooks."""
        return self._still

    def pick(self, item: int) -> None:
        """Choose an item, in every view too."""
        if not 0 <= item < self.num_items:
            raise InputError(f"item {item} cannot be chosen: there are {self.num_items}")
        self.chosen = item
        self.send({"kind": "detail", "item": item, "html": self._detail(item)})

    def hear(self, message: Mapping[str, Any]) -> None:
        """Choose what a view asks for."""
        if message.get("kind") == "pick" and type(message.get("item")) is int:
            self.pick(message["item"])


def svg_of(chart: Chart) -> str:
    """Return a chart as SVG for the inside of a panel, which brings the colours."""
    return f'<svg viewBox="0 0 {chart.width:g} {chart.height:g}" class="wl-drawing">{chart.body}</svg>'
