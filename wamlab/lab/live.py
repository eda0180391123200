"""The widget behind ``watch``: uPlot in an anywidget, fed by binary messages that append."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import numpy as np

from wamlab.lab.colors import DARK, LIGHT, part_color
from wamlab.lab.plots import ordered_parts, part_label
from wamlab.lab.series import SPLIT, Columns, bucket_size, drawable

ASSETS = Path(__file__).parent / "assets"
WHOLE_S = (1.0, 8.0)  # between two sendings of all rows while no view is known: at first, doubled up to
MAX_BUCKETS = 1000  # about one a pixel of a wide chart


def bundle(*names: str) -> str:
    """Return front-end files as one module, in this order."""
    return "\n".join((ASSETS / name).read_text() for name in names)


def themed(selector: str) -> str:
    """Return CSS that gives the palette to what a selector finds, for the page's theme."""

    def variables(palette: Mapping[str, str]) -> str:
        return "{" + "".join(f"--wl-{name}:{color};" for name, color in palette.items()) + "}"

    # JupyterLab says its theme on the body; elsewhere the browser's own preference counts.
    dark = variables(DARK)
    return (
        f"{selector}{variables(LIGHT)}"
        f'body[data-jp-theme-light="false"] {selector},body.vscode-dark {selector}{dark}'
        f"@media(prefers-color-scheme:dark){{body:not([data-jp-theme-light],.vscode-light) {selector}{dark}}}"
    )


class LiveChart(anywidget.AnyWidget):
    """A chart that grows; nothing of its data is widget state, so that notebooks stay small.

    AnyWidget itself uses the names ``_send``, ``send_state``, ``comm``, ``keys`` and ``layout``.
    """

    _esm = bundle("uplot.js", "dom.js", "plots.js", "chart.js")
    _css = themed(".wl-live") + bundle("uplot.css", "chart.css")

    def __init__(self, *, max_buckets: int = MAX_BUCKETS, on_wish: Callable[[str], Any] | None = None) -> None:
        """``on_wish`` hears what a button asks of the run: "pause", "go on" or "stop"."""
        super().__init__()
        self._on_wish = on_wish
        self._columns = Columns()
        self._max_buckets = max_buckets
        self._drawn: dict[str, np.ndarray] = {}  # what views hold
        self._drawn_rows = 0  # records that views hold
        self._drawn_shape: tuple = ()  # bucket size and column names that views hold
        self._head: dict[str, Any] = {}
        self._evaluations: list[tuple[int, float]] = []
        self._has_view = False  # as far as is known: a busy kernel may not hear the first view
        self._whole_s, self._whole_wait_s = 0.0, WHOLE_S[0]
        # Views ask for rows from whatever thread the kernel answers messages in; the file is read in another.
        self._turn = threading.Lock()
        self.on_msg(self._answer)

    @property
    def num_records(self) -> int:
        return self._columns.num_rows

    def forget(self) -> None:
        """Start again without records, e.g. after the run went back to an earlier step."""
        with self._turn:
            self._columns = Columns()
            self._drawn, self._drawn_rows, self._drawn_shape = {}, 0, ()

    def show(
        self,
        records: Sequence[Mapping[str, Any]],
        head: Mapping[str, Any],
        evaluations: Sequence[tuple[int, float]],
    ) -> None:
        """Append step records and send what is new to every view, in one message."""
        with self._turn:
            self._columns.extend(records)
            self._head, self._evaluations = dict(head), list(evaluations)
            # A view that opens while a cell blocks cannot ask for rows, so until one did they are sent whole.
            is_whole = not self._has_view and time.monotonic() - self._whole_s > self._whole_wait_s
            if is_whole:
                self._whole_wait_s = min(WHOLE_S[1], 2 * self._whole_wait_s)
            self._send_rows(is_whole=is_whole)

    def _answer(self, widget: Any, message: Any, buffers: Any) -> None:
        if message.get("kind") == "ready":
            with self._turn:
                self._has_view = True
                if self._head:
                    self._send_rows(is_whole=True)
        elif message.get("kind") == "ask" and self._on_wish is not None:
            self._on_wish(message["wish"])

    def _send_rows(self, *, is_whole: bool) -> None:
        """Send the buckets that changed, or all; the last one of before may have been unfinished."""
        names = [name for name in self._columns.names if name != "step"]
        size = bucket_size(self._columns.num_rows, self._max_buckets)
        first = self._drawn_rows // size if (size, names) == self._drawn_shape else 0
        keep = first * (1 if size == 1 else 2)
        rows = drawable(self._columns, size, first)
        before = self._drawn if keep else {name: values[:0] for name, values in rows.items()}
        self._drawn = {name: np.concatenate([before[name][:keep], values]) for name, values in rows.items()}
        self._drawn_rows, self._drawn_shape = self._columns.num_rows, (size, names)
        if is_whole or keep == 0:
            self._whole_s = time.monotonic()
            rows, keep = self._drawn, 0
        parts = ordered_parts(name.removeprefix(SPLIT) for name in names if name.startswith(SPLIT))
        message = {
            "kind": "update",
            "keep": keep,
            "names": list(rows),
            "num_records": self._columns.num_rows,
            "parts": [(SPLIT + part, part_label(part), part_color(part)) for part in parts],
            "evaluations": self._evaluations,
            "head": self._head,
        }
        self.send(message, [np.stack(list(rows.values())).astype("<f8").tobytes()])
