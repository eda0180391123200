"""Everything that is wrong with a dataset, found before a training stumbles on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from wamlab.data.check_rows import LEAVE_OUT, Fault, row_faults
from wamlab.data.json_files import read_json
from wamlab.data.layout import INFO_FILE, STATS_FILE
from wamlab.data.lerobot import OWN_COLUMNS, RobotDataset
from wamlab.data.matching import TOLERANCE, DriftWarning
from wamlab.data.modality import feature_size
from wamlab.errors import InputError

BATCH = 64  # frames decoded at a time


def check_dataset(dataset: RobotDataset, *, is_decoding_all: bool = False) -> Iterator[list[Fault]]:
    """Yield what is wrong with the dataset as a whole, then with each episode in turn: 1 + ``num_episodes`` lists.

    Of each episode's video the index is read whole; the first and the last frame are decoded, or all of them.
    """
    yield [*_info_faults(dataset), *_stats_faults(dataset)]
    ends: dict[tuple[Path, str], tuple[float, int]] = {}
    for episode in range(dataset.num_episodes):
        faults = list(row_faults(dataset, episode, is_decoding_all=is_decoding_all))
        are_rows_sound = not any(fault.place in ("rows", "timestamp") for fault in faults) and _has_times(
            dataset, episode
        )
        for camera in dataset.cameras:
            if dataset.features[camera]["dtype"] == "video":
                span_faults = list(_span_faults(dataset, episode, camera, ends))
                faults += span_faults or list(
                    _video_faults(
                        dataset, episode, camera, are_rows_sound=are_rows_sound, is_decoding_all=is_decoding_all
                    )
                )
        yield faults


def _has_times(dataset: RobotDataset, episode: int) -> bool:
    """Say whether the rows, of which ``row_faults`` tells what is wrong, can be read at all."""
    try:
        dataset.rows(episode, "timestamp")
    except InputError:
        return False
    return True


def _info_faults(dataset: RobotDataset) -> Iterator[Fault]:
    counts = {
        "total_episodes": dataset.num_episodes,
        "total_frames": int(dataset.lengths.sum()),
        "total_tasks": len(dataset.tasks),
    }
    for name, count in counts.items():
        if (said := dataset.info.get(name)) not in (None, count):
            wrong = f"{name} is {said}, the lists in meta have {count}"
            yield Fault(None, INFO_FILE, wrong, f"set {name} to {count}", is_broken=False)
    if not dataset.features:
        yield Fault(None, INFO_FILE, "it lists no column and no camera", "list them under features")
    elif missing := [name for name in OWN_COLUMNS if name not in dataset.features]:
        is_broken = "timestamp" in missing and any(f["dtype"] == "video" for f in dataset.features.values())
        wrong = f"features lack {', '.join(missing)}, which every LeRobot dataset has"
        yield Fault(None, INFO_FILE, wrong, "list them, and add the columns where rows lack them", is_broken=is_broken)
    expected = np.arange(dataset.num_episodes)
    if not np.array_equal(dataset.episode_index, expected):
        first = int((dataset.episode_index != expected).argmax())
        wrong = f"the list skips episode {first}"
        yield Fault(
            None, "meta/episodes", wrong, "none is needed: wamlab counts the episodes there are", is_broken=False
        )


def _stats_faults(dataset: RobotDataset) -> Iterator[Fault]:
    path = dataset.root / STATS_FILE
    repair = f"wamlab data stats {dataset.root} --write"
    if not path.exists():
        wrong = "is missing: the first training has to measure all rows"
        yield Fault(None, STATS_FILE, wrong, repair, is_broken=False)
        return
    try:
        stored = read_json(path)
        if not isinstance(stored, dict):
            raise InputError(f"{path} does not map features to their statistics")
    except InputError as error:
        yield Fault(None, STATS_FILE, str(error), repair)
        return
    for name, values in stored.items():
        if name not in dataset.features or name in dataset.cameras or not isinstance(values, dict):
            continue
        for kind in ("mean", "std", "min", "max", "q01", "q99"):
            try:
                numbers = np.array(values.get(kind, []), np.float64).reshape(-1)
            except (TypeError, ValueError, OverflowError):
                numbers = np.array([np.nan])
            size = feature_size(dataset.features[name])
            if len(numbers) not in (0, size):
                yield Fault(None, STATS_FILE, f"{kind} of {name} has {len(numbers)} dimensions, not {size}", repair)
            elif not np.isfinite(numbers).all():
                yield Fault(None, STATS_FILE, f"{kind} of {name} is not finite", repair)


def _span_faults(
    dataset: RobotDataset, episode: int, camera: str, ends: dict[tuple[Path, str], tuple[float, int]]
) -> Iterator[Fault]:
    """Find spans that cannot be found or overlap; ``ends`` holds where the span before in each file ended."""
    try:
        span = dataset.video_span(episode, camera)
    except InputError as error:
        yield Fault(episode, camera, str(error), "write the missing metadata, or fetch meta/ again from its source")
        return
    before = ends.get((span.path, camera))
    if before is not None and span.start_s < before[0] - 0.5 / dataset.fps:
        wrong = f"its span of {span.path.name} begins before that of episode {before[1]} ends"
        yield Fault(episode, camera, wrong, "correct from_timestamp and to_timestamp in meta/episodes")
    if span.end_s is not None:
        ends[span.path, camera] = span.end_s, episode


def _video_faults(
    dataset: RobotDataset, episode: int, camera: str, *, are_rows_sound: bool, is_decoding_all: bool
) -> Iterator[Fault]:
    """Read a video's index and, where the rows say which frames belong to them, the frames."""
    span, length = dataset.video_span(episode, camera), int(dataset.lengths[episode])
    try:
        index = dataset.frame_index(episode, camera)
        if not are_rows_sound:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DriftWarning)  # the faults say it of each episode
            numbers = dataset.frame_numbers(episode, camera)
        rows = np.arange(length) if is_decoding_all else np.unique([0, length - 1])
        for first in range(0, len(rows), BATCH):
            frames = dataset.frames(episode, camera, rows[first : first + BATCH])
    except InputError as error:
        yield Fault(episode, camera, str(error), _repair_of(str(error)))
        return
    if (wrong := _size_fault(dataset, camera, frames.shape[1:3])) is not None:
        yield Fault(episode, camera, wrong, "correct the shape in meta/info.json, or scale the video")
    times_s = span.start_s + dataset.rows(episode, "timestamp").astype(np.float64).reshape(-1)
    off_s = index.times_s[numbers] - times_s
    if (worst_s := float(np.abs(off_s).max())) > TOLERANCE / dataset.fps:
        wrong = f"rows are up to {worst_s * 1000:.1f} ms off their frames ({worst_s * dataset.fps:.2f} frames)"
        repair = "none is needed below half a frame; wamlab data convert writes exact times"
        yield Fault(episode, camera, wrong, repair, is_broken=False)
    if span.end_s is None and len(index) > length:
        wrong = f"the video has {len(index)} frames for {length} rows"
        yield Fault(episode, camera, wrong, "none is needed: frames without a row are not read", is_broken=False)


def _size_fault(dataset: RobotDataset, camera: str, size: tuple[int, ...]) -> str | None:
    said = camera_size(dataset.features[camera])
    if said is None or said == tuple(size):
        return None
    return f"frames are {size[1]} x {size[0]} px, info.json says {said[1]} x {said[0]}"


def camera_size(feature: dict) -> tuple[int, int] | None:
    """Return height and width as info.json says, whatever the order of its axes; None where it does not."""
    shape, names = feature.get("shape"), feature.get("names")
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        return None
    if isinstance(names, list) and "height" in names and "width" in names and len(names) == 3:
        return int(shape[names.index("height")]), int(shape[names.index("width")])
    axes = shape[1:] if shape[0] in (1, 3) else shape[:2]
    return int(axes[0]), int(axes[1])


def _repair_of(error: str) -> str:
    """Return what mends a video of which reading said this."""
    if "is missing" in error or "does not exist" in error:
        return f"copy the file again; else {LEAVE_OUT}"
    if "rows but" in error:
        return "cut the rows to the frames there are, or encode the video again from its source"
    if "half a frame" in error or "same frame" in error or "same time stamp" in error:
        return "correct the timestamp column or fps, or encode the video again at info.json's fps"
    return f"copy or encode the video again (e.g. ffmpeg -i IN -c:v libx264 -pix_fmt yuv420p OUT.mp4); else {LEAVE_OUT}"
