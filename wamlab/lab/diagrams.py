"""Pictures of how the model works: who looks at whom, and which noise levels are trained and visited."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from wamlab.errors import InputError
from wamlab.lab.chart import Chart, Line, line_chart
from wamlab.lab.plots import LABEL_GREY

SEEN, UNSEEN, RULE = (0, 114, 178, 255), (132, 141, 151, 46), (132, 141, 151, 255)


def mask_png(mask: np.ndarray, groups: Mapping[str, int], *, size_px: int = 480) -> bytes:
    """Draw an attention mask, bool [query, key], with the names and sizes of consecutive groups of tokens; a PNG."""
    mask = np.asarray(mask, dtype=bool)
    total = sum(groups.values())
    if mask.shape != (total, total):
        raise InputError(f"a mask of {mask.shape} does not fit groups of {total} tokens in all")
    cell = max(1, round(size_px / total))
    side, font = cell * total, ImageFont.load_default(14)
    left, top = 12 + max(int(font.getlength(name)) for name in groups), 24
    canvas = Image.new("RGBA", (left + side + 2, top + side + 2), (0, 0, 0, 0))
    colors = np.where(mask[..., None], SEEN, UNSEEN).astype(np.uint8).repeat(cell, 0).repeat(cell, 1)
    canvas.paste(Image.fromarray(colors, "RGBA"), (left, top))
    draw = ImageDraw.Draw(canvas)
    start = 0
    for name, size in groups.items():
        at, middle = start * cell, (start + size / 2) * cell
        draw.line([(left, top + at), (left + side, top + at)], RULE)
        draw.line([(left + at, top), (left + at, top + side)], RULE)
        draw.text((left - 6, top + middle), name, LABEL_GREY, font, anchor="rm")
        if font.getlength(name) <= size * cell:
            draw.text((left + middle, top / 2), name, LABEL_GREY, font, anchor="mm")
        start += size
    draw.rectangle([(left, top), (left + side, top + side)], outline=RULE)
    data = io.BytesIO()
    canvas.save(data, "PNG")
    return data.getvalue()


def schedule_chart(
    levels: np.ndarray, weights: np.ndarray, samplers: Mapping[str, Sequence[float]], *, width: int = 880
) -> Chart:
    """Draw the weight of each noise level in the loss, and the levels that samplers visit as dots below it."""
    x, y = np.asarray(levels, dtype=float), np.asarray(weights, dtype=float)
    lines = [Line("weight in the loss", "blue", x, y)]
    colors = ("orange", "green", "purple", "sky")
    for (name, visited), color, row in zip(samplers.items(), colors, range(1, 5), strict=False):
        visited = np.asarray(visited, dtype=float)
        lines.append(Line(name, color, visited, np.full(len(visited), -0.15 * row), is_dotted=True))
    return line_chart(lines, "noise level: 0 is clean, 1 is noise", width=width, height=280, x_label="noise level")
