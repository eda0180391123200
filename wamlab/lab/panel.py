"""What the panels of a notebook share: their data goes by messages, and a still picture stands for them when saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anywidget
from IPython.display import display

from wamlab.lab.colors import DARK, LIGHT
from wamlab.lab.live import bundle, themed


def panel_css() -> str:
    """Return the CSS of panels: the palette for the page's theme, and for drawings inside them."""
    names = LIGHT.keys() & DARK.keys()
    drawings = "".join(
        f".wl-live svg .fill-{name}{{fill:var(--wl-{name})}}.wl-live svg .line-{name}{{stroke:var(--wl-{name})}}"
        for name in sorted(names)
    )
    return themed(".wl-live") + bundle("chart.css", "panel.css") + drawings


class Panel(anywidget.AnyWidget):
    """A widget whose content is sent to each view that asks and is never widget state, so that notebooks stay small.

    Shown in a cell it leaves a still picture before itself, which the view hides while it lives: a saved notebook
    shows it where no kernel runs.
    """

    _css = panel_css()

    def __init__(self) -> None:
        super().__init__()
        self.on_msg(self._answer)

    def content(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return what a view shows, and the buffers that it names."""
        raise NotImplementedError

    def still(self) -> Any:
        """Return the picture that stands for the panel: something that shows itself."""
        raise NotImplementedError

    def hear(self, message: Mapping[str, Any]) -> None:
        """Answer what a view says."""

    def refresh(self) -> None:
        """Send the content again to every view."""
        message, buffers = self.content()
        self.send({"kind": "content", **message}, buffers)

    def _answer(self, widget: Any, message: Any, buffers: Any) -> None:
        if message.get("kind") == "ready":
            self.refresh()
        else:
            self.hear(message)

    def _ipython_display_(self, **options: Any) -> None:
        display(self.still())
        view = {"version_major": 2, "version_minor": 1, "model_id": self.model_id}
        words = type(self).__name__
        display({"application/vnd.jupyter.widget-view+json": view, "text/plain": words}, raw=True)
