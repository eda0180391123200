"""What can be wrong with an episode's rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from wamlab.data.lerobot import RobotDataset
from wamlab.data.modality import feature_size
from wamlab.data.tables import as_array, decode_images
from wamlab.errors import InputError

IMAGES_AT_ONCE = 64
LEAVE_OUT = "record or copy the episode again, or leave it out of training"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, where, and what repairs it."""

    episode: int | None  # counted from 0; None: the whole dataset
    place: str  # a camera, a column or a file
    wrong: str
    repair: str
    is_broken: bool = True  # False: worth knowing, yet everything can be read


def row_faults(dataset: RobotDataset, episode: int, *, is_decoding_all: bool = False) -> Iterator[Fault]:
    """Find missing tables and columns, wrong numbers of rows and dimensions, NaN, and rows out of order or time.

    Of images in the rows the first and the last are decoded, or all of them.
    """
    try:
        table = dataset.table(episode)
    except InputError as error:
        yield Fault(episode, "rows", str(error), f"copy the file again; else {LEAVE_OUT}")
        return
    columns: dict[str, np.ndarray] = {}
    for name, feature in dataset.features.items():
        if feature["dtype"] == "video":
            continue
        if name not in table.column_names:
            yield Fault(
                episode, name, "info.json lists this column, the rows lack it", "add it or take it off the list"
            )
        elif name not in dataset.cameras:
            try:
                columns[name] = as_array(table[name], f"column {name}")
            except InputError as error:
                yield Fault(episode, name, str(error), f"fill the gaps; else {LEAVE_OUT}")
    for name, values in columns.items():
        yield from _value_faults(dataset, episode, name, values)
    yield from _label_faults(dataset, episode, columns)
    yield from _order_faults(dataset, episode, columns)
    yield from _image_faults(dataset, episode, table, is_decoding_all=is_decoding_all)


def _value_faults(dataset: RobotDataset, episode: int, name: str, values: np.ndarray) -> Iterator[Fault]:
    width = int(np.prod(values.shape[1:], dtype=int))
    if width != (size := feature_size(dataset.features[name])):
        repair = "correct the shape in meta/info.json, or rewrite the rows"
        yield Fault(episode, name, f"rows have {width} dimensions, info.json says {size}", repair)
    is_text = dataset.features[name]["dtype"] in ("string", "language")
    if is_text != (values.dtype == object):
        said, found = ("texts", "numbers") if is_text else ("numbers", "texts")
        wrong = f"rows hold {found}, info.json says {said} ({dataset.features[name]['dtype']})"
        yield Fault(episode, name, wrong, "correct the dtype in meta/info.json, or rewrite the rows")
    if values.dtype.kind == "f" and not (is_finite := np.isfinite(values.reshape(len(values), -1)).all(axis=1)).all():
        bad = np.flatnonzero(~is_finite)
        wrong = f"NaN or infinity in {len(bad)} of {len(values)} rows, first in row {bad[0]}"
        yield Fault(episode, name, wrong, f"fill those rows from their neighbours; else {LEAVE_OUT}")
    if name == "task_index" and (unknown := set(np.ravel(values).tolist()) - dataset.tasks.keys()):
        yield Fault(episode, name, f"task {min(unknown)} has no text", "add its text to the list of tasks in meta")


def _label_faults(dataset: RobotDataset, episode: int, columns: dict[str, np.ndarray]) -> Iterator[Fault]:
    """Hold the rows' tasks against the one task of the episode list, which is believed when windows are listed."""
    said = dataset.sole_instruction(episode)
    used = {dataset.tasks.get(number) for number in np.unique(columns.get("task_index", np.arange(0))).tolist()}
    if said is not None and None not in used and (others := used - {said}):
        wrong = f"rows have the task {min(map(str, others))!r}, the episode list says {said!r} alone"
        yield Fault(episode, "task_index", wrong, "list all tasks of the episode in meta, or correct task_index")


def _order_faults(dataset: RobotDataset, episode: int, columns: dict[str, np.ndarray]) -> Iterator[Fault]:
    repair = "sort the rows by frame_index and remove repeated ones, or number them anew"
    numbers = np.ravel(columns.get("frame_index", np.arange(0)))
    if len(numbers) and not np.array_equal(numbers, np.arange(len(numbers))):
        row = int((numbers != np.arange(len(numbers))).argmax())
        kind = "repeats" if len(np.unique(numbers)) < len(numbers) else "skips or reorders"
        yield Fault(episode, "frame_index", f"{kind} frames: row {row} is numbered {numbers[row]}", repair)
    places = np.ravel(columns.get("index", np.arange(0)))
    if len(places) and (np.diff(places) != 1).any():
        row = int((np.diff(places) != 1).argmax()) + 1
        yield Fault(episode, "index", f"row {row} does not follow row {row - 1}: {places[row]}", repair)
    times_s = np.ravel(columns.get("timestamp", np.zeros(0))).astype(np.float64)
    if len(times_s) > 1 and np.isfinite(times_s).all():
        yield from _time_faults(episode, times_s, dataset.fps)


def _time_faults(episode: int, times_s: np.ndarray, fps: float) -> Iterator[Fault]:
    steps_s = np.diff(times_s)
    if (steps_s <= 0).any():
        row = int((steps_s <= 0).argmax()) + 1
        wrong = f"row {row} is at {times_s[row]:.4f} s, not after row {row - 1}"
        yield Fault(episode, "timestamp", wrong, "sort the rows by time and remove repeated ones")
        return
    off_s = times_s - times_s[0] - np.arange(len(times_s)) / fps
    if np.abs(off_s).max() <= 0.5 / fps:
        return
    if np.allclose(steps_s, steps_s.mean(), rtol=0.1):
        rate = 1 / steps_s.mean()
        wrong = f"rows run at {rate:.4g} fps, info.json says {fps:g}: {np.abs(off_s).max() * 1000:.0f} ms of drift"
    else:
        row = int((np.abs(off_s) > 0.5 / fps).argmax())
        wrong = f"row {row} is at {times_s[row]:.4f} s, at {fps:g} fps it would be {times_s[row] - off_s[row]:.4f} s"
    yield Fault(episode, "timestamp", wrong, "correct fps in meta/info.json, or resample the episode at that fps")


def _image_faults(dataset: RobotDataset, episode: int, table: pa.Table, *, is_decoding_all: bool) -> Iterator[Fault]:
    rows = np.arange(len(table)) if is_decoding_all else np.unique([0, len(table) - 1])
    for camera in dataset.cameras:
        if dataset.features[camera]["dtype"] != "image" or camera not in table.column_names:
            continue
        repair = f"write the image again; else {LEAVE_OUT}"
        if num_empty := table[camera].null_count:
            yield Fault(episode, camera, f"{num_empty} of {len(table)} rows have no image", repair)
            continue
        try:
            for first in range(0, len(rows), IMAGES_AT_ONCE):
                batch = rows[first : first + IMAGES_AT_ONCE]
                decode_images(table[camera].take(batch), f"column {camera} of episode {episode}", batch.tolist())
        except InputError as error:
            yield Fault(episode, camera, str(error), repair)
