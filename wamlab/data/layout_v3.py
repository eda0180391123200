"""LeRobot v3.0: many episodes in each parquet and video file, every camera with file numbers of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wamlab.data.json_files import write_json
from wamlab.data.layout import (
    INFO_FILE,
    STATS_FILE,
    FilePlace,
    Recorded,
    RecordedEpisode,
    VideoSpan,
    checked_lengths,
    checked_tasks,
    checked_words,
    filled,
    whole_numbers,
)
from wamlab.errors import InputError

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
TASKS_FILE = "meta/tasks.parquet"
CHUNK_SIZE = 1000  # files a folder
HAS_FILE_PER_EPISODE = False
OWN_NAMES = ("episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index")  # of the list of episodes
OWN_PREFIXES = ("data/", "videos/", "stats/", "meta/")
EPISODES_AT_ONCE = 256  # of which statistics are in memory, and a row group of their list
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200  # a file that has grown beyond is followed by the next


class LayoutV3:
    """Find episodes by the columns of the parquet files under meta/episodes, without their statistics."""

    def __init__(self, root: Path, info: Mapping[str, Any]):
        self._root, self._info = root, info
        folder = root / "meta/episodes"
        paths = sorted(folder.glob("*/*.parquet"))
        if not paths:
            raise InputError(f"{folder} holds no episodes parquet file")
        try:
            table = pa.concat_tables([_read_columns(path) for path in paths], promote_options="default")
        except (pa.ArrowException, ValueError) as error:
            raise InputError(f"the files in {folder} do not fit together: {error}") from error
        self._extras = table.select([name for name in table.column_names if not _is_own(name)])
        self._tasks_of = table["tasks"].combine_chunks() if "tasks" in table.column_names else None
        self._columns = {
            name: _numbers(table[name], name, folder)
            for name in table.column_names
            if pa.types.is_integer(table[name].type) or pa.types.is_floating(table[name].type)
        }
        self._folder = folder
        order = np.argsort(self._column("episode_index"), kind="stable")
        self._order = order
        self.episode_index = whole_numbers(self._column("episode_index")[order], "episode_index", folder)
        self.lengths = whole_numbers(self._column("length")[order], "length", folder)
        checked_lengths(self.episode_index, self.lengths, folder)
        self.tasks = read_tasks(root / TASKS_FILE)

    def table_path(self, episode: int) -> Path:
        names = self._place("data", episode)
        return self._root / filled(self._info.get("data_path", DATA_PATH), **names)

    def video_span(self, episode: int, camera: str) -> VideoSpan:
        prefix = f"videos/{camera}"
        names = self._place(prefix, episode)
        path = self._root / filled(self._info.get("video_path", VIDEO_PATH), video_key=camera, **names)
        start_s = float(self._value(f"{prefix}/from_timestamp", episode))
        end = f"{prefix}/to_timestamp"
        return VideoSpan(path, start_s, float(self._value(end, episode)) if end in self._columns else None)

    def tasks_of(self, episode: int) -> list[str]:
        if self._tasks_of is None:
            return []
        return checked_words(self._tasks_of[int(self._order[episode])].as_py(), self._folder)

    def sole_task(self, episode: int) -> str | None:
        tasks = self.tasks_of(episode)
        return tasks[0] if len(tasks) == 1 else None

    def extras_of(self, episode: int) -> dict[str, Any]:
        row = self._extras.slice(int(self._order[episode]), 1).to_pylist()[0]
        return _without_nothing(row)

    def _place(self, prefix: str, episode: int) -> dict[str, Any]:
        return {
            "path": self._root / INFO_FILE,
            "chunk_index": int(self._value(f"{prefix}/chunk_index", episode)),
            "file_index": int(self._value(f"{prefix}/file_index", episode)),
        }

    def _value(self, column: str, episode: int) -> Any:
        value = self._column(column)[self._order[episode]]
        if not np.isfinite(value):
            raise InputError(f"{self._folder} has no {column} for episode {self.episode_index[episode]}")
        return value

    def _column(self, name: str) -> np.ndarray:
        if name not in self._columns:
            raise InputError(f"{self._folder} lacks the column {name}")
        return self._columns[name]


def _is_own(name: str) -> bool:
    return name in OWN_NAMES or name.startswith(OWN_PREFIXES)


def _without_nothing(value: Any) -> Any:
    """Leave out what a table fills in where a key was absent."""
    if isinstance(value, dict):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None and item == item}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value


def _numbers(column: pa.ChunkedArray, name: str, folder: Path) -> np.ndarray:
    """Return an integer or float column; nulls of optional columns become nan and are found when asked for."""
    if name in ("episode_index", "length") and column.null_count:
        raise InputError(f"{folder} has an episode without {name}")
    return column.to_numpy()


def _read_columns(path: Path) -> pa.Table:
    # The stats/ columns dominate these files: hundreds of values an episode, never needed to find it.
    try:
        file = pq.ParquetFile(path)
        wanted = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
        return file.read(columns=wanted, use_threads=False)
    except (OSError, pa.ArrowException, ValueError, OverflowError, MemoryError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def read_tasks(path: Path) -> dict[int, str]:
    """Read tasks.parquet, whose task strings are a pandas index of varying name."""
    if not path.exists():
        raise InputError(f"{path} is missing")
    table = _read_columns(path)
    texts = [field.name for field in table.schema if field.type in (pa.string(), pa.large_string())]
    if "task_index" not in table.column_names or not texts:
        raise InputError(f"{path} lacks the column task_index or a column of task strings")
    name = next((name for name in ("task", "__index_level_0__") if name in texts), texts[0])
    indices, strings = table["task_index"].to_pylist(), table[name].to_pylist()
    return checked_tasks(list(zip(indices, strings, strict=True)), path)


def place_of(number: int) -> FilePlace:
    """Return where the nth file of a kind goes; numbers start again in every chunk."""
    return FilePlace(chunk=number // CHUNK_SIZE, file=number % CHUNK_SIZE)


def table_path(root: Path, place: FilePlace) -> Path:
    """Return where to write rows."""
    return root / DATA_PATH.format(chunk_index=place.chunk, file_index=place.file)


def video_path(root: Path, camera: str, place: FilePlace) -> Path:
    """Return where to write frames of a camera."""
    return root / VIDEO_PATH.format(video_key=camera, chunk_index=place.chunk, file_index=place.file)


def write_episodes(
    root: Path, episodes: Iterable[RecordedEpisode], extras: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Write the list of episodes with their statistics, some at a time; return what info.json says of them: nothing.

    ``extras`` hold, for each episode in turn, further columns. Raises InputError for those that no column can hold.
    """
    path = root / EPISODES_PATH.format(chunk_index=0, file_index=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    further = _extra_columns(extras)
    writer: pq.ParquetWriter | None = None
    schema: pa.Schema | None = None
    first, remaining = 0, iter(episodes)
    try:
        while rows := [_episode_row(episode) for episode in islice(remaining, EPISODES_AT_ONCE)]:
            schema = schema or _schema_of(rows)
            table = pa.Table.from_pylist(rows, schema=schema)
            for name, column in further.items():
                table = table.append_column(name, column.slice(first, len(rows)))
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            first += len(rows)
    except pa.ArrowException as error:
        raise InputError(f"the statistics of episodes {first} and on are unlike those before: {error}") from error
    finally:
        if writer is not None:
            writer.close()
    return {}


def _schema_of(rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """Return the columns of the first episodes, which all must have; whole numbers may be others' fractions."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: pa.array([row.get(name) for row in rows]).type for name in names}
    is_count = {name: not name.startswith("stats/") or name.endswith("/count") for name in names}
    return pa.schema([(name, kind if is_count[name] else _as_fractions(kind)) for name, kind in found.items()])


def _as_fractions(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_as_fractions(kind.value_type))
    return pa.float64() if pa.types.is_integer(kind) else kind


def _extra_columns(extras: Sequence[Mapping[str, Any]]) -> dict[str, pa.Array]:
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(key for record in extras for key in record if not _is_own(key)):
        try:
            columns[name] = pa.array([record.get(name) for record in extras])
            pq.write_table(pa.table({name: columns[name].slice(0, 0)}), pa.BufferOutputStream())
        except pa.ArrowException as error:
            raise InputError(f"the episodes' {name} is no column of one kind ({error}): mend or remove it") from error
    return columns


def write_meta(root: Path, recorded: Recorded) -> None:
    """Write the metadata of v3.0 beside its episodes', as lerobot 0.4 to 0.6 read it."""
    info = {
        **recorded.info,
        "codebase_version": "v3.0",
        "data_files_size_in_mb": DATA_FILE_MB,
        "video_files_size_in_mb": VIDEO_FILE_MB,
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH,
    }
    write_json(root / INFO_FILE, info)
    write_json(root / STATS_FILE, recorded.stats)
    pq.write_table(_tasks_table(recorded.tasks), root / TASKS_FILE)


def _episode_row(episode: RecordedEpisode) -> dict[str, Any]:
    videos: dict[str, Any] = {}
    for camera, video in episode.videos.items():
        videos[f"videos/{camera}/chunk_index"] = video.place.chunk
        videos[f"videos/{camera}/file_index"] = video.place.file
        videos[f"videos/{camera}/from_timestamp"] = video.start_s
        videos[f"videos/{camera}/to_timestamp"] = video.end_s
    stats = {
        f"stats/{feature}/{stat}": value for feature, values in episode.stats.items() for stat, value in values.items()
    }
    return {
        "episode_index": episode.index,
        "tasks": list(episode.tasks),
        "length": episode.length,
        "data/chunk_index": episode.table.chunk,
        "data/file_index": episode.table.file,
        "dataset_from_index": episode.first_row,
        "dataset_to_index": episode.first_row + episode.length,
        **videos,
        **stats,
        "meta/episodes/chunk_index": 0,
        "meta/episodes/file_index": 0,
    }


def _tasks_table(tasks: Mapping[int, str]) -> pa.Table:
    """Build the table pandas reads back with the task strings as its index."""
    number = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    text = {
        "name": None,
        "field_name": "__index_level_0__",
        "pandas_type": "unicode",
        "numpy_type": "object",
    }
    pandas = {
        "index_columns": ["__index_level_0__"],
        "column_indexes": [],
        "columns": [{**number, "metadata": None}, {**text, "metadata": None}],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    columns = {
        "task_index": pa.array(list(tasks), pa.int64()),
        "__index_level_0__": pa.array(list(tasks.values()), pa.string()),
    }
    return pa.table(columns).replace_schema_metadata({"pandas": json.dumps(pandas)})
