"""Episodes into a LeRobot dataset: v3.0, or v2.1 with the extras that GR00T and DreamZero read."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from wamlab.data.encode import VideoConfig
from wamlab.data.recording import CameraFiles, Recording, layout_of, new_folder
from wamlab.errors import InputError
from wamlab.types import Episode

IMAGES = "observation.images."
RESERVED = {"timestamp", "frame_index", "episode_index", "index", "task_index", "observation.state", "action"}


def write_dataset(
    episodes: Iterable[Episode],
    root: Path | str,
    *,
    version: str = "v3.0",
    robot_type: str | None = "unknown",
    codec: str = "h264",
    crf: int = VideoConfig.crf,
    keyframe_interval: int = VideoConfig.keyframe_interval,
    video_file_mb: float = VideoConfig.file_mb,
) -> Path:
    """Write episodes one after another, never two in memory, and return the dataset's folder.

    A state or action of no dimensions becomes no column. The folder appears when all is written.
    Raises InputError, and leaves nothing behind, for an existing folder, one that cannot be written to, no
    episodes, an episode unlike the first (cameras, sizes, dimensions, frame rate, signals), values that are
    not finite, odd frame sizes, and an unknown version or codec.
    """
    root, layout = Path(root), layout_of(version)
    config = VideoConfig(codec, crf, keyframe_interval, video_file_mb)
    with new_folder(root) as partial, ExitStack() as open_files:
        recording: Recording | None = None
        cameras: dict[str, CameraFiles] = {}
        common: dict[str, object] = {}
        for number, episode in enumerate(episodes):
            columns = _columns(episode, number)
            if recording is None:
                common = _in_common(episode)
                recording = open_files.enter_context(Recording(partial, layout, episode.fps))
                for name in episode.frames:
                    files = CameraFiles(partial, layout, IMAGES + name, episode.fps, config)
                    cameras[name] = open_files.enter_context(files)
            for name, found in _in_common(episode).items():
                if found != common[name]:
                    raise InputError(f"episode {number} has {name} {found}, episode 0 has {common[name]}")
            videos = {IMAGES + name: files.append(episode.frames[name]) for name, files in cameras.items()}
            recording.add(columns, episode.num_ticks, episode.instruction, videos)
        if recording is None:
            raise InputError(f"there is no episode to write into {root}: a dataset needs at least one")
        recording.finish(robot_type, {files.camera: files.feature() for files in cameras.values()})
    return root


def _columns(episode: Episode, number: int) -> dict[str, np.ndarray]:
    """Return an episode's own columns as they are stored, all finite and of its length."""
    length = episode.num_ticks
    if length == 0:
        raise InputError(f"episode {number} has no ticks; leave it out")
    if not episode.fps > 0:
        raise InputError(f"episode {number} has fps={episode.fps}, need frames per second above 0")
    vectors = {"observation.state": episode.state, "action": episode.action}
    columns = {name: values for name, values in vectors.items() if values.shape[1] > 0}
    for name, values in episode.signals.items():
        if name in RESERVED or name.startswith(IMAGES):
            raise InputError(f"episode {number} has a signal named {name!r}, which LeRobot reserves")
        columns[name] = np.asarray(values)
    columns = {name: _storable(values, name, number) for name, values in columns.items()}
    sizes = {name: len(values) for name, values in (*columns.items(), *episode.frames.items())}
    for name, size in sizes.items():
        if size != length:
            raise InputError(f"episode {number} has {length} states but {size} rows of {name}")
    return columns


def _storable(values: np.ndarray, name: str, number: int) -> np.ndarray:
    """Return a column as float32, int64 or bool; InputError on other kinds and on values not finite."""
    if values.ndim not in (1, 2):
        raise InputError(f"column {name} of episode {number} has shape {values.shape}, need [t] or [t, dim]")
    if values.dtype.kind in "iu":
        return values.astype(np.int64)
    if values.dtype.kind == "b":
        return values
    if values.dtype.kind != "f":
        raise InputError(f"column {name} of episode {number} holds {values.dtype}, need numbers")
    values = values.astype(np.float32)
    is_bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if is_bad.any():
        row = int(is_bad.argmax())
        raise InputError(f"column {name} of episode {number} is not finite in row {row}: {values[row]}")
    return values


def _in_common(episode: Episode) -> dict[str, object]:
    """Return all that the episodes of one dataset must have in common."""
    signals = {name: np.asarray(values) for name, values in sorted(episode.signals.items())}
    return {
        "fps": float(episode.fps),
        "state dimensions": episode.state.shape[1],
        "action dimensions": episode.action.shape[1],
        "camera sizes": {name: frames.shape[1:3] for name, frames in sorted(episode.frames.items())},
        "signals": {name: (values.shape[1:], values.dtype.kind) for name, values in signals.items()},
    }
