"""Camera frames to one canvas: one crop and one colour change for all views of a clip, resize, tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from wamlab.data.robot import RobotConfig, short_name
from wamlab.errors import InputError

AUGMENTATION = "crop-color-1"  # name of what this file does to pixels; another number where that changes
# How far a training clip's colours move: factors 1 +- these, hue by this part of a full turn (DreamZero's).
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.3, 0.4, 0.5, 0.08
LUMA = np.array([0.299, 0.587, 0.114])  # of ITU-R BT.601
TO_YIQ = np.array([LUMA, [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])  # NTSC: luma, two colour axes

# Place of each view on a canvas of two rows and columns.
GRID = ((0, 0), (1, 0), (0, 1), (1, 1))  # down the left column first
DROID = ((1, 0), (1, 1))  # the exterior cameras; the wrist fills the top row


@dataclass(frozen=True)
class Jitter:
    """A change of colours: factors that leave them be at 1, hue in turns."""

    brightness: float
    contrast: float
    saturation: float
    hue: float


@dataclass(frozen=True)
class Augmentation:
    """What is drawn once for all views and frames of a clip."""

    down: float  # where the crop lies: 0 top, 1 bottom
    right: float  # 0 left, 1 right
    jitter: Jitter | None


CENTRE = Augmentation(0.5, 0.5, None)  # of evaluation and of a policy at work


def draw_augmentation(rng: np.random.Generator, *, has_color_jitter: bool) -> Augmentation:
    """Draw a crop place and, if wanted, a change of colours."""
    down, right = rng.uniform(0, 1, 2).tolist()
    reach = np.array([BRIGHTNESS, CONTRAST, SATURATION, HUE])
    drawn = np.array([1, 1, 1, 0]) + reach * rng.uniform(-1, 1, 4)
    return Augmentation(down, right, Jitter(*drawn.tolist()) if has_color_jitter else None)


def canvas_of(
    frames: Mapping[str, UInt8[np.ndarray, "t _ _ 3"]],
    robot: RobotConfig,
    augmentation: Augmentation = CENTRE,
    out: UInt8[np.ndarray, "t h w 3"] | None = None,
) -> UInt8[np.ndarray, "t h w 3"]:
    """Turn each camera's frames, of any size, into one canvas a frame, in ``out`` if given.

    Cameras go by short or full name. Training and inference share this path: they differ in the augmentation only.
    """
    given = {short_name(camera): views for camera, views in frames.items()}
    views = []
    for camera in map(short_name, robot.cameras):
        if camera not in given:
            raise InputError(f"no frames of camera {camera!r}; there are {', '.join(given) or 'none'}")
        cropped = crop(given[camera], robot.crop_fraction, augmentation)
        views.append(resize(cropped, robot.view_height_px, robot.view_width_px))
    if len({len(view) for view in views}) > 1:
        counts = dict(zip(robot.cameras, map(len, views), strict=True))
        raise InputError(f"cameras show different numbers of frames: {counts}")
    if augmentation.jitter is not None:
        views = change_colors(np.stack(views), augmentation.jitter)
    return tile(views, robot.layout, out)


def crop(
    frames: UInt8[np.ndarray, "t _ _ 3"], fraction: float, augmentation: Augmentation
) -> UInt8[np.ndarray, "t _ _ 3"]:
    """Cut ``fraction`` of height and width out of frames; a view, no copy."""
    height, width = frames.shape[1:3]
    (h, w), (top, left) = crop_px(height, width, fraction), crop_corner(height, width, fraction, augmentation)
    return frames[:, top : top + h, left : left + w]


def crop_px(height: int, width: int, fraction: float) -> tuple[int, int]:
    """Return height and width of a crop."""
    return max(1, int(fraction * height)), max(1, int(fraction * width))


def crop_corner(height: int, width: int, fraction: float, augmentation: Augmentation) -> tuple[int, int]:
    """Return the first row and column of a crop."""
    h, w = crop_px(height, width, fraction)
    return round(augmentation.down * (height - h)), round(augmentation.right * (width - w))


def resize(frames: UInt8[np.ndarray, "t _ _ 3"], height_px: int, width_px: int) -> UInt8[np.ndarray, "t h w 3"]:
    """Resize frames by antialiased bilinear interpolation; those of the right size are returned as they are.

    PyTorch's uint8 kernel on channels-last memory takes a third to a sixth of the time of Pillow's or PyAV's
    scaler, and differs from Pillow's by at most 1 of 255 (2026-12, 17 frames of 96x96 to 640x480, one core).
    """
    if frames.shape[1:3] == (height_px, width_px):
        return frames
    writable = np.require(frames, requirements="W")  # PyTorch warns of sharing memory that is not
    channels_first = torch.from_numpy(writable).permute(0, 3, 1, 2)  # a view: memory stays channels last
    resized = interpolate(channels_first, (height_px, width_px), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1).numpy()


def change_colors(views: UInt8[np.ndarray, "v t h w 3"], jitter: Jitter) -> UInt8[np.ndarray, "v t h w 3"]:
    """Change brightness, contrast, saturation and hue of all pixels alike.

    The four are one affine map of RGB. Contrast pivots on the mean luma of the whole clip, not of each frame,
    so that nothing flickers; hue turns the colour axes of YIQ, where HSV would take a branch per pixel.
    """
    matrix, offset = affine_colors(jitter, mean_color=_mean_color(views))
    changed = np.empty(views.shape, np.uint8)
    pixels = np.empty(views.shape[2:], np.float32)
    mapped = np.empty((pixels.size // 3, 3), np.float32)
    offsets = np.tile(offset + 0.5, len(mapped))  # flat: adding three numbers to each pixel is slow
    for frame, out in zip(_one_by_one(views), _one_by_one(changed), strict=True):
        np.copyto(pixels, frame)
        np.matmul(pixels.reshape(-1, 3), matrix.T, out=mapped)
        flat = mapped.reshape(-1)
        flat += offsets
        np.clip(flat, 0, 255, out=flat)
        np.copyto(out, mapped.reshape(out.shape), casting="unsafe")
    return changed


def affine_colors(
    jitter: Jitter, mean_color: np.ndarray
) -> tuple[Float32[np.ndarray, "3 3"], Float32[np.ndarray, " 3"]]:
    """Return the matrix and offset that map RGB in 0..255 to the changed RGB."""
    angle = -2 * np.pi * jitter.hue  # YIQ turns against the hue circle of HSV
    turned = np.array([[1, 0, 0], [0, np.cos(angle), -np.sin(angle)], [0, np.sin(angle), np.cos(angle)]])
    turned[1:] *= jitter.saturation
    matrix = jitter.brightness * jitter.contrast * np.linalg.solve(TO_YIQ, turned @ TO_YIQ)
    offset = jitter.brightness * (1 - jitter.contrast) * (LUMA @ mean_color)
    return matrix.astype(np.float32), np.full(3, offset, np.float32)


def canvas_px(height: int, width: int, num_views: int, layout: str) -> tuple[int, int]:
    """Return height and width of the canvas of some views of one size."""
    rows, columns = {"single": (1, 1), "row": (1, num_views)}.get(layout, (2, 2))
    return rows * height, columns * width


def tile(
    views: Sequence[UInt8[np.ndarray, "t h w 3"]] | Sequence[UInt8[Tensor, "t h w 3"]] | UInt8[np.ndarray, "v t h w 3"],
    layout: str,
    out: UInt8[np.ndarray, "t _ _ 3"] | UInt8[Tensor, "t _ _ 3"] | None = None,
) -> Any:
    """Put the views of a clip on one canvas, black where none is; in ``out`` if given, which tensors need."""
    t, h, w, _ = views[0].shape
    canvas: Any = np.empty((t, *canvas_px(h, w, len(views), layout), 3), np.uint8) if out is None else out
    if layout in ("single", "row"):
        for column, view in enumerate(views):
            canvas[:, :, column * w : (column + 1) * w] = view
        return canvas
    places = DROID if layout == "droid" else GRID
    for view, place in zip(views, places, strict=False):
        _cell(canvas, place)[:] = view
    if layout == "droid":
        canvas[:, :h, ::2] = canvas[:, :h, 1::2] = views[2]  # each pixel column twice
    else:
        for place in places[len(views) :]:
            _cell(canvas, place)[:] = 0
    return canvas


def stored_row(
    frames: Mapping[str, UInt8[np.ndarray, "t _ _ 3"]], new: Callable[[tuple[int, ...]], np.ndarray]
) -> UInt8[np.ndarray, "t h w 3"]:
    """Put views side by side as they are stored, on a canvas from ``new``; for ``augmented``."""
    views = list(frames.values())
    if len({view.shape for view in views}) > 1:
        sizes = ", ".join(f"{camera} {view.shape[1]}x{view.shape[2]}" for camera, view in frames.items())
        raise InputError(f"cameras are stored in different sizes ({sizes}): give data.augment_on loader")
    t, h, w, _ = views[0].shape
    return tile(views, "row", out=new((t, h, len(views) * w, 3)))


def untile(canvas: UInt8[np.ndarray, "t _ _ 3"], layout: str, num_views: int) -> UInt8[np.ndarray, "v t h w 3"]:
    """Cut a canvas into the views that ``tile`` put there, e.g. to show what a network predicts per camera."""
    if layout == "single":
        return canvas[None]
    if layout == "row":
        return np.stack(np.split(canvas, num_views, axis=2))
    if layout == "droid":
        exterior = [_cell(canvas, place) for place in DROID]
        return np.stack([*exterior, canvas[:, : canvas.shape[1] // 2, ::2]])
    return np.stack([_cell(canvas, place) for place in GRID[:num_views]])


def _cell(canvas: Any, place: tuple[int, int]) -> Any:
    """Return a quarter of a canvas, as a view."""
    (row, column), (h, w) = place, (canvas.shape[1] // 2, canvas.shape[2] // 2)
    return canvas[:, row * h : (row + 1) * h, column * w : (column + 1) * w]


def _mean_color(views: np.ndarray) -> np.ndarray:
    """Return the mean RGB of all views, from every fourth pixel each way."""
    return views[:, :, ::4, ::4].reshape(-1, 3).mean(axis=0)


def _one_by_one(views: np.ndarray) -> np.ndarray:
    return views.reshape(-1, *views.shape[2:])
