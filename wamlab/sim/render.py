"""Pictures of the tabletop: cameras that map places and heights to pixels, and a painter of polygons.

Everything is drawn with Pillow, enlarged and then reduced, which smooths edges. Pictures are a pure function
of what they show; layers of things that did not move are only kept to save time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from wamlab.sim.mesh import Mesh, gripper_meshes, joined, lit, object_mesh, table_mesh
from wamlab.sim.scene import Look, Scene

CAMERAS = ("top", "wrist", "exterior")

WRIST_WIDTH = 0.42  # table widths that the shorter side of the wrist picture shows
WRIST_AHEAD = 0.07  # the wrist camera looks this far ahead of the gripper
GRIPPER_REACH = 0.17  # gripper, held object and their shadows lie within this distance


@dataclass(frozen=True)
class Camera:
    """An affine view: pixel = matrix @ (x, y, height) + origin, on the enlarged canvas."""

    matrix: np.ndarray  # [2, 3]
    origin: np.ndarray  # [2]


@dataclass(frozen=True)
class Moment:
    """What of a table's state can be seen."""

    gripper: tuple[float, ...]  # x, y, heading in rad, closing 0..1
    objects: tuple[tuple[float, ...], ...]  # x, y, angle in rad
    held: int  # or -1
    levels: tuple[int, ...]  # how many objects lie below each


def _aimed(linear: Sequence[Sequence[float]], rise: float, centre: Sequence[float], canvas: tuple[int, int]) -> Camera:
    """Aim a camera at a point of the table; ``rise`` is how many pixels a table width of height moves up."""
    ((a, b), (c, d)), (x, y), (width, height) = linear, centre, canvas
    origin = (width / 2 - a * x - b * y, height / 2 - c * x - d * y)
    return Camera(np.array([(a, b, 0.0), (c, d, -rise)]), np.array(origin))


def fixed_camera(name: str, canvas: tuple[int, int], look: Look) -> Camera:
    """Return the camera above the table ("top") or the one at its right hand side ("exterior")."""
    width, height = canvas
    cos, sin = math.cos(look.camera_turn_rad), math.sin(look.camera_turn_rad)
    if name == "top":
        scale = min(width, height) / 1.08
        tilt, rise = np.array([(1.0, 0.0), (0.0, -1.0)]), 0.5  # a little rise shows what is stacked
    else:
        scale = min(width / 1.26, height / 0.92)
        tilt, rise = np.array([(0.82, 0.40), (0.26, -0.58)]), 0.8
    scale *= look.camera_zoom
    linear = scale * tilt @ np.array([(cos, -sin), (sin, cos)])
    shift_x, shift_y = look.camera_shift
    return _aimed(linear.tolist(), rise * scale, (0.5 + shift_x, 0.5 + shift_y), canvas)


def wrist_camera(canvas: tuple[int, int], look: Look, gripper: Sequence[float]) -> Camera:
    """Return the camera that rides on the gripper, whose heading points up in the picture."""
    scale = min(canvas) / WRIST_WIDTH * look.camera_zoom
    x, y, heading, _ = gripper
    cos, sin = math.cos(heading), math.sin(heading)
    linear = ((scale * sin, -scale * cos), (-scale * cos, -scale * sin))
    return _aimed(linear, 0.35 * scale, (x + WRIST_AHEAD * cos, y + WRIST_AHEAD * sin), canvas)


class Painter:
    """Draws one table; keeps the layers of what did not move since the last picture."""

    def __init__(self, shape: tuple[int, int], supersample: int = 2):
        self.shape = shape  # height and width in px
        self.supersample = supersample
        self.canvas = supersample * shape[1], supersample * shape[0]
        self._forget()

    def _forget(self) -> None:
        self._scene: Scene | None = None
        self._moment: Moment | None = None
        self._pictures: dict[str, bytes] = {}
        self._table = self._still = self._moving = Mesh.empty()
        self._still_key: object = None
        self._moving_key: object = None
        self._layers: dict[str, tuple[Camera, Image.Image, Image.Image]] = {}

    def __reduce__(self) -> tuple:
        return Painter, (self.shape, self.supersample)

    def paint(self, camera_name: str, scene: Scene, moment: Moment) -> UInt8[np.ndarray, "h w 3"]:
        """Draw what a camera sees of a scene at a moment."""
        self._update(scene, moment)
        if camera_name not in self._pictures:
            self._pictures[camera_name] = self._paint(camera_name, scene, moment)
        return np.frombuffer(self._pictures[camera_name], np.uint8).reshape(*self.shape, 3).copy()

    def _paint(self, camera_name: str, scene: Scene, moment: Moment) -> bytes:
        if camera_name == "wrist":
            camera = wrist_camera(self.canvas, scene.look, moment.gripper)
            image = self._blank(scene)
            _fill(image, camera, joined([self._still, self._moving]))
            picture = image.reduce(self.supersample)
        else:
            picture = self._paint_fixed(camera_name, scene, moment)
        return picture.tobytes()

    def _update(self, scene: Scene, moment: Moment) -> None:
        """Forget pictures and build meshes of what changed."""
        if scene is self._scene and moment == self._moment:
            return
        if scene is not self._scene:
            self._forget()
            self._scene, self._table = scene, table_mesh(scene)
        self._moment, self._pictures = moment, {}
        still_key = (moment.held, moment.levels, moment.objects if moment.held < 0 else _without(moment))
        if still_key != self._still_key:
            order = sorted(range(len(scene.objects)), key=moment.levels.__getitem__)
            things = [object_mesh(scene, i, moment.objects[i], moment.levels[i]) for i in order if i != moment.held]
            self._still_key, self._still, self._layers = still_key, joined([self._table, *things]), {}
        moving_key = (moment.gripper, moment.held)
        if moving_key != self._moving_key:
            held = moment.held
            things = [] if held < 0 else [object_mesh(scene, held, moment.objects[held], is_held=True)]
            shadow, body = gripper_meshes(scene.look, moment.gripper, is_holding=held >= 0)
            self._moving_key, self._moving = moving_key, joined([shadow, *things, body])

    def _paint_fixed(self, name: str, scene: Scene, moment: Moment) -> Image.Image:
        """Draw what moves into a patch of the layer that holds the rest."""
        if name not in self._layers:
            image, camera = self._blank(scene), fixed_camera(name, self.canvas, scene.look)
            _fill(image, camera, self._still)
            self._layers[name] = camera, image, image.reduce(self.supersample)
        camera, fine, coarse = self._layers[name]
        x, y = camera.matrix[:, :2] @ moment.gripper[:2] + camera.origin
        half = GRIPPER_REACH * math.hypot(*camera.matrix[:, 0])
        left, right = self._whole_pixels(x - half, x + half, self.shape[1])
        top, bottom = self._whole_pixels(y - half, y + half, self.shape[0])
        patch = fine.crop((left, top, right, bottom))
        _fill(patch, Camera(camera.matrix, camera.origin - (left, top)), self._moving, is_near=True)
        picture = coarse.copy()
        picture.paste(patch.reduce(self.supersample), (left // self.supersample, top // self.supersample))
        return picture

    def _blank(self, scene: Scene) -> Image.Image:
        return Image.new("RGB", self.canvas, lit(scene.look.floor, scene.look))

    def _whole_pixels(self, low: float, high: float, side: int) -> tuple[int, int]:
        """Round an interval of the canvas outwards to pixels of the picture, clip it, keep it one wide."""
        first = min(max(int(low // self.supersample), 0), side - 1)
        last = min(max(int(high // self.supersample) + 1, first + 1), side)
        return self.supersample * first, self.supersample * last


def _without(moment: Moment) -> tuple:
    return moment.objects[: moment.held] + moment.objects[moment.held + 1 :]


def _fill(image: Image.Image, camera: Camera, mesh: Mesh, *, is_near: bool = False) -> None:
    """Draw a mesh's faces in order, without those outside the picture; skip that check if all are near."""
    polygon = ImageDraw.Draw(image).polygon
    pixels = mesh.points @ camera.matrix.T + camera.origin
    starts, faces = mesh.starts, range(len(mesh.faces))
    if not is_near:
        ends = np.maximum.reduceat(pixels, starts), np.minimum.reduceat(pixels, starts)
        is_seen = (ends[0] > 0) & (ends[1] < image.size)
        faces = np.flatnonzero(is_seen[:, 0] & is_seen[:, 1]).tolist()
    flat = pixels.ravel().tolist()
    for face in faces:
        num_corners, colour, edge = mesh.faces[face]
        first = 2 * starts[face]
        polygon(flat[first : first + 2 * num_corners], fill=colour, outline=edge)
