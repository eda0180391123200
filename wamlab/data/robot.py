"""What a robot records and how a clip shows it: cameras and their layout, state, actions, prompt."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.data.json_files import read_json
from wamlab.data.lerobot import RobotDataset
from wamlab.data.windows import WindowConfig
from wamlab.errors import InputError

IMAGES = "observation.images."  # how LeRobot prefixes the names of cameras
VIEWS = {"single": (1, 1), "row": (1, 8), "grid": (2, 4), "droid": (3, 3)}  # fewest and most cameras of a layout
NORMALIZATIONS = ("q99", "min_max", "mean_std")
PART = re.compile(r"([^\s\[\]+]+)(?:\[(\d+)(?::(\d+))?\])?")  # of a column: its name, [place] or [first:end]


@dataclass(frozen=True)
class RobotConfig:
    """How one robot's recordings become clips; the same rules turn its observations into a policy's input."""

    cameras: tuple[str, ...] = ("top", "wrist")  # in the order of the layout; "droid" has the wrist last
    layout: str = "row"  # "single", "row", "grid" or "droid": how the views share one canvas
    view_height_px: int = 96
    view_width_px: int = 96
    crop_fraction: float = 0.95  # of height and width: at a random place in training, the centre otherwise
    has_color_jitter: bool = field(default=True, kw_only=True)  # in training
    # Columns are joined and cut like "joints[0:7] + gripper"; None: the robot records no state, or no actions to learn.
    state_column: str | None = "observation.state"
    action_column: str | None = "action"
    relative_dims: tuple[int, ...] = ()  # of the action, taken relative to the state at the block's start
    normalization: str = "q99"  # "q99", "min_max" or "mean_std"
    prompt: str = "{task}"
    negative_prompt: str = ""  # what guidance steers the video away from
    max_action_dim: int = 32  # actions and states are padded with zeros to these
    max_state_dim: int = 64
    control_hz: int | float = 0.0  # ticks a second that datasets must have; 0: any

    def __post_init__(self) -> None:
        if wrong := list(self._problems()):
            raise InputError("robot: " + "; ".join(wrong))

    def _problems(self) -> Iterator[str]:
        if self.layout not in VIEWS:
            yield f"layout {self.layout!r} is none of {', '.join(VIEWS)}"
        else:
            fewest, most = VIEWS[self.layout]
            if not fewest <= len(self.cameras) <= most:
                yield f"layout {self.layout!r} shows {fewest} to {most} cameras, got {len(self.cameras)}"
        if len({short_name(camera) for camera in self.cameras}) < len(self.cameras):
            yield f"cameras {', '.join(self.cameras)} repeat one"
        for name in ("view_height_px", "view_width_px", "max_action_dim", "max_state_dim"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}, need at least 1"
        if not 0 < self.crop_fraction <= 1:
            yield f"crop_fraction is {self.crop_fraction}, need above 0 and up to 1"
        if self.normalization not in NORMALIZATIONS:
            yield f"normalization {self.normalization!r} is none of {', '.join(NORMALIZATIONS)}"
        if min(self.relative_dims, default=0) < 0 or len(set(self.relative_dims)) < len(self.relative_dims):
            yield f"relative_dims {self.relative_dims} must be different and not negative"
        if self.relative_dims and (self.state_column is None or self.action_column is None):
            yield "relative_dims need both a state_column and an action_column"
        for column in (self.state_column, self.action_column):
            if column is not None and not all(PART.fullmatch(text.strip()) for text in column.split("+")):
                yield f'column "{column}" is not written like "joints[0:7] + gripper"'
        if not 0 <= self.control_hz < float("inf"):
            yield f"control_hz is {self.control_hz}, need a number from 0 up"
        if unknown := set(re.findall(r"{(.*?)}", self.prompt)) - {"task"}:
            yield f"prompt {self.prompt!r} has {{{min(unknown)}}}, only {{task}} is known"

    @property
    def is_augmenting(self) -> bool:
        """Say whether training clips differ from the plain view of their frames."""
        return self.crop_fraction < 1 or self.has_color_jitter

    @property
    def canvas_height_px(self) -> int:
        return self.view_height_px * (2 if self.layout in ("grid", "droid") else 1)

    @property
    def canvas_width_px(self) -> int:
        return self.view_width_px * {"single": 1, "row": len(self.cameras)}.get(self.layout, 2)

    def instruct(self, task: str) -> str:
        """Return the instruction a network reads for a task, e.g. "A robot with two cameras does: {task}"."""
        return self.prompt.replace("{task}", task)


def write_robot(robot: RobotConfig, path: Path) -> None:
    """Write a robot's configuration as JSON; the file is complete or absent."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(asdict(robot), indent=2) + "\n", "utf-8")
    partial.replace(path)


def read_robot(path: Path) -> RobotConfig:
    """Read what ``write_robot`` wrote; InputError names an unknown key."""
    return robot_from_dict(read_json(path), where=str(path))


def robot_from_dict(values: dict[str, Any], *, where: str = "robot") -> RobotConfig:
    """Return the configuration that ``dataclasses.asdict`` turned into a dictionary, or JSON into lists."""
    known = [f.name for f in fields(RobotConfig)]
    for name in values:
        if name not in known:
            raise InputError(f"{where} has no setting {name!r}{nearest(name, known)}")
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return RobotConfig(**given)


def short_name(camera: str) -> str:
    """Return a camera's name without LeRobot's prefix."""
    return camera.removeprefix(IMAGES)


@dataclass(frozen=True)
class ColumnPart:
    """A column of a dataset, or some neighbouring dimensions of it."""

    name: str
    first: int = 0
    end: int | None = None  # None: all that follow

    @property
    def span(self) -> slice:
        return slice(self.first, self.end)


def column_parts(column: str | None) -> tuple[ColumnPart, ...]:
    """Return what a column of the configuration is joined from, in order; nothing for None."""
    parts = []
    for text in [] if column is None else column.split("+"):
        found = PART.fullmatch(text.strip())
        if found is None:
            raise InputError(f'column "{column}" is not written like "joints[0:7] + gripper"')
        name, first, end = found.groups()
        start = int(first or 0)
        parts.append(ColumnPart(name, start, int(end) if end else start + 1 if first else None))
    return tuple(parts)


def stored_dim(dataset: RobotDataset, name: str) -> int:
    """Return the number of dimensions of a dataset's own column."""
    return int(np.prod(dataset.rows(0, name).shape[1:], dtype=int))


def check_robot(
    robot: RobotConfig, dataset: RobotDataset, window: WindowConfig | None = None, *, patch_px: int = 1
) -> None:
    """Raise one InputError that names everything in which a dataset and a codec differ from the configuration.

    ``patch_px`` is the side of what becomes one token; a canvas must divide into such patches.
    """
    if wrong := list(list_mismatches(robot, dataset, window, patch_px=patch_px)):
        raise InputError(f"dataset {dataset.root}: " + "; ".join(wrong))


def list_mismatches(
    robot: RobotConfig, dataset: RobotDataset, window: WindowConfig | None, *, patch_px: int = 1
) -> Iterator[str]:
    """Say what of a dataset does not fit; without a window its length is not looked at."""
    for camera in robot.cameras:
        if dataset.camera_named(camera) is None:
            known = [short_name(name) for name in dataset.cameras]
            yield f"no camera {camera!r}{nearest(short_name(camera), known)}"
    dims: dict[str, int] = {}
    for name in ("state", "action"):
        column, most = getattr(robot, f"{name}_column"), getattr(robot, f"max_{name}_dim")
        total = 0
        for part in column_parts(column):
            if not dataset.has_column(part.name):
                yield f"no column {part.name!r}: name another {name}_column, or None if there is none"
                break
            available = stored_dim(dataset, part.name)
            if part.first >= available or (part.end or 0) > available or part.end == part.first:
                yield f"column {part.name!r} has {available} dimensions, so not those of {name}_column {column!r}"
                break
            total += len(range(available)[part.span])
        else:
            if column is not None:
                dims[name] = total
            if total > most:
                yield f"column {column!r} has {total} dimensions, more than max_{name}_dim {most}"
    for name, dim in dims.items():
        if outside := [i for i in robot.relative_dims if i >= dim]:
            yield f"relative_dims {outside} are outside the {dim} dimensions of the {name}"
    if robot.control_hz and abs(robot.control_hz / dataset.fps - 1) > 0.01:
        yield f"it has {dataset.fps:g} ticks a second, control_hz is {robot.control_hz:g}"
    for name in ("canvas_height_px", "canvas_width_px"):
        if getattr(robot, name) % patch_px:
            yield f"{name} is {getattr(robot, name)}, not a multiple of a patch's {patch_px} px"
    if window is None:
        return
    longest = int(max(dataset.lengths, default=0))
    needed = window.num_rows if window.is_full_only else max(window.block_ticks + 1, window.actions_per_block)
    if longest < needed:
        yield f"a window needs {needed} rows, the longest episode has {longest}: take fewer or shorter blocks"


def nearest(name: str, known: Sequence[str]) -> str:
    """Say what was probably meant."""
    near = difflib.get_close_matches(name, known, cutoff=0.5)
    if near:
        return f", did you mean {' or '.join(map(repr, near))}?"
    return f"; there is {', '.join(map(repr, known))}" if known else "; there is none"
