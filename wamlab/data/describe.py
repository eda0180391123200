"""What a dataset holds, as figures to print."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from wamlab.data.check import camera_size
from wamlab.data.frame_index import open_container
from wamlab.data.lerobot import OWN_COLUMNS, RobotDataset
from wamlab.data.modality import feature_size
from wamlab.errors import InputError

SHOWN_TASKS, TASK_LETTERS = 3, 60


def describe_dataset(dataset: RobotDataset) -> dict[str, Any]:
    """Return version, episodes, frames, rates, cameras, columns, tasks and size by name, for people."""
    seconds = dataset.lengths.sum() / dataset.fps
    shortest, middle, longest = np.quantile(dataset.lengths, [0, 0.5, 1])
    tasks = [repr(shorten(task, TASK_LETTERS)) for task in dataset.tasks.values()]
    more = [f"and {len(tasks) - SHOWN_TASKS:,} more"] if len(tasks) > SHOWN_TASKS else []
    figures: dict[str, Any] = {
        "version": dataset.version,
        "robot": dataset.robot_type,
        "episodes": dataset.num_episodes,
        "frames": f"{int(dataset.lengths.sum()):,}, {shortest:.0f} to {longest:.0f} an episode, median {middle:.0f}",
        "fps": dataset.fps,
        "hours": float(seconds / 3600),
        "tasks": "; ".join([f"{len(tasks):,}", *tasks[:SHOWN_TASKS], *more]),
    }
    figures |= {f"camera {camera}": _camera(dataset, camera) for camera in dataset.cameras}
    figures |= {
        f"column {name}": f"{feature['dtype']} [{feature_size(feature)}]"
        for name, feature in dataset.features.items()
        if name not in (*dataset.cameras, *OWN_COLUMNS)
    }
    named = dataset.modality
    for name, part in named.slices.items():
        figures[f"named {name}"] = f"{part.column}[{part.first}:{part.end}]"
    figures |= {f"named video.{name}": camera for name, camera in named.cameras.items()}
    figures |= {f"named {name}": column for name, column in named.languages.items()}
    if discarded := dataset.info.get("discarded_episode_indices"):
        figures["discarded"] = f"{len(discarded)} episodes, by info.json; they are read nevertheless"
    figures["size"] = _bytes(float(measure_size(dataset)))
    return figures


def measure_size(dataset: RobotDataset) -> int:
    """Return the bytes of all files of a dataset's folder, links followed."""
    total = 0
    for folder, _, names in os.walk(dataset.root):
        for name in names:
            path = Path(folder, name)
            total += path.stat().st_size if path.exists() else 0  # a link of an unfinished download
    return total


def _camera(dataset: RobotDataset, camera: str) -> str:
    """Return size, codec and rate: as info.json says, else as the first episode's file does."""
    feature = dataset.features[camera]
    info = feature.get("info") or feature.get("video_info") or {}
    size, codec = camera_size(feature), info.get("video.codec")
    if feature["dtype"] == "image":
        codec = "images in the tables"
    elif size is None or codec is None:
        size, codec = _first_video(dataset, camera) or (size, codec)
    shown = "unknown size" if size is None else f"{size[1]} x {size[0]} px"
    return f"{shown}, {codec or 'unknown codec'}"


def _first_video(dataset: RobotDataset, camera: str) -> tuple[tuple[int, int], str] | None:

    try:
        with open_container(dataset.video_span(0, camera).path) as container:
            codec = container.streams.video[0].codec_context
            return (codec.height, codec.width), codec.codec.canonical_name
    except InputError:
        return None


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
