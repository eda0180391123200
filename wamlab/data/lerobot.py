"""A LeRobot dataset on disk (v2.0, v2.1 or v3.0) as rows, instructions and exact frames of its episodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int, Int64, UInt8

from wamlab.data.dataset_info import find_root, read_info
from wamlab.data.decode import checked_buffer
from wamlab.data.frame_index import FrameIndex
from wamlab.data.json_files import read_json
from wamlab.data.layout import INFO_FILE, STATS_FILE, Layout, VideoSpan
from wamlab.data.layout_v2 import LayoutV2
from wamlab.data.layout_v3 import LayoutV3
from wamlab.data.matching import Drifts, match_frames
from wamlab.data.modality import feature_size, read_embodiment, read_modality
from wamlab.data.readers import Readers
from wamlab.data.statistics import measure_rows
from wamlab.data.tables import as_array, decode_images, read_episode, read_footer
from wamlab.errors import InputError, explained_damage
from wamlab.types import Episode

CACHED_EPISODES = 4096  # of rows, without frames: some 10 to 100 kB each
OWN_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
NEEDED_STATS = ("mean", "std", "min", "max", "q01", "q99")


def open_dataset(root: Path | str, *, backend: str = "pyav") -> RobotDataset:
    """Read a dataset's metadata; its tables and videos are opened when they are asked for.

    A hub cache folder (``datasets--USER--NAME``) opens the snapshot of its main branch.

    Raises InputError on a folder that is missing or no dataset, on an unknown version, an unknown video
    backend and on malformed metadata.
    """
    return RobotDataset(find_root(Path(root)), backend)


class RobotDataset:
    """Rows, instructions and frames of a dataset's episodes, which count from 0; safe to share by threads.

    Episode and frame counts come from the episode list: the totals in info.json are often wrong.
    What ``meta/modality.json`` names can be asked for by that name: "state.joint_position", "annotation.task".
    """

    def __init__(self, root: Path, backend: str = "pyav"):
        self._readers = Readers(backend)
        self.root, self._backend = root, backend
        self._info = read_info(root)
        self.version: str = self._info["codebase_version"]
        self.fps = float(self._info["fps"])
        self.robot_type: str | None = self._info.get("robot_type") or read_embodiment(root)
        self.features: dict[str, dict] = self._info["features"]
        self.cameras = tuple(k for k, f in self.features.items() if f.get("dtype") in ("video", "image"))
        self.modality = read_modality(root, self.features)
        layout = LayoutV3 if self.version == "v3.0" else LayoutV2
        self._layout: Layout = layout(root, self._info)
        self.lengths: Int64[np.ndarray, " episodes"] = self._layout.lengths
        self.tasks: dict[int, str] = dict(self._layout.tasks)
        self._columns = lru_cache(maxsize=CACHED_EPISODES)(self._read_columns)
        self._frame_numbers = lru_cache(maxsize=CACHED_EPISODES)(self._match_frames)
        self._footer = lru_cache(maxsize=128)(read_footer)
        self._stats: dict[str, dict[str, np.ndarray]] = {}
        self.drifts = Drifts(root, self.fps)

    def __reduce__(self) -> tuple[Callable[..., RobotDataset], tuple[Path, str]]:
        return RobotDataset, (self.root, self._backend)  # a spawned worker opens it anew

    @property
    def num_episodes(self) -> int:
        return len(self.lengths)

    @property
    def info(self) -> dict[str, Any]:
        """Return what info.json says, not to be changed."""
        return self._info

    @property
    def episode_index(self) -> Int64[np.ndarray, " episodes"]:
        """Return the number each episode has in its files."""
        return self._layout.episode_index

    def has_column(self, column: str) -> bool:
        """Say whether rows of this name can be asked for."""
        column = self.modality.languages.get(column, column)
        return column in self.modality.slices or (column in self.features and column not in self.cameras)

    def camera_named(self, name: str) -> str | None:
        """Return a camera's own name for that, its short name or its name in modality.json; None if there is none."""
        candidates = (name, f"observation.images.{name}", self.modality.cameras.get(name.removeprefix("video.")))
        return next((camera for camera in candidates if camera in self.cameras), None)

    def rows(self, episode: int, column: str) -> np.ndarray:
        """Return one column of a whole episode, read-only: float32 or int64 [t] or [t, dim], or strings [t].

        Raises InputError for a column the dataset lacks, and for a table that is missing, damaged or has
        another number of rows than the episode list says.
        """
        columns = self._columns(self._checked(episode))
        column = self.modality.languages.get(column, column)
        if column not in columns and (part := self.modality.slices.get(column)):
            return self.rows(episode, part.column).reshape(int(self.lengths[episode]), -1)[:, part.span]
        if column not in columns:
            names = ", ".join(columns)
            raise InputError(f"{self.root} has no column {column} in episode {episode}; it has {names}")
        return columns[column]

    def instructions(self, episode: int, column: str = "task_index") -> list[str]:
        """Return what the robot was told at each row: a language column's strings, or the tasks it numbers.

        Where there is no task_index, modality.json's first annotation serves, else the episode list's first task.
        """
        if not self.has_column(column) and column == "task_index" and self.modality.languages:
            column = next(iter(self.modality.languages))
        if not self.has_column(column) and column == "task_index":
            tasks = self._layout.tasks_of(self._checked(episode))
            if not tasks:
                raise InputError(f"{self.root} gives episode {episode} neither a task_index nor a task")
            return tasks[:1] * int(self.lengths[episode])
        values = self.rows(episode, column).reshape(int(self.lengths[episode]))
        if values.dtype == object:
            return values.tolist()
        if unknown := set(values.tolist()) - self.tasks.keys():
            raise InputError(f"episode {episode} of {self.root} names task {min(unknown)}, which has no text")
        return [self.tasks[index] for index in values.tolist()]

    def sole_instruction(self, episode: int) -> str | None:
        """Return the one task the episode list gives an episode, which all its rows have; None where the rows decide.

        They do where the list gives several tasks or none, and where an annotation stands in for task_index.
        It opens no table, so labels of many episodes cost nothing.
        """
        if not self.has_column("task_index") and self.modality.languages:
            return None
        return self._layout.sole_task(self._checked(episode))

    def labels(self, episode: int) -> Sequence[str]:
        """Return the instruction of every row, as ``instructions`` does, without its table where that is not needed."""
        sole = self.sole_instruction(episode)
        return self.instructions(episode) if sole is None else [sole] * int(self.lengths[episode])

    def tasks_of(self, episode: int) -> list[str]:
        """Return the tasks that the episode list gives an episode."""
        return self._layout.tasks_of(self._checked(episode))

    def extras_of(self, episode: int) -> dict[str, Any]:
        """Return what the episode list says beyond what LeRobot knows: an episode's grade, operator, sub-tasks, ..."""
        return self._layout.extras_of(self._checked(episode))

    def table_path(self, episode: int) -> Path:
        """Return the parquet file that holds an episode's rows; it may be missing."""
        return self._layout.table_path(self._checked(episode))

    def video_span(self, episode: int, camera: str) -> VideoSpan:
        """Return where an episode's frames of a camera are; the file may be missing."""
        return self._layout.video_span(self._checked(episode), camera)

    def table(self, episode: int) -> pa.Table:
        """Return an episode's rows as they are stored, with every column of the file, images included."""
        path = self.table_path(episode)
        return self._table(episode, self._footer(path).metadata.schema.to_arrow_schema().names)[0]

    def frame_numbers(self, episode: int, camera: str) -> Int64[np.ndarray, " t"]:
        """Return which frame of its video file each row of an episode shows; InputErrors as of ``frames``."""
        self._check_camera(self._checked(episode), camera)
        return self._frame_numbers(episode, camera)

    def frame_index(self, episode: int, camera: str) -> FrameIndex:
        """Return the times of all frames in the file that holds an episode's video."""
        return self._readers.index(self.video_span(episode, camera).path)

    def frames(
        self,
        episode: int,
        camera: str,
        rows: Int[np.ndarray, " n"],
        *,
        out: UInt8[np.ndarray, "n h w 3"] | None = None,
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Return the frames that belong to rows of an episode, in their order, repeats allowed; in ``out`` if given.

        Each row takes the frame shown nearest to its time. Raises InputError for a camera or row that does
        not exist, and for a video that is missing, damaged, too short or half a frame off the rows' times.
        """
        rows = np.asarray(rows, dtype=np.int64)
        self._check_camera(self._checked(episode), camera)
        if outside := [row for row in rows.tolist() if not 0 <= row < self.lengths[episode]]:
            last = self.lengths[episode] - 1
            raise InputError(f"episode {episode} of {self.root} has rows 0..{last}, got row {outside[0]}")
        if self.features[camera]["dtype"] == "image":
            images = self._read_images(episode, camera, rows)
            if out is None:
                return images
            checked_buffer(out, images.shape, self.table_path(episode))[:] = images
            return out
        numbers = self._frame_numbers(episode, camera)
        return self._readers.read(self._layout.video_span(episode, camera).path, numbers[rows], out)

    def stats(self, column: str) -> dict[str, np.ndarray]:
        """Return mean, std, min, max, q01 and q99 over all rows of a column, each [dim].

        They come from meta/stats.json where it has the quantiles, else from one pass over the tables.
        """
        if column not in self._stats and (part := self.modality.slices.get(column)) and column not in self.features:
            whole = self.stats(part.column)
            self._stats[column] = {name: whole[name].reshape(-1)[part.span] for name in NEEDED_STATS}
        if column not in self._stats:
            stored = self._stored_stats().get(column, {})
            if all(name in stored for name in NEEDED_STATS):
                self._stats[column] = self._checked_stats(column, stored)
            elif column in self.cameras:
                raise InputError(f"{self.root / STATS_FILE} has no quantiles of {column}; rewrite the dataset")
            else:
                rows = [self.rows(episode, column) for episode in range(self.num_episodes)]
                self._stats[column] = measure_rows(np.concatenate(rows))
        return self._stats[column]

    def episode(self, episode: int) -> Episode:
        """Return a whole episode as it was recorded, its frames under the cameras' short names."""
        length = int(self.lengths[self._checked(episode)])
        nothing = np.zeros((length, 0), np.float32)
        vectors = {
            name: self.rows(episode, name).reshape(length, -1) if self.has_column(name) else nothing
            for name in ("observation.state", "action")
        }
        others = {*OWN_COLUMNS, *vectors, *self.cameras}
        return Episode(
            frames={
                camera.removeprefix("observation.images."): self.frames(episode, camera, np.arange(length))
                for camera in self.cameras
            },
            state=vectors["observation.state"],
            action=vectors["action"],
            instruction=self.instructions(episode)[0],
            fps=self.fps,
            signals={name: self.rows(episode, name) for name in self.features if name not in others},
        )

    def fingerprint(self) -> str:
        """Hash the metadata, episode lengths and file sizes, so that caches notice another dataset."""
        digest = hashlib.sha256((self.root / INFO_FILE).read_bytes())
        digest.update(np.stack([self._layout.episode_index, self.lengths]).tobytes())
        digest.update(repr(sorted(self.tasks.items())).encode())
        videos = [camera for camera in self.cameras if self.features[camera]["dtype"] == "video"]
        prefix, sizes = len(str(self.root / "_")) - 1, {}
        for episode in range(self.num_episodes):
            spans = [self._layout.video_span(episode, camera) for camera in videos]
            for path in (self._layout.table_path(episode), *(span.path for span in spans)):
                name = str(path)[prefix:]
                if name not in sizes:
                    sizes[name] = _size(path)
                digest.update(f"{name} {sizes[name]}\n".encode())
            digest.update(repr([(span.start_s, span.end_s) for span in spans]).encode())
        return digest.hexdigest()

    def _checked(self, episode: int) -> int:
        if not 0 <= episode < self.num_episodes:
            raise InputError(f"{self.root} has episodes 0..{self.num_episodes - 1}, got episode {episode}")
        return int(episode)

    def _check_camera(self, episode: int, camera: str) -> None:
        if camera not in self.cameras:
            cameras = ", ".join(self.cameras) or "none"
            raise InputError(f"{self.root} has no camera {camera} (asked for in episode {episode}); it has {cameras}")

    def _table(self, episode: int, columns: list[str]) -> tuple[pa.Table, Path]:
        path = self._layout.table_path(episode)
        index = int(self._layout.episode_index[episode])
        table = read_episode(path, self._footer(path), index, columns)
        if len(table) != (length := self.lengths[episode]):
            raise InputError(f"episode {episode} has {len(table)} rows in {path}, the episode list says {length}")
        return table, path

    def _read_columns(self, episode: int) -> dict[str, np.ndarray]:
        table, path = self._table(episode, [name for name in self.features if name not in self.cameras])
        columns = {
            name: as_array(table[name], f"column {name} of episode {episode} in {path}") for name in table.column_names
        }
        for values in columns.values():
            values.flags.writeable = False  # all callers share them
        return columns

    def _read_images(self, episode: int, camera: str, rows: np.ndarray) -> np.ndarray:
        table, path = self._table(episode, [camera])
        if camera not in table.column_names:
            raise InputError(f"{path} lacks the image column {camera} of episode {episode}")
        return decode_images(table[camera].take(rows), f"column {camera} of episode {episode} in {path}", rows.tolist())

    def _match_frames(self, episode: int, camera: str) -> np.ndarray:
        """Find the number of the frame each row of an episode shows, by time; every row must have one."""
        span = self._layout.video_span(episode, camera)
        where = f"episode {episode}, camera {camera} ({span.path})"
        if not span.path.exists():
            raise InputError(f"the video of {where} is missing")
        timestamps_s = self.rows(episode, "timestamp").astype(np.float64)
        numbers, off_s = match_frames(self._readers.index(span.path), span, timestamps_s, self.fps, where)
        self.drifts.add(camera, span.path, off_s)
        return numbers

    def _checked_stats(self, column: str, stored: dict[str, Any]) -> dict[str, np.ndarray]:
        path, repair = self.root / STATS_FILE, "measure it again with `wamlab data stats --write`"
        with explained_damage(f"{column} in {path}", repair):
            found = {name: np.atleast_1d(np.array(stored[name], np.float64)) for name in stored}
        size = feature_size(self.features[column]) if column in self.features else None
        if column not in self.cameras and any(found[name].size != size for name in NEEDED_STATS):
            raise InputError(f"{column} in {path} has other dimensions than in {INFO_FILE}: {repair}")
        return found

    def _stored_stats(self) -> dict[str, dict[str, Any]]:
        path = self.root / STATS_FILE
        stored = read_json(path) if path.exists() else {}
        if not isinstance(stored, dict) or not all(isinstance(value, dict) for value in stored.values()):
            raise InputError(f"{path} does not map features to their statistics")
        return stored


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
