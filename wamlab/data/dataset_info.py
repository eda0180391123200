"""The folder and the info.json of a LeRobot dataset: found, read and checked."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from wamlab.data.json_files import read_json
from wamlab.data.layout import INFO_FILE, VERSIONS
from wamlab.errors import InputError

MAX_FPS = 1e6
KNOWN_INFO = {
    "codebase_version", "robot_type", "fps", "total_episodes", "total_frames", "total_tasks", "total_videos",
    "total_chunks", "chunks_size", "data_files_size_in_mb", "video_files_size_in_mb", "splits", "data_path",
    "video_path", "features", "tools", "discarded_episode_indices",
}  # fmt: skip


def find_root(root: Path) -> Path:
    """Return the dataset's own folder: a snapshot inside a hub cache folder, else the folder itself.

    Raises InputError for a hub cache folder without a complete choice of one snapshot.
    """
    snapshots = root / "snapshots"
    if (root / INFO_FILE).exists() or not snapshots.is_dir():
        return root
    reference = root / "refs/main"
    if reference.is_file():
        name = reference.read_text("utf-8", errors="replace").strip()
        if re.fullmatch(r"\w+", name) and (snapshots / name).is_dir():  # no path out of the cache
            return snapshots / name
    found = sorted(path for path in snapshots.iterdir() if path.is_dir())
    if len(found) != 1:
        raise InputError(f"{snapshots} holds {len(found)} snapshots and refs/main names none of them; give one's path")
    return found[0]


def read_info(root: Path) -> dict[str, Any]:
    """Read info.json; InputError names what it lacks or has wrong, a warning its unknown keys."""
    if not root.is_dir():
        raise InputError(f"there is no dataset folder {root}")
    path = root / INFO_FILE
    if not path.exists():
        raise InputError(f"{root} is no LeRobot dataset: it lacks {INFO_FILE}")
    info = read_json(path)
    if not isinstance(info, dict):
        raise InputError(f"{path} is no JSON object")
    if info.get("codebase_version") not in VERSIONS:
        version = info.get("codebase_version")
        raise InputError(f"{path} has codebase_version {version!r}; known are {', '.join(VERSIONS)}")
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FPS:
        raise InputError(f"{path} gives fps as {fps!r}, need frames per second above 0")
    features = info.get("features")
    if not isinstance(features, dict) or not all(isinstance(f, dict) and "dtype" in f for f in features.values()):
        raise InputError(f"{path} does not give every feature a dtype")
    for name, feature in features.items():
        _check_feature(name, feature, path)
    chunks = info.get("chunks_size", 1000)
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise InputError(f"{path} gives chunks_size as {chunks!r}, need a whole number above 0, usually 1000")
    if unknown := sorted(info.keys() - KNOWN_INFO):
        warnings.warn(f"{path} has unknown keys, which are ignored: {', '.join(unknown)}", stacklevel=4)
    return info


def _check_feature(name: str, feature: dict[str, Any], path: Path) -> None:
    shape = feature.get("shape")
    is_list = isinstance(shape, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
    if shape is not None and not is_list:
        raise InputError(f"{path} gives {name} the shape {shape!r}, need a list of whole numbers")
    for key in ("info", "video_info"):
        if not isinstance(feature.get(key) or {}, dict):
            raise InputError(f"{path} gives {name} {key} that is no JSON object: correct or remove it")
