"""LeRobot v2.0 and v2.1: one parquet file and one video per camera for every episode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wamlab.data.json_files import add_json_line, read_json_lines, write_json, write_json_lines
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
from wamlab.data.modality import feature_size
from wamlab.errors import InputError

DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
CHUNK_SIZE = 1000  # files a folder
HAS_FILE_PER_EPISODE = True
OWN_KEYS = ("episode_index", "tasks", "length")  # of a line of episodes.jsonl


class LayoutV2:
    """Find episodes by the path templates of info.json and the lists episodes.jsonl and tasks.jsonl."""

    def __init__(self, root: Path, info: Mapping[str, Any]):
        self._root, self._info = root, info
        path = root / "meta/episodes.jsonl"
        try:
            records = sorted(read_json_lines(path), key=lambda record: record["episode_index"])
            self.episode_index = whole_numbers([record["episode_index"] for record in records], "episode_index", path)
            self.lengths = whole_numbers([record["length"] for record in records], "length", path)
            self._tasks_of = [tuple(checked_words(record.get("tasks"), path)) for record in records]
            self._extras = [{key: value for key, value in r.items() if key not in OWN_KEYS} for r in records]
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} lacks an integer episode_index or length: {error!r}") from error
        checked_lengths(self.episode_index, self.lengths, path)
        path = root / "meta/tasks.jsonl"
        records = read_json_lines(path)
        self.tasks = checked_tasks([(r.get("task_index"), r.get("task")) for r in records], path)

    def table_path(self, episode: int) -> Path:
        return self._root / filled(self._info.get("data_path", DATA_PATH), **self._names(episode))

    def video_span(self, episode: int, camera: str) -> VideoSpan:
        template = self._info.get("video_path", VIDEO_PATH)
        path = self._root / filled(template, video_key=camera, **self._names(episode))
        return VideoSpan(path, start_s=0.0, end_s=None)

    def tasks_of(self, episode: int) -> list[str]:
        return list(self._tasks_of[episode])

    def sole_task(self, episode: int) -> str | None:
        tasks = self._tasks_of[episode]
        return tasks[0] if len(tasks) == 1 else None

    def extras_of(self, episode: int) -> dict[str, Any]:
        return dict(self._extras[episode])

    def _names(self, episode: int) -> dict[str, Any]:
        index = int(self.episode_index[episode])
        chunk = index // int(self._info.get("chunks_size", CHUNK_SIZE))
        return {"path": self._root / INFO_FILE, "episode_chunk": chunk, "episode_index": index}


def place_of(number: int) -> FilePlace:
    """Return where the nth file of a kind goes; numbers count on through the chunks."""
    return FilePlace(chunk=number // CHUNK_SIZE, file=number)


def table_path(root: Path, place: FilePlace) -> Path:
    """Return where to write the rows of an episode."""
    return root / DATA_PATH.format(episode_chunk=place.chunk, episode_index=place.file)


def video_path(root: Path, camera: str, place: FilePlace) -> Path:
    """Return where to write the video of an episode."""
    names = {"episode_chunk": place.chunk, "episode_index": place.file, "video_key": camera}
    return root / VIDEO_PATH.format(**names)


def write_episodes(
    root: Path, episodes: Iterable[RecordedEpisode], extras: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Write the list of episodes and their statistics one by one; return what info.json says of them.

    ``extras`` hold, for each episode in turn, further keys of its line.
    """
    meta, num_videos, chunks = root / "meta", 0, set()
    meta.mkdir(parents=True, exist_ok=True)
    with (
        (meta / "episodes.jsonl").open("w", encoding="utf-8") as listed,
        (meta / "episodes_stats.jsonl").open("w", encoding="utf-8") as measured,
    ):
        for number, episode in enumerate(episodes):
            line = {"episode_index": episode.index, "tasks": list(episode.tasks), "length": episode.length}
            try:
                add_json_line(listed, {**line, **(extras[number] if extras else {})})
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"the episode list says of episode {episode.index} what v2.1 cannot hold ({error}): remove it there"
                ) from error
            add_json_line(measured, {"episode_index": episode.index, "stats": episode.stats})
            num_videos += len(episode.videos)
            chunks.add(episode.table.chunk)
    return {"total_videos": num_videos, "total_chunks": len(chunks)}


def write_meta(root: Path, recorded: Recorded) -> None:
    """Write the metadata of v2.1 beside its episodes', with what GR00T and DreamZero read.

    That is ``modality.json`` and the global statistics: ``stats.json`` is not part of v2.1, yet both read their
    quantiles there.
    """
    info = {**recorded.info, "codebase_version": "v2.1", "data_path": DATA_PATH, "video_path": VIDEO_PATH}
    write_json(root / INFO_FILE, info)
    write_json(root / STATS_FILE, recorded.stats)
    write_json(root / "meta/modality.json", modality(recorded.info["features"]))
    tasks = ({"task_index": index, "task": task} for index, task in recorded.tasks.items())
    write_json_lines(root / "meta/tasks.jsonl", tasks)


def modality(features: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Name the slices of the state and action vectors, the videos and the language column for GR00T readers."""
    vectors = {
        kind: {kind: {"start": 0, "end": feature_size(features[column]), "original_key": column}}
        for kind, column in (("state", "observation.state"), ("action", "action"))
        if column in features
    }
    videos = {
        key.removeprefix("observation.images."): {"original_key": key}
        for key, feature in features.items()
        if feature["dtype"] == "video"
    }
    language = {"human.task_description": {"original_key": "task_index"}}
    return {**vectors, "video": videos, "annotation": language}
