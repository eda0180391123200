"""A clip frame by frame: several views, predicted under real frames, and the actions below with the moment marked."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from wamlab.errors import InputError
from wamlab.lab.chart import CHAR_PX, Chart, text_at
from wamlab.lab.live import bundle
from wamlab.lab.panel import Panel
from wamlab.lab.picker import svg_of
from wamlab.lab.plots import strip_png

SMALL_PX = 128  # up to this side frames are sent as they are: JPEG would show
VIEW_PX = 160  # shown width of a view at least
NUM_STILL = 6  # frames of the picture for saved notebooks
ROW_PX = 34
LEFT = 110
Views = Mapping[str, UInt8[np.ndarray, "_ _ _ 3"]]  # [t h w 3]; views may differ in size


@dataclass(frozen=True, repr=False)
class Picture:
    """A PNG that shows itself."""

    png: bytes
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"image/png": self.png, "text/plain": self.text}


class ClipViewer(Panel):
    """A clip in a notebook: a slider, play and arrow keys go through its frames, in all views at once."""

    _esm = bundle("dom.js", "clip_viewer.js")

    def __init__(
        self,
        views: Views,
        predicted: Views | None = None,
        *,
        actions: Float[np.ndarray, "a j"] | None = None,
        predicted_actions: Float[np.ndarray, "_ _"] | None = None,
        action_names: Sequence[str] | None = None,
        fps: float | int = 10.0,
        title: str = "Clip",
    ) -> None:
        """``predicted`` has frames of the same times for some or all views; actions reach over the whole clip.

        Raises InputError for frames that are not uint8 [t h w 3], and for views or actions of different lengths.
        """
        super().__init__()
        predicted = predicted or {}
        self.num_frames = _check_views(views, predicted)
        if not fps > 0:
            raise InputError(f"a clip of {fps} frames a second cannot be played: give more than 0")
        self.title, self.fps = title, float(fps)
        self._rows = [("real", views), *([("predicted", predicted)] if predicted else [])]
        self._views = list(views)
        self._actions = None
        if actions is not None:
            self._actions = actions_chart(actions, predicted_actions, action_names)
        # Encoded once; a view that is opened again gets the same bytes.
        self._frames: list[bytes] = []
        self._places: list[dict[str, Any]] = []
        for row, frames_by_view in self._rows:
            for name, frames in frames_by_view.items():
                height, width = frames.shape[1:3]
                place = {"row": row, "view": self._views.index(name), "first": len(self._frames)}
                self._places.append(place | {"width": width, "height": height})
                self._frames += [encode_frame(frame) for frame in frames]

    def content(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the frames of all views and the drawing of the actions."""
        widths = [place["width"] for place in self._places]
        return {
            "title": self.title, "fps": self.fps, "num_frames": self.num_frames, "views": self._views,
            "rows": [row for row, _ in self._rows], "places": self._places,
            "zoom": max(1, -(-VIEW_PX // max(widths))) if max(widths) < VIEW_PX else 1,
            "actions": svg_of(self._actions) if self._actions else "", "left": LEFT,
        }, self._frames  # fmt: skip

    def still(self) -> Picture:
        """Return a few frames of the first view, predicted below real ones."""
        chosen = np.unique(np.linspace(0, self.num_frames - 1, min(NUM_STILL, self.num_frames)).round().astype(int))
        name = self._views[0]
        rows = {row: frames[name] for row, frames in self._rows if name in frames}
        strip = strip_png(
            [[frames[i] for i in chosen] for frames in rows.values()],
            list(rows),
            [f"{i / self.fps:.2g} s" for i in chosen],
        )
        return Picture(strip, f"{self.title}: {self.num_frames} frames of {', '.join(self._views)}")


def encode_frame(frame: UInt8[np.ndarray, "h w 3"]) -> bytes:
    """Return a frame as PNG if it is small, else as JPEG."""
    data = io.BytesIO()
    if max(frame.shape[:2]) <= SMALL_PX:
        Image.fromarray(frame).save(data, "PNG")
    else:
        Image.fromarray(frame).save(data, "JPEG", quality=85)
    return data.getvalue()


def actions_chart(
    actions: Float[np.ndarray, "a j"],
    predicted: Float[np.ndarray, "_ _"] | None = None,
    names: Sequence[str] | None = None,
    *,
    width: int = 880,
) -> Chart:
    """Draw a row for each action dimension over the clip: real ones as a line, predicted ones dashed.

    Raises InputError for arrays of different shapes or another number of names.
    """
    num_ticks, num_dims = actions.shape
    if predicted is not None and predicted.shape != actions.shape:
        raise InputError(f"predicted actions {predicted.shape} do not fit real ones {actions.shape}")
    names = list(names) if names is not None else [f"action {dim}" for dim in range(num_dims)]
    if len(names) != num_dims:
        raise InputError(f"{len(names)} names do not fit {num_dims} action dimensions")
    body = [text_at(0, 14, "actions", "fill-ink title")]
    legend = [
        ("real", "blue", ""),
        *([("predicted", "orange", 'stroke-dasharray="5 3"')] if predicted is not None else []),
    ]
    for place, (word, color, dash) in enumerate(legend):
        at = LEFT + 90 * place
        body.append(f'<path d="M{at} 10h22" class="line-{color}" stroke-width="2" {dash}/>')
        body.append(text_at(at + 28, 14, word, "fill-soft"))
    x = np.linspace(LEFT, width - 8, num_ticks) if num_ticks > 1 else np.array([float(LEFT)])
    for dim, name in enumerate(names):
        top = 26 + ROW_PX * dim
        sources = [actions[:, dim], *([predicted[:, dim]] if predicted is not None else [])]
        low, high = min(float(v.min()) for v in sources), max(float(v.max()) for v in sources)
        body.append(f'<path d="M{LEFT} {top + ROW_PX - 3}H{width - 8}" class="line-line"/>')
        longest = int((LEFT - 8) / CHAR_PX)
        body.append(
            text_at(LEFT - 8, top + 20, name if len(name) <= longest else f"{name[: longest - 1]}…", "fill-soft", "end")
        )
        for values, (_, color, dash) in zip(sources, legend, strict=True):
            y = top + 4 + (ROW_PX - 12) * (1 - (values - low) / ((high - low) or 1.0))
            points = "L".join(f"{px:.1f} {py:.1f}" for px, py in zip(x, y, strict=True))
            body.append(f'<path d="M{points}" class="line-{color}" stroke-width="1.6" {dash}/>')
    height = 28 + ROW_PX * num_dims
    body.append(f'<path d="M{LEFT} 22V{height}" class="line-ink wl-moment" stroke-width="1.4"/>')
    return Chart(width, height, "".join(body), f"{num_dims} action dimensions over {num_ticks} ticks")


def _check_views(views: Views, predicted: Views) -> int:
    if not views:
        raise InputError("a clip needs at least one view")
    if unknown := [name for name in predicted if name not in views]:
        raise InputError(f"there are predicted frames of {', '.join(unknown)}, and no real ones to hold them against")
    lengths = set()
    for name, frames in [*views.items(), *predicted.items()]:
        frames = np.asarray(frames)
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
            raise InputError(f"frames of {name} are {frames.dtype} {frames.shape}: give uint8 [t h w 3]")
        lengths.add(len(frames))
    if len(lengths) > 1 or lengths == {0}:
        raise InputError(f"views have {', '.join(map(str, sorted(lengths)))} frames: give the same number, at least 1")
    return lengths.pop()
