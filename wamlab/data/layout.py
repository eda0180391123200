"""Where a LeRobot dataset keeps what: the nouns that its versions 2 and 3 share.

A layout answers where an episode's rows and frames are; it opens no parquet or video file of an episode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from wamlab.errors import InputError

VERSIONS = ("v2.0", "v2.1", "v3.0")
INFO_FILE = "meta/info.json"
STATS_FILE = "meta/stats.json"
FIELD = re.compile(
    r"\{\w+(:0?\d{0,2}d)?\}"
)  # of a path template; Python's own would look into objects and fill gigabytes
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 2048
MAX_ROWS = 10**7  # of an episode, 92 hours at 30 Hz, and episodes of a dataset: what claims more is damaged


@dataclass(frozen=True)
class VideoSpan:
    """The stretch of a video file that shows one episode."""

    path: Path
    start_s: float
    end_s: float | None  # None: to the end of the file


@runtime_checkable
class Layout(Protocol):
    """Where the episodes of one dataset are; episodes count from 0 in the order of their ``episode_index``."""

    episode_index: Int64[np.ndarray, " episodes"]  # as the files say it
    lengths: Int64[np.ndarray, " episodes"]  # rows
    tasks: dict[int, str]

    def table_path(self, episode: int, /) -> Path: ...

    def video_span(self, episode: int, camera: str, /) -> VideoSpan: ...

    def tasks_of(self, episode: int, /) -> list[str]: ...

    def sole_task(self, episode: int, /) -> str | None: ...

    def extras_of(self, episode: int, /) -> dict[str, Any]: ...  # what no LeRobot version knows of an episode


@dataclass(frozen=True)
class FilePlace:
    """Chunk folder and file number of a v3 file; in v2 the file number is the episode's."""

    chunk: int
    file: int


@dataclass(frozen=True)
class VideoPlace:
    """Where a written episode's frames of one camera went, and what they look like."""

    place: FilePlace
    start_s: float
    end_s: float
    stats: Mapping[str, Any]  # mean, std, ... of the colours, as nested lists


@dataclass(frozen=True)
class VideoFeature:
    """What info.json and stats.json say about one camera."""

    feature: Mapping[str, Any]
    stats: Mapping[str, Any]


@dataclass(frozen=True)
class RecordedEpisode:
    """What the metadata says about an episode that has been written."""

    index: int
    first_row: int  # counted through the whole dataset
    length: int
    tasks: Sequence[str]
    table: FilePlace
    videos: Mapping[str, VideoPlace]
    stats: Mapping[str, Mapping[str, Any]]  # feature -> mean, std, ... as nested lists


@dataclass(frozen=True)
class Recorded:
    """A written dataset, ready for its metadata."""

    info: Mapping[str, Any]  # what every version's info.json says, and what writing the episodes added
    tasks: Mapping[int, str]
    stats: Mapping[str, Mapping[str, Any]]


def filled(template: Any, path: Path, **values: Any) -> str:
    """Fill a path template of info.json; InputError when it names a field the version does not know.

    What it gives stays inside the dataset's folder: no absolute path, no "..", and no field but plain ones such as
    ``{episode_index:06d}``.
    """
    if not isinstance(template, str):
        raise InputError(f"{path} gives no path template where the dataset has files to find")
    if odd := [part for part in re.findall(r"\{[^}]*\}?", template) if not FIELD.fullmatch(part)]:
        raise InputError(f"the path template {template[:200]!r} of {path} has the field {odd[0][:80]!r}")
    try:
        found = template.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise InputError(f"the path template {template[:200]!r} of {path} is wrong: {error}") from error
    parts = PurePosixPath(found)
    if not parts.parts or parts.is_absolute() or ".." in parts.parts or "\0" in found or _is_long(parts):
        raise InputError(f"the path template {template[:200]!r} of {path} leads out of the dataset: correct it")
    return found


def _is_long(path: PurePosixPath) -> bool:
    """Say whether no file system takes such a path."""
    names = [part.encode(errors="replace") for part in path.parts]
    return max(map(len, names)) > MAX_NAME_BYTES or sum(map(len, names)) > MAX_PATH_BYTES


def whole_numbers(values: Any, name: str, path: Path) -> Int64[np.ndarray, " n"]:
    """Return values as int64; InputError where one is no whole number from 0 to ``MAX_ROWS``."""
    found = values.tolist() if isinstance(values, np.ndarray) else values
    for value in found:
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        if not is_whole or not 0 <= value <= MAX_ROWS:
            raise InputError(f"{path} gives {name} as {str(value)[:40]}: need a whole number from 0 to {MAX_ROWS:,}")
    return np.array(found, np.int64)


def checked_words(tasks: Any, path: Path) -> list[str]:
    """Return the tasks of an episode; InputError where they are no list of texts."""
    found = [] if tasks is None else tasks
    if not isinstance(found, list) or not all(isinstance(task, str) for task in found):
        raise InputError(f"{path} gives an episode the tasks {str(tasks)[:80]}: need a list of texts")
    return found


def checked_tasks(pairs: Sequence[tuple[Any, Any]], path: Path) -> dict[int, str]:
    """Return tasks by index; InputError when an index is repeated or a task is no string."""
    tasks: dict[int, str] = {}
    for index, task in pairs:
        if not isinstance(task, str) or not isinstance(index, int) or index in tasks:
            raise InputError(f"{path} gives task {index!r} as {task!r}; need one string per integer index")
        tasks[index] = task
    return tasks


def checked_lengths(index: np.ndarray, lengths: np.ndarray, path: Path) -> None:
    """Raise InputError for a dataset without episodes, with repeated or with empty ones."""
    if len(index) == 0:
        raise InputError(f"{path} lists no episode: the dataset is empty")
    if len(np.unique(index)) != len(index):
        raise InputError(f"{path} lists an episode twice")
    if (lengths <= 0).any():
        raise InputError(f"{path} says episode {index[lengths <= 0][0]} has no rows")
