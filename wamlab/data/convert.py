"""A dataset in another LeRobot version: rows equal, video packets copied, so frames stay bit for bit what they were."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from wamlab.data.episode_stats import Pool, dataset_stats, episode_stats
from wamlab.data.frame_index import read_frame_index
from wamlab.data.json_files import check_finite
from wamlab.data.layout import FilePlace, Recorded, RecordedEpisode, VideoPlace
from wamlab.data.layout_v3 import VIDEO_FILE_MB
from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.recording import TableFiles, layout_of, new_folder
from wamlab.data.remux import Cut, JoinedVideos, cut_video
from wamlab.errors import InputError

Shown = Callable[[Iterable[None], int], Iterable[None]]  # may draw a bar: steps and how many there are
OWN_INFO = (  # of a version, written anew
    "codebase_version", "data_path", "video_path", "total_videos", "total_chunks", "data_files_size_in_mb",
    "video_files_size_in_mb",
)  # fmt: skip
OWN_META = {
    "info.json", "stats.json", "episodes.jsonl", "tasks.jsonl", "episodes_stats.jsonl", "tasks.parquet", "episodes",
}  # fmt: skip
Spans = dict[tuple[int, str], tuple[FilePlace, float, float]]  # by episode and camera: file, start and end in s


def convert_dataset(
    dataset: RobotDataset,
    target: Path | str,
    version: str,
    *,
    shown: Shown = lambda steps, _: steps,
    video_file_mb: float = float(VIDEO_FILE_MB),
) -> Path:
    """Write a dataset as v2.1 or v3.0 without encoding any video again, and return the new folder.

    The folder appears when all is written and every row shows the same frame as before. Further files of ``meta``
    (modality.json, embodiment.json, ...) and further keys of its list of episodes come along.
    Raises InputError, and leaves nothing behind, for an existing folder, a version that the dataset has already or
    that cannot be written, anything missing or damaged, and an episode that cannot be cut out exactly.
    """
    target, layout = Path(target), layout_of(version)
    if version == dataset.version:
        raise InputError(f"{dataset.root} is {version} already: nothing to convert")
    with new_folder(target) as partial:
        cameras = [name for name in dataset.cameras if dataset.features[name]["dtype"] == "video"]
        steps = _steps(dataset, partial, layout, cameras, video_file_mb)
        for _ in shown(steps, dataset.num_episodes * (1 + 2 * len(cameras))):
            pass
    return target


def _steps(
    dataset: RobotDataset, root: Path, layout: ModuleType, cameras: list[str], video_file_mb: float
) -> Iterator[None]:
    spans: Spans = {}
    for camera in cameras:
        if not layout.HAS_FILE_PER_EPISODE:
            yield from _join(dataset, root, layout, camera, spans, video_file_mb)
        elif dataset.version == "v3.0":
            yield from _cut(dataset, root, layout, camera, spans)
        else:
            yield from _copy(dataset, root, layout, camera, spans)
    places: list[FilePlace] = []
    with TableFiles(root, layout) as tables:
        for episode in range(dataset.num_episodes):
            places.append(tables.add(dataset.table(episode), int(dataset.episode_index[episode])))
            yield
    _write_meta(dataset, root, layout, places, spans, cameras)
    written = open_dataset(root)
    for episode in range(dataset.num_episodes):
        for camera in cameras:
            before, after = dataset.frame_numbers(episode, camera), written.frame_numbers(episode, camera)
            if not np.array_equal(before - before[0], after - after[0]):
                raise InputError(
                    f"episode {episode}, camera {camera}: its time stamps drift so far from the frames that rows "
                    "would show other ones; mend its timestamp column first"
                )
            yield


def _copy(dataset: RobotDataset, root: Path, layout: ModuleType, camera: str, spans: Spans) -> Iterator[None]:
    """Copy files that hold an episode each."""
    for episode, index in enumerate(dataset.episode_index.tolist()):
        source, place = dataset.video_span(episode, camera).path, layout.place_of(index)
        if not source.exists():
            raise InputError(f"the video of episode {episode}, camera {camera} ({source}) is missing")
        path = layout.video_path(root, camera, place)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        spans[episode, camera] = place, 0.0, dataset.lengths[episode] / dataset.fps
        yield


def _join(
    dataset: RobotDataset, root: Path, layout: ModuleType, camera: str, spans: Spans, file_mb: float
) -> Iterator[None]:
    """Append the episodes' files to one another."""
    with JoinedVideos(lambda number: layout.video_path(root, camera, layout.place_of(number)), file_mb) as joined:
        for episode, length in enumerate(dataset.lengths.tolist()):
            source = dataset.video_span(episode, camera).path
            number, start_s, end_s = joined.append(source, length / dataset.fps)
            spans[episode, camera] = layout.place_of(number), start_s, end_s
            yield


def _cut(dataset: RobotDataset, root: Path, layout: ModuleType, camera: str, spans: Spans) -> Iterator[None]:
    """Cut files at the episodes' borders."""
    episodes_of: dict[Path, list[int]] = {}
    for episode in range(dataset.num_episodes):
        episodes_of.setdefault(dataset.video_span(episode, camera).path, []).append(episode)
    for source, episodes in episodes_of.items():
        cuts, pts = [], read_frame_index(source).pts
        for episode in episodes:
            numbers = dataset.frame_numbers(episode, camera)
            first, last = int(numbers.min()), int(numbers.max())
            place = layout.place_of(int(dataset.episode_index[episode]))
            path = layout.video_path(root, camera, place)
            cuts.append(Cut(episode, int(pts[first]), int(pts[last]), last - first + 1, path))
            spans[episode, camera] = place, 0.0, dataset.lengths[episode] / dataset.fps
        cut_video(source, cuts)
        yield from [None] * len(episodes)


def _write_meta(
    dataset: RobotDataset,
    root: Path,
    layout: ModuleType,
    places: list[FilePlace],
    spans: Spans,
    cameras: list[str],
) -> None:
    pools: dict[str, Pool] = {}
    info: dict[str, Any] = {"codebase_version": None}  # first in the file; the layout fills it in
    info |= {name: value for name, value in dataset.info.items() if name not in OWN_INFO}
    info |= {
        "total_episodes": dataset.num_episodes,
        "total_frames": int(dataset.lengths.sum()),
        "total_tasks": len(dataset.tasks),
        "chunks_size": layout.CHUNK_SIZE,
    }
    extras = [dataset.extras_of(episode) for episode in range(dataset.num_episodes)]
    info |= layout.write_episodes(root, _recorded(dataset, places, spans, cameras, pools), extras)
    whole = dataset_stats(dataset, pools)
    check_finite(whole, f"the statistics of {dataset.root}")
    layout.write_meta(root, Recorded(info, dataset.tasks, whole))
    for path in (dataset.root / "meta").iterdir():
        if path.name not in OWN_META:
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, root / "meta" / path.name)


def _recorded(
    dataset: RobotDataset, places: list[FilePlace], spans: Spans, cameras: list[str], pools: dict[str, Pool]
) -> Iterator[RecordedEpisode]:
    """Yield what the metadata says of each episode, its statistics read only now; pool those of the cameras."""
    first_row = 0
    for episode, stats in enumerate(episode_stats(dataset)):
        check_finite(stats, f"the statistics of episode {episode} of {dataset.root}")
        for camera in dataset.cameras:
            if camera in stats:
                pools.setdefault(camera, Pool()).add(stats[camera])
        length = int(dataset.lengths[episode])
        yield RecordedEpisode(
            index=int(dataset.episode_index[episode]),
            first_row=first_row,
            length=length,
            tasks=dataset.tasks_of(episode),
            table=places[episode],
            videos={camera: VideoPlace(*spans[episode, camera], stats={}) for camera in cameras},
            stats=stats,
        )
        first_row += length
