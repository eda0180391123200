"""A dataset folder while it is being written: it appears complete under its name, or not at all."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wamlab.data import layout_v2, layout_v3
from wamlab.data.encode import VideoConfig, VideoWriter, as_number, video_feature
from wamlab.data.layout import FilePlace, Recorded, RecordedEpisode, VideoFeature, VideoPlace
from wamlab.data.statistics import ColourHistogram, as_lists, measure_rows
from wamlab.data.tables import as_array
from wamlab.errors import InputError

LAYOUTS = {"v2.1": layout_v2, "v3.0": layout_v3}
MB = 2**20
MIN_FREE_BYTES = 8 * MB  # on a disk without room for one file libav 8 crashes the process while closing it


def layout_of(version: str) -> ModuleType:
    """Return the layout module of a version that can be written."""
    if version not in LAYOUTS:
        raise InputError(f"cannot write dataset version {version!r}; choose one of {', '.join(LAYOUTS)}")
    return LAYOUTS[version]


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder beside the target that takes its name at the end, or vanishes on an error.

    Raises InputError when the target exists or its parent cannot be written to.
    """
    if target.exists():
        raise InputError(f"{target} exists already; choose another folder or remove it first")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(target.parent).free) < MIN_FREE_BYTES:
            raise InputError(f"only {free / 2**20:.1f} MiB are free for {target}: free space or choose another disk")
        _remove_abandoned(target)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        lock = _lock(partial)
    except OSError as error:
        raise InputError(f"cannot write into {target.parent}: {error.strerror}") from error
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        partial.rename(target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise InputError(f"cannot write {target}: {error.strerror or error}; nothing was left behind") from error
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _remove_abandoned(target: Path) -> None:
    """Remove what killed processes left of the same target; a living one holds the lock of its folder."""
    for partial in target.parent.glob(f"{glob.escape(f'.{target.name}.partial-')}*"):
        lock = _lock(partial)
        if lock is not None:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed or the process ends; None if another has it or none can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class CameraFiles:
    """The mp4 files of one camera: one an episode (v2.1), or filled one after another (v3.0)."""

    def __init__(self, root: Path, layout: ModuleType, camera: str, fps: float, config: VideoConfig):
        self.camera = camera
        self._root, self._layout, self._fps, self._config = root, layout, fps, config
        self._writer: VideoWriter | None = None
        self._num_files = 0
        self._colours = ColourHistogram()
        self._size = (0, 0)

    def __enter__(self) -> CameraFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def append(self, frames: np.ndarray) -> VideoPlace:
        """Encode an episode's frames [t h w 3] and say where they are."""
        if self._layout.HAS_FILE_PER_EPISODE or (
            self._writer is not None and self._writer.num_bytes >= self._config.file_mb * MB
        ):
            self._close()
        if self._writer is None:
            place = self._layout.place_of(self._num_files)
            path = self._layout.video_path(self._root, self.camera, place)
            self._size = frames.shape[1], frames.shape[2]
            self._writer = VideoWriter(path, self._fps, *self._size, self._config)
            self._num_files += 1
        colours = ColourHistogram()
        colours.add(frames)
        self._colours.merge(colours)
        first = self._writer.append(frames)
        return VideoPlace(
            place=self._layout.place_of(self._num_files - 1),
            start_s=first / self._fps,
            end_s=(first + len(frames)) / self._fps,
            stats=as_lists(colours.measure()),
        )

    def feature(self) -> VideoFeature:
        """Describe the camera over all episodes."""
        feature = video_feature(*self._size, self._fps, self._config.codec, "yuv420p")
        return VideoFeature(feature, as_lists(self._colours.measure()))

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class TableFiles:
    """Parquet files of rows: one an episode (v2.1), or filled one after another (v3.0), a row group an episode."""

    def __init__(self, root: Path, layout: ModuleType, file_mb: float = float(layout_v3.DATA_FILE_MB)):
        self._root, self._layout, self._file_mb = root, layout, file_mb
        self._writer: pq.ParquetWriter | None = None
        self._num_files, self._num_bytes = 0, 0
        self.paths: list[Path] = []

    def __enter__(self) -> TableFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, rows: pa.Table, episode_index: int) -> FilePlace:
        """Write an episode's rows and say where; InputError where they do not fit the file's columns."""
        if self._layout.HAS_FILE_PER_EPISODE or self._num_bytes >= self._file_mb * MB:
            self.close()
        if self._writer is None:
            number = episode_index if self._layout.HAS_FILE_PER_EPISODE else self._num_files
            self._place = self._layout.place_of(number)
            path = self._layout.table_path(self._root, self._place)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(path, rows.schema)
            self._num_bytes, self._num_files = 0, self._num_files + 1
            self.paths.append(path)
        try:
            if not rows.schema.equals(self._writer.schema, check_metadata=True):
                rows = rows.select(self._writer.schema.names).cast(self._writer.schema)
        except (pa.ArrowException, KeyError) as error:
            raise InputError(f"episode {episode_index} has other columns than the one before: {error}") from error
        self._writer.write_table(rows)  # one row group an episode, which readers find by its statistics
        self._num_bytes += rows.nbytes
        return self._place

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Recording:
    """Collect episodes' rows into parquet files and what the metadata will say of them."""

    def __init__(self, root: Path, layout: ModuleType, fps: float, file_mb: float = float(layout_v3.DATA_FILE_MB)):
        self._root, self._layout, self._fps = root, layout, fps
        self._features: dict[str, dict[str, Any]] = {}
        self._tables = TableFiles(root, layout, file_mb)
        self._episodes: list[RecordedEpisode] = []
        self._tasks: dict[str, int] = {}
        self._num_rows = 0

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self._tables.close()

    def add(
        self,
        columns: Mapping[str, np.ndarray],
        length: int,
        instruction: str,
        videos: Mapping[str, VideoPlace],
    ) -> None:
        """Write an episode's rows; add time, counters and task to its own columns [t] or [t, dim]."""
        index, ticks = len(self._episodes), np.arange(length)
        task = self._tasks.setdefault(instruction, len(self._tasks))
        columns = {
            **columns,
            "timestamp": (ticks / self._fps).astype(np.float32),
            "frame_index": ticks,
            "episode_index": np.full(length, index),
            "index": self._num_rows + ticks,
            "task_index": np.full(length, task),
        }
        for name, values in columns.items():
            self._features.setdefault(name, column_feature(name, values))
        place = self._tables.add(pa.table({name: as_arrow(values) for name, values in columns.items()}), index)
        stats = {name: as_lists(measure_rows(values)) for name, values in columns.items()}
        stats |= {camera: video.stats for camera, video in videos.items()}
        self._episodes.append(
            RecordedEpisode(
                index=index,
                first_row=self._num_rows,
                length=length,
                tasks=[instruction],
                table=place,
                videos=videos,
                stats=stats,
            )
        )
        self._num_rows += length

    def finish(self, robot_type: str | None, cameras: Mapping[str, VideoFeature]) -> None:
        """Close the tables and write the metadata, statistics of all rows included."""
        self._tables.close()
        stats = {name: as_lists(measure_rows(self._read_column(name))) for name in self._features}
        stats |= {camera: video.stats for camera, video in cameras.items()}
        features = {camera: video.feature for camera, video in cameras.items()} | self._features
        info = {
            "codebase_version": None,  # first in the file; the layout fills it in
            "robot_type": robot_type,
            "total_episodes": len(self._episodes),
            "total_frames": self._num_rows,
            "total_tasks": len(self._tasks),
            "chunks_size": self._layout.CHUNK_SIZE,
            "fps": as_number(self._fps),
            "splits": {"train": f"0:{len(self._episodes)}"},
            "features": features,
        }
        info |= self._layout.write_episodes(self._root, self._episodes)
        self._layout.write_meta(self._root, Recorded(info, dict(enumerate(self._tasks)), stats))

    def _read_column(self, name: str) -> np.ndarray:
        """Read a column back whole: quantiles need all rows, yet only one column need be in memory."""
        parts = [as_array(pq.read_table(path, columns=[name])[name], name) for path in self._tables.paths]
        return np.concatenate(parts)


def column_feature(name: str, values: np.ndarray) -> dict[str, Any]:
    """Describe a column [t] or [t, dim] as info.json does."""
    if values.ndim == 1:
        return {"dtype": values.dtype.name, "shape": [1], "names": None}
    names = [f"{name.split('.')[-1]}_{dim}" for dim in range(values.shape[1])]
    return {"dtype": values.dtype.name, "shape": [values.shape[1]], "names": names}


def as_arrow(values: np.ndarray) -> pa.Array:
    """Turn [t] into a plain column, [t, dim] into one of fixed-size lists, or scalars where dim is 1."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if values.ndim == 1 or values.shape[1] == 1:  # LeRobot's rule for shape (1,)
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
