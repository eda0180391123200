"""Crop, resize, recolour and tile the views of many clips in one call, on whatever device they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from wamlab.data.robot import RobotConfig
from wamlab.data.views import LUMA, Augmentation, affine_colors, canvas_px, crop_corner, crop_px, tile


@torch.no_grad()
def augmented(
    views: UInt8[Tensor, "b v t y x 3"], draws: Sequence[Augmentation], robot: RobotConfig
) -> UInt8[Tensor, "b t h w 3"]:
    """Return the canvases that ``canvas_of`` makes of each clip's views and draw; a clip's do not depend on the others.

    Resizing is in float32 here and in fixed point there, so that levels differ by up to 1 before and 3 of 255 after the
    change of colours. All draws have a change of colours, or none has.
    """
    cropped = _crop(views, draws, robot.crop_fraction)
    resized = _resize(cropped, robot.view_height_px, robot.view_width_px)
    if draws[0].jitter is not None:
        resized = _change_colors(resized, draws)
    b, v, t, h, w, _ = resized.shape
    canvas = resized.new_zeros((b * t, *canvas_px(h, w, v, robot.layout), 3))
    tile(list(resized.transpose(0, 1).reshape(v, b * t, h, w, 3)), robot.layout, out=canvas)
    return canvas.unflatten(0, (b, t))


def split_row(row: UInt8[Tensor, "b t y rx 3"], num_views: int) -> UInt8[Tensor, "b v t y x 3"]:
    """Return the views that stand side by side."""
    return row.unflatten(3, (num_views, -1)).permute(0, 3, 1, 2, 4, 5)


def _crop(views: Tensor, draws: Sequence[Augmentation], fraction: float) -> Tensor:
    """Cut each clip at a place of its own, all of one size, by one gathering."""
    height, width = views.shape[3:5]
    h, w = crop_px(height, width, fraction)
    if (h, w) == (height, width):
        return views
    corners = torch.tensor([crop_corner(height, width, fraction, draw) for draw in draws])
    corners = corners.to(views.device, non_blocking=True)
    rows = corners[:, :1] + torch.arange(h, device=views.device)
    columns = corners[:, 1:] + torch.arange(w, device=views.device)
    clips = torch.arange(len(views), device=views.device)[:, None, None]
    gathered = views.permute(0, 3, 4, 1, 2, 5)[clips, rows[:, :, None], columns[:, None, :]]  # b h w v t 3
    return gathered.permute(0, 3, 4, 1, 2, 5)


def _resize(views: Tensor, height_px: int, width_px: int) -> Tensor:
    if views.shape[3:5] == (height_px, width_px):
        return views
    planes = views.flatten(0, 2).permute(0, 3, 1, 2).float().contiguous()
    resized = interpolate(planes, (height_px, width_px), mode="bilinear", antialias=True)
    levels = resized.round_().clamp_(0, 255).to(torch.uint8)
    return levels.permute(0, 2, 3, 1).unflatten(0, views.shape[:3])


def _change_colors(views: Tensor, draws: Sequence[Augmentation]) -> Tensor:
    """Change the colours of each clip by its own affine map; the same formulas as ``views.change_colors``."""
    jitters = [draw.jitter for draw in draws if draw.jitter is not None]
    matrices = np.stack([affine_colors(jitter, np.zeros(3))[0] for jitter in jitters])
    pivots = np.array([jitter.brightness * (1 - jitter.contrast) for jitter in jitters])
    matrix, pivot, luma = (torch.from_numpy(values).to(views.device) for values in (matrices, pivots, LUMA))
    seen = views[:, :, :, ::4, ::4]
    total = seen.sum((1, 2, 3, 4), dtype=torch.int64)  # exact, in any order
    mean_luma = (total * luma).sum(1) / (seen[0].numel() / 3)
    offset = (pivot * mean_luma).float() + 0.5
    colors = [plane.float() for plane in views.unbind(-1)]
    shape = (-1, 1, 1, 1, 1)
    changed = []
    for row in matrix.unbind(1):
        mixed = offset.view(shape)
        for weight, color in zip(row.unbind(1), colors, strict=True):  # by elements: a product of matrices might differ
            mixed = mixed + weight.view(shape) * color
        changed.append(mixed.clamp_(0, 255).to(torch.uint8))
    return torch.stack(changed, dim=-1)
