"""Polygons of the tabletop: table, zones, prisms and gripper as corners with height, in painting order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

import numpy as np
from jaxtyping import Float64

from wamlab.sim.language import COLOURS
from wamlab.sim.physics import BAR_HALF, HOLDING
from wamlab.sim.scene import ZONE_HALF, Look, Scene

LEVEL = 0.03  # height of an object, table widths
HOVER = 0.05  # height of an open gripper, and of what it holds

Colour = tuple[int, int, int]
Face = tuple[int, Colour, Colour | None]  # number of corners, fill, edge
PALM, FINGER = (40, 43, 50), (112, 122, 138)


@dataclass(frozen=True)
class Mesh:
    """Faces one after the other; points are x, y, height in table widths."""

    points: Float64[np.ndarray, "p 3"]
    faces: list[Face]

    @cached_property
    def starts(self) -> list[int]:
        """Index of each face's first point."""
        return list(accumulate((num for num, _, _ in self.faces[:-1]), initial=0))

    @staticmethod
    def empty() -> Mesh:
        return Mesh(np.zeros((0, 3)), [])


def joined(meshes: Sequence[Mesh]) -> Mesh:
    """Return one mesh that is painted like the given ones in order."""
    return Mesh(np.concatenate([mesh.points for mesh in meshes]), [face for mesh in meshes for face in mesh.faces])


def lit(colour: Colour, look: Look, gain: float = 1.0) -> Colour:
    """Return a colour under the scene's light."""
    r, g, b = (min(int(gain * light * value), 255) for value, light in zip(colour, look.light, strict=True))
    return r, g, b


def _flat(outline: np.ndarray, height: float = 0.0) -> np.ndarray:
    return np.column_stack([outline, np.full(len(outline), height)])


def _polygon(num_corners: int, radius: float, first_rad: float) -> np.ndarray:
    angle = first_rad + 2 * math.pi * np.arange(num_corners) / num_corners
    return radius * np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def _rectangle(half_width: float, half_length: float) -> np.ndarray:
    return np.array([(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]) * (half_width, half_length)


# Outlines for an object of radius 1; corners stick out so that all shapes look equally large.
OUTLINES = {
    "circle": _polygon(20, 1.0, 0.0),
    "square": _polygon(4, 1.22, math.pi / 4),
    "triangle": _polygon(3, 1.38, math.pi / 2),
}


def table_mesh(scene: Scene) -> Mesh:
    """Return the table top with its edge, the seams of its planks, and the zones."""
    look = scene.look
    table = lit(look.table, look)
    corners = _rectangle(0.5, 0.5) + 0.5
    parts: list[tuple[np.ndarray, Colour]] = []
    for (x, y), (next_x, next_y) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        side = np.array([(x, y, 0.0), (next_x, next_y, 0.0), (next_x, next_y, -0.03), (x, y, -0.03)])
        parts.append((side, lit(look.table, look, 0.55)))
    parts.append((_flat(corners), table))
    parts += [(_flat(seam), lit(look.table, look, 0.93)) for seam in _seams(look.seam_angle_rad)]
    for colour, x, y in scene.zones:
        paint = lit(COLOURS[colour], look)
        r, g, b = (round(0.65 * a + 0.35 * z) for a, z in zip(table, paint, strict=True))
        square, centre = _rectangle(ZONE_HALF, ZONE_HALF), np.array([x, y])
        parts.append((_flat(square + centre), paint))
        parts.append((_flat(0.86 * square + centre), (r, g, b)))
    return Mesh(np.concatenate([points for points, _ in parts]), [(len(points), fill, None) for points, fill in parts])


def _seams(angle_rad: float) -> list[np.ndarray]:
    """Return thin stripes across the table, a fifth of its width apart."""
    cos, sin = math.cos(angle_rad), math.sin(angle_rad)
    stripes = []
    for k in range(-3, 4):
        px, py = 0.5 - 0.2 * k * sin, 0.5 + 0.2 * k * cos
        low, high = -2.0, 2.0  # clip (px, py) + s (cos, sin) to the unit square, one axis after the other
        for p, d in ((px, cos), (py, sin)):
            ends = sorted((-p / d, (1 - p) / d)) if abs(d) > 1e-9 else (-2.0, 2.0 if 0 < p < 1 else -3.0)
            low, high = max(low, ends[0]), min(high, ends[1])
        if low < high:
            middle, half = (low + high) / 2, (high - low) / 2
            turn = np.array([(cos, sin), (-sin, cos)])
            stripes.append(_rectangle(half, 0.003) @ turn + (px + middle * cos, py + middle * sin))
    return stripes


@cache
def _prism(shape: str, *, is_held: bool, level: int) -> np.ndarray:
    """Return the corners of shadow (none when stacked), foot and top for an object of radius 1."""
    base = HOVER if is_held else level * LEVEL
    heights = [base, base + LEVEL] if level else [0.0, base, base + LEVEL]
    return np.concatenate([_flat(OUTLINES[shape], height) for height in heights])


def object_mesh(scene: Scene, index: int, pose: Sequence[float], level: int = 0, *, is_held: bool = False) -> Mesh:
    """Return one object as a prism with its shadow, lying on ``level`` others or between the jaws."""
    colour, shape = scene.objects[index]
    x, y, angle = pose
    cos, sin = scene.radius * math.cos(angle), scene.radius * math.sin(angle)
    points = _prism(shape, is_held=is_held, level=level) @ np.array(
        [(cos, sin, 0.0), (-sin, cos, 0.0), (0.0, 0.0, 1.0)]
    )
    points[:, :2] += (x, y)
    num, look = len(OUTLINES[shape]), scene.look
    bright, side = lit(COLOURS[colour], look), lit(COLOURS[colour], look, 0.55)
    faces = [(num, side, None), (num, bright, side)]
    if not level:
        away = 0.008 + (0.3 * HOVER if is_held else 0.0)
        points[:num, :2] += (away, -away)
        faces.insert(0, (num, lit(look.table, look, 0.72), None))
    return Mesh(points, faces)


def gripper_meshes(look: Look, gripper: Sequence[float], *, is_holding: bool) -> tuple[Mesh, Mesh]:
    """Return the gripper's shadow, which tells its height, and its body: a palm and two sliding fingers."""
    x, y, heading, closing = gripper
    # Open or loaded it hovers, closed it touches the table; in between it comes down.
    lift = HOVER if is_holding else HOVER * (1 - min(closing / HOLDING, 1.0))
    height = lift + LEVEL if is_holding else lift
    spread, away = 0.066 - 0.05 * closing, 0.006 + 0.3 * lift
    cos, sin = math.cos(heading), math.sin(heading)
    to_table = np.array(
        [
            (-sin, cos, 0.0),  # along the bar
            (cos, sin, 0.0),  # ahead
            (-sin * spread, cos * spread, 0.0),  # fingers move apart
            (x, y, height),
            (away, -away, -height),  # shadows fall
        ]
    )
    points = _GRIPPER @ to_table
    shade, finger, palm = _gripper_paint(look)
    return Mesh(points[:4], [shade]), Mesh(points[4:], [finger, finger, palm])


@cache
def _gripper_paint(look: Look) -> tuple[Face, Face, Face]:
    shade, finger, palm = lit(look.table, look, 0.62), lit(FINGER, look), lit(PALM, look)
    return (4, shade, None), (4, finger, None), (4, palm, None)


def _gripper_corners() -> np.ndarray:
    """Return (along, ahead, side of the finger, 1, is shadow) of the shadow, two fingers and the palm."""
    finger, palm = _rectangle(0.0135, 0.03), _rectangle(BAR_HALF + 0.016, 0.011)
    shadow = _rectangle(BAR_HALF + 0.024, 0.02)
    side, is_shadow = np.repeat([0.0, 1.0, -1.0, 0.0], 4), np.repeat([1.0, 0.0, 0.0, 0.0], 4)
    outline = np.concatenate([shadow, finger, finger, palm])
    return np.column_stack([outline, side, np.ones(16), is_shadow])


_GRIPPER = _gripper_corners()
