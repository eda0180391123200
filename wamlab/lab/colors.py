"""One palette for still and live charts, on light and dark paper; hues from Okabe and Ito (2008).

Their hues stay apart for colour-blind eyes; lightness was set to at least 3:1 against the paper, text 4.5:1.
"""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#d8dee4",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#00845f",
    "purple": "#b8578f",
    "sky": "#4aa3dc",
    "grey": "#8c959f",
}
DARK = {
    "paper": "#14181d",
    "ink": "#e6edf3",
    "soft": "#9aa4af",
    "line": "#30363d",
    "blue": "#4c9be0",
    "orange": "#f08a4b",
    "green": "#3fc79a",
    "purple": "#d992bd",
    "sky": "#8fd0f5",
    "grey": "#848d97",
}
CURVE_COLORS = {"loss": "blue", "video_loss": "orange", "action_loss": "green", "samples_per_s": "blue"}
# Waiting for data is what one wants to see first: it gets the loudest hue.
PART_COLORS = {
    "data": "orange",
    "encode": "purple",
    "forward": "sky",
    "backward": "blue",
    "optimizer": "green",
}
STATE_COLORS = {
    "running": "blue",
    "finished": "green",
    "stopped": "grey",
    "failed": "orange",
    "lost": "orange",
}


def part_color(name: str) -> str:
    """Return the palette name of a part of a step; parts that wamlab does not know are grey."""
    return PART_COLORS.get(name, "grey")


def style(selector: str) -> str:
    """Return CSS classes for SVG: ``fill-blue``, ``line-blue``, ... in both colour schemes.

    Literal colours rather than variables, since not every SVG reader knows variables.
    """

    def rules(palette: dict[str, str]) -> str:
        fills = (f"{selector} .fill-{name}{{fill:{color}}}" for name, color in palette.items())
        lines = (f"{selector} .line-{name}{{stroke:{color}}}" for name, color in palette.items())
        return "".join([*fills, *lines])

    font = "font:12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
    fixed = f"{selector} text{{{font}}}{selector} .title{{font-weight:600;font-size:13px}}"
    fixed += f"{selector} .name{{font-weight:600;font-size:17px}}{selector} .big{{font-weight:600;font-size:16px}}"
    fixed += f"{selector} path{{fill:none;stroke-linejoin:round;stroke-linecap:round}}"
    return f"{fixed}{rules(LIGHT)}@media (prefers-color-scheme:dark){{{rules(DARK)}}}"
