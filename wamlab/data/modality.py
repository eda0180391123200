"""What DreamZero's and GR00T's ``meta/modality.json`` calls the parts of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wamlab.data.json_files import read_json
from wamlab.errors import InputError

MODALITY_FILE, EMBODIMENT_FILE = "meta/modality.json", "meta/embodiment.json"
DEFAULT_COLUMNS = {"state": "observation.state", "action": "action"}


@dataclass(frozen=True)
class NamedSlice:
    """Some neighbouring dimensions of a column."""

    column: str
    first: int
    end: int

    @property
    def span(self) -> slice:
        return slice(self.first, self.end)


@dataclass(frozen=True)
class Modality:
    """Other names of a dataset's parts; all empty without a modality.json."""

    slices: Mapping[str, NamedSlice] = field(default_factory=dict)  # "state.joint_position", "action.gripper", ...
    cameras: Mapping[str, str] = field(default_factory=dict)  # "exterior_1_left" -> the camera's own name
    languages: Mapping[str, str] = field(default_factory=dict)  # "annotation.NAME" -> the column


def read_modality(root: Path, features: Mapping[str, Mapping[str, Any]]) -> Modality:
    """Read modality.json where there is one.

    Raises InputError for an entry of wrong form, one that names a column or camera the dataset lacks, and a
    slice outside its column.
    """
    path = root / MODALITY_FILE
    if not path.exists():
        return Modality()
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} is no JSON object")
    slices: dict[str, NamedSlice] = {}
    for kind, default in DEFAULT_COLUMNS.items():
        for name, entry in _entries(content, kind, path):
            where = f"{path} gives {kind}.{name}"
            column, first, end = entry.get("original_key") or default, entry.get("start"), entry.get("end")
            if column not in features:
                raise InputError(f"{where} the column {column!r}, which info.json does not list: correct original_key")
            size = feature_size(features[column])
            if not isinstance(first, int) or not isinstance(end, int) or not 0 <= first < end <= size:
                raise InputError(f"{where} as {first}:{end}, {column} has dimensions 0:{size}: correct start and end")
            slices[f"{kind}.{name}"] = NamedSlice(column, first, end)
    cameras: dict[str, str] = {}
    for name, entry in _entries(content, "video", path):
        camera = entry.get("original_key") or f"observation.images.{name}"
        if features.get(camera, {}).get("dtype") not in ("video", "image"):
            raise InputError(
                f"{path} gives video.{name} the camera {camera!r}, which info.json does not list: correct original_key"
            )
        cameras[name] = camera
    languages: dict[str, str] = {}
    for name, entry in _entries(content, "annotation", path):
        column = entry.get("original_key") or f"annotation.{name}"
        if column in features:  # data sets often list annotations that not all of them have
            languages[f"annotation.{name}"] = column
    return Modality(slices, cameras, languages)


def read_embodiment(root: Path) -> str | None:
    """Return the embodiment tag of embodiment.json, or None where there is none."""
    path = root / EMBODIMENT_FILE
    if not path.exists():
        return None
    content = read_json(path)
    tag = content.get("embodiment_tag", content.get("robot_type")) if isinstance(content, dict) else None
    if not isinstance(tag, str):
        raise InputError(f"{path} has no text under embodiment_tag: write the robot's tag there")
    return tag


def feature_size(feature: Mapping[str, Any]) -> int:
    """Return the number of dimensions info.json gives a column."""
    size = 1
    for extent in feature.get("shape") or [1]:
        size *= int(extent)
    return size


def _entries(content: Mapping[str, Any], kind: str, path: Path) -> list[tuple[str, dict[str, Any]]]:
    found = content.get(kind) or {}
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise InputError(f"{path} does not map names to objects under {kind!r}")
    if odd := [name for name, entry in found.items() if not isinstance(entry.get("original_key") or "", str)]:
        raise InputError(f"{path} gives {kind}.{odd[0]} an original_key that is no text: correct it")
    return list(found.items())
