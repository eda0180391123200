"""Commands about datasets: making them, what they hold, what is wrong with them, other versions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional, UseAppendAction

from wamlab.errors import InputError
from wamlab.recipes.commands import check_numbers

SHOWN_FAULTS = 50


def make_data(
    root: Positional[Path] = Path("datasets/tabletop"),
    families: tuple[str, ...] = ("reach",),
    episodes: int = 400,
    version: str = "v3.0",
    size_px: tuple[int, int] = (64, 64),
    failure_share: float = 0.0,
    noise: float = 0.2,
    tail_ticks: int = 8,
    seed: int = 0,
) -> None:
    """Make a LeRobot dataset of scripted tabletop episodes.

    Args:
        root: new folder to write
        families: of tasks: reach, push, pick_place, stack
        episodes: number of episodes
        version: "v3.0" (what lerobot reads) or "v2.1" (what DreamZero and RLinf read)
        size_px: height and width of each camera
        failure_share: share of episodes in which the expert fails on purpose
        noise: added to executed actions, as a share of full speed; the recorded action is the intended one
        tail_ticks: ticks of holding still recorded after success
        seed: of all episodes
    """
    from wamlab.data.write import write_dataset
    from wamlab.sim.experts import Style, play_episodes

    check_numbers(1, episodes=episodes)
    check_numbers(0, seed=seed, noise=noise, tail_ticks=tail_ticks, failure_share=failure_share)
    if failure_share > 1:
        raise InputError(f"--failure-share is {failure_share}: give a share from 0 to 1")
    style = Style(noise=noise, tail_ticks=tail_ticks)
    played = play_episodes(families, episodes, seed, style=style, failure_share=failure_share, size=size_px)
    shown = with_bar(played, episodes, "recording episodes")
    print(f"wrote {write_dataset(shown, root, version=version, robot_type='tabletop')}")


def import_video_files(
    root: Positional[Path],
    video: UseAppendAction[tuple[str, ...]],
    instruction: str = "do the task",
    version: str = "v3.0",
    trim: bool = False,
) -> None:
    """Wrap the video files of one episode, one per camera, as a video-only LeRobot dataset.

    Args:
        root: new folder to write
        video: CAMERA=FILE, once for each camera
        instruction: what the robot does
        version: "v3.0" or "v2.1"
        trim: cut longer cameras to the shortest
    """
    from wamlab.data.import_videos import import_videos

    pairs = [text.partition("=") for text in video]
    for camera, equals, file in pairs:
        if not (camera and equals and file):
            raise InputError(f'"{camera}{equals}{file}" does not name a camera and a file: write CAMERA=FILE')
    files = {camera: Path(file) for camera, _, file in pairs}
    written = import_videos(files, root, instruction=instruction, version=version, is_trimmed_to_shortest=trim)
    print(f"wrote {written}")


def show_data(root: Positional[Path]) -> None:
    """Print a dataset's version, episodes, frames, rate, cameras, columns, tasks and size.

    Args:
        root: folder of the dataset
    """
    from wamlab.data.describe import describe_dataset
    from wamlab.data.lerobot import open_dataset
    from wamlab.lab.table import Table

    figures = describe_dataset(open_dataset(root))
    print(Table([{"figure": name, "value": value} for name, value in figures.items()]))


def check_data(root: Positional[Path], decode_all: bool = False) -> int:
    """Find what is wrong with a dataset and how to repair it; return 1 where something is broken.

    Args:
        root: folder of the dataset
        decode_all: decode every frame, not only the first and last of each video
    """
    from wamlab.data.check import check_dataset
    from wamlab.data.lerobot import open_dataset
    from wamlab.lab.table import Table

    dataset = open_dataset(root)
    steps = check_dataset(dataset, is_decoding_all=decode_all)
    found = [fault for faults in with_bar(steps, 1 + dataset.num_episodes, "checking") for fault in faults]
    found.sort(key=lambda fault: not fault.is_broken)
    rows = [
        {
            "": "broken" if fault.is_broken else "note",
            "episode": "all" if fault.episode is None else str(int(dataset.episode_index[fault.episode])),
            "where": fault.place,
            "what is wrong": fault.wrong,
            "repair": fault.repair,
        }
        for fault in found[:SHOWN_FAULTS]
    ]
    if rows:
        print(Table(rows))
    if len(found) > SHOWN_FAULTS:
        print(f"and {len(found) - SHOWN_FAULTS:,} more")
    drifts = [
        {
            "camera": camera,
            "rows off their frames by at most": f"{off_s * 1000:.2f} ms, {off_s * dataset.fps:.2f} frames",
            "in": os.path.relpath(path, dataset.root),
        }
        for camera, (off_s, path) in dataset.drifts.by_camera().items()
    ]
    if drifts:
        print(Table(drifts))
    num_broken = sum(fault.is_broken for fault in found)
    num_episodes = len({fault.episode for fault in found if fault.is_broken and fault.episode is not None})
    if num_broken:
        things = "1 thing is" if num_broken == 1 else f"{num_broken:,} things are"
        print(f"{root}: {things} broken, in {num_episodes:,} of {dataset.num_episodes:,} episodes")
        return 1
    print(f"{root}: {dataset.num_episodes:,} episodes are sound")
    return 0


def convert_data(
    root: Positional[Path],
    out: Positional[Path],
    version: Literal["v2.1", "v3.0"],
) -> None:
    """Write a dataset in another LeRobot version, its videos copied and not encoded again.

    Args:
        root: folder of the dataset
        out: new folder to write
        version: "v2.1" (one file an episode) or "v3.0" (many episodes a file)
    """
    from wamlab.data.convert import convert_dataset
    from wamlab.data.lerobot import open_dataset

    dataset = open_dataset(root)
    written = convert_dataset(dataset, out, version, shown=lambda steps, num: with_bar(steps, num, "converting"))
    print(f"wrote {written}: {dataset.num_episodes:,} episodes as {version}")


def with_bar(steps: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """Yield the steps under a progress bar that appears after two seconds."""
    from tqdm.auto import tqdm

    yield from tqdm(steps, total=total, desc=what, unit="", delay=2)
