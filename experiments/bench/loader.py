"""Loading clips: CPU time a sample against loaders of other projects and against the bare decoder.

    wamlab bench loader [DATASET] [--quick] [--json]

Every loader delivers the same few windows of up to three cameras over and over, at their stored size, in batches of 2,
and the same frames to the last bit. Each runs in a process of its own and is charged for what a turn of batches costs,
worker processes included; turns alternate and ratios are paired by round. Pools, and DreamZero's shards, show several
windows of an episode for one decoding. How many times the bare decoder beats a peer stands beside: the limit of a
loader that decodes each window, except where wamlab skips frames that no other needs. Besides: a warm frame store, the
index of a long file, how long training waits for batches, and how much a helper process that loads slows it. The whole
table takes about 15 minutes on 2 cores.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from loader_parts import peers, rounds, table, waiting
from loader_parts.videos import Videos, find_clip, make_dataset
from loader_parts.ways import BARE, Load, open_reader, recorded_of, ways_of
from tqdm import tqdm

from wamlab.data.clips import ClipReader
from wamlab.errors import InputError

DENSE, STRIDED = (25, 1), (33, 2)  # frames, stride
HEADROOMS = {"wait_fraction": 1.3, "wait_fraction_at_1_1": 1.1}  # step time over what loading a batch takes on its own
IS_SMOKE = bool(os.environ.get("WAMLAB_SMOKE"))  # every part runs, as little as tests need
LONG_FRAMES = 600 if IS_SMOKE else 10_000
NUM_ROUNDS = 5
MOST_WAYS = 8  # without DreamZero's shards
HELPER_HEADROOM = 1.3  # step time over what a helper process takes for a batch
Say = Callable[[str], Any]


@dataclass(frozen=True)
class Setting:
    """Which windows of which videos."""

    videos: Videos
    num_frames: int
    stride: int

    @property
    def name(self) -> str:
        episodes = f", {self.videos.num_episodes} episodes" if self == MANY_FILES else ""
        return f"{self.videos.name}{episodes}, {self.num_frames} frames x {self.stride}"

    @property
    def load(self) -> Load:
        """Return shorter turns for large frames, and no frame store for many episodes."""
        num_turns = 1 if self.videos.height_px > 400 else 2
        return Load(num_turns * peers.NUM_WORKERS, 0 if self == MANY_FILES else 3 * 2**30, has_shards=self == PUBLISHED)


PUBLISHED = Setting(Videos(), *DENSE)
MANY_FILES = Setting(Videos(num_episodes=32), *DENSE)  # more files than decoders that stay open
ENCODED = [
    Videos(codec, group, *size)
    for size, codec, group in product(((180, 320), (480, 640)), ("h264", "av1"), (2, 30, 250))
]
SETTINGS = [*(Setting(v, *window) for v, window in product([Videos(), *ENCODED], (DENSE, STRIDED))), MANY_FILES]


def measure_setting(
    reader: ClipReader, load: Load, *, num_rounds: int, budget_s: float, say: Say = lambda way: None
) -> dict[str, rounds.Costs]:
    """Measure all loaders on one setting; raises RuntimeError where one of wamlab's fails."""
    with tempfile.TemporaryDirectory(prefix="wamlab-bench-") as store:
        ways = ways_of(reader, load, Path(store))
        costs = rounds.measure(ways, num_rounds=num_rounds, budget_s=budget_s, say=say)
    for way, cost in costs.items():
        if cost.error and way.startswith("wamlab"):
            raise RuntimeError(f"{way}: {cost.error}")
        if not ways[way].is_in_order:
            cost.frames = costs[BARE].frames  # others than the first batch's; checked where they are made
    return costs


def list_differing(costs: dict[str, rounds.Costs]) -> list[str]:
    """Return the loaders that showed other frames than the bare decoder."""
    return [way for way, cost in costs.items() if not cost.error and cost.frames != costs[BARE].frames]


def measure_table() -> dict[str, Any]:
    """Measure the whole table, a line as soon as it is there; return the first setting's figures and all ratios."""
    print(table.head())
    figures: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    a_setting = MOST_WAYS * (NUM_ROUNDS + 1)  # turns
    with tqdm(total=len(SETTINGS) * a_setting, desc="loaders", unit="turn", file=sys.stderr) as bar:
        for number, setting in enumerate(SETTINGS):
            bar.set_postfix_str(setting.name)
            costs = measure_own(setting, setting.load, num_rounds=NUM_ROUNDS, say=lambda way: bar.update())
            bar.update((number + 1) * a_setting - bar.n)  # fewer where a loader cannot read the files
            found = table.ratios_of(costs)
            tqdm.write(table.line(setting.name, found))
            figures = figures or table.figures_of(costs, found)
            ratios[setting.name] = table.figures_of(costs, found)["ratios"]
            if setting == PUBLISHED:
                details = str(table.detailed(costs))
    print(f"\n{PUBLISHED.name}: CPU time a sample\n{details}")
    return figures | {"settings": ratios}


def measure_own(
    setting: Setting, load: Load, *, num_rounds: int, budget_s: float = float("inf"), say: Say = lambda way: None
) -> dict[str, rounds.Costs]:
    """Measure a setting whose videos every loader reads right; raises RuntimeError where one does not."""
    reader = open_reader(make_dataset(setting.videos), setting.num_frames, setting.stride)
    costs = measure_setting(reader, load, num_rounds=num_rounds, budget_s=budget_s, say=say)
    if differing := list_differing(costs):
        raise RuntimeError(f"{setting.name}: frames of {', '.join(differing)} are not the bare decoder's")
    return costs


def measure_dataset(root: Path, *, is_quick: bool) -> dict[str, Any]:
    """Measure a user's dataset: dense windows, shorter ones where its episodes are, and strided ones where they fit."""
    figures: dict[str, Any] = {}
    for num_frames, stride in fitting_windows(root, is_quick=is_quick):
        reader = open_reader(root, num_frames, stride)
        load = Load((1 if is_quick else 2) * peers.NUM_WORKERS, 2**29 if is_quick else 3 * 2**30)
        costs = measure_setting(reader, load, num_rounds=NUM_ROUNDS, budget_s=0 if IS_SMOKE else 6 if is_quick else 60)
        found = table.ratios_of(costs)
        print(f"{root}, {num_frames} frames of stride {stride}: CPU time a sample\n{table.detailed(costs)}")
        if differing := list_differing(costs):
            print(f"other frames than the bare decoder's: {', '.join(differing)}")
        figures = figures or table.figures_of(costs, found)
    return figures


def fitting_windows(root: Path, *, is_quick: bool) -> list[tuple[int, int]]:
    """Return frames and stride of the windows to measure; raises InputError where no episode holds even 9 frames."""
    for num_frames in (25, 17, 9):
        try:
            open_reader(root, num_frames, 1)
        except InputError:
            if num_frames == 9:
                raise
        else:
            break
    fitting = [(num_frames, 1)]
    if not is_quick:
        with suppress(InputError):
            open_reader(root, *STRIDED)
            fitting.append(STRIDED)
    return fitting


def measure_rest(reader: ClipReader, *, is_quick: bool) -> dict[str, Any]:
    """Measure the index, the waiting and the helper process; print them."""
    path = Path(recorded_of(reader).paths[0][0])
    length, own_s, other_s, found = waiting.in_child(
        partial(waiting.measure_index, path, LONG_FRAMES, 1 if IS_SMOKE else 5 if is_quick else 11)
    )
    name = "PyAV reader" if peers.NO_TORCHCODEC else "torchcodec exact"
    print(
        f"\nindex of {length:,} frames: {1000 * own_s:.2f} ms, {name} {1000 * other_s:.1f} ms, "
        f"{statistics.median(found):.0f} times (from {found[0]:.0f} to {found[-1]:.0f})"
    )
    figures: dict[str, Any] = {"index_speedup_vs_torchcodec": statistics.median(found)}
    headrooms = list(HEADROOMS.values())
    num_steps = 4 if IS_SMOKE else 30 if is_quick else 200
    batch_s, shares = waiting.in_child(partial(waiting.measure_waits, reader, headrooms, num_steps))
    for (key, headroom), share in zip(HEADROOMS.items(), shares, strict=True):
        print(
            f"step of {headroom} times what a batch takes to load ({1000 * batch_s:.0f} ms): "
            f"training waits {100 * share:.2f} % of its time"
        )
        figures[key] = share
    steps, num_rounds = (2, 1) if IS_SMOKE else (8, 3) if is_quick else (24, 9)
    if rates := waiting.in_child(partial(waiting.measure_step_rate, reader, HELPER_HEADROOM, steps, num_rounds)):
        figures["step_rate_with_helper_process"] = statistics.median(rates)
        print(
            f"training on one core beside a helper process that loads on another: {statistics.median(rates):.3f} of "
            f"its rate without a loader (from {rates[0]:.3f} to {rates[-1]:.3f})"
        )
    else:
        print("one core: nothing to measure beside a helper process")
    return figures


def warn() -> None:
    """Say in a line each what is missing here, and whether other programs disturb."""
    for missing, package, so in (
        (peers.NO_TORCHCODEC, "torchcodec", "PyAV takes its place in LeRobot's, RLinf's and the bare loader"),
        (peers.NO_DECORD, "decord", "DreamZero's loader is left out"),
    ):
        if missing:
            print(f"{package} does not load ({missing}): {so}")
    if find_clip() is None:
        print("the DROID clip is not there (WAMLAB_DROID_CLIP names its folder): videos are synthetic")
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > 0.5:
        print(f"other programs kept {busy:.1f} cores busy in the last minute: waits and step rates suffer")


def run(*, is_quick: bool, dataset: Path | None = None) -> dict[str, Any]:
    """Measure every setting, or the user's dataset; return the figures, those of the first setting by their names."""
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    if dataset is not None:
        fitting_windows(dataset, is_quick=True)  # what is wrong with it shows before anything else
    warn()
    if dataset is not None:
        figures = measure_dataset(dataset, is_quick=is_quick)
        reader = open_reader(dataset, *fitting_windows(dataset, is_quick=True)[0])
    else:
        if is_quick:
            load = Load(2 * peers.NUM_WORKERS, 2**29)
            costs = measure_own(PUBLISHED, load, num_rounds=NUM_ROUNDS, budget_s=6)
            figures = table.figures_of(costs, table.ratios_of(costs))
            print(f"{PUBLISHED.name}: CPU time a sample; all frames equal\n{table.detailed(costs)}")
        else:
            figures = measure_table()
        reader = open_reader(make_dataset(PUBLISHED.videos), *DENSE)
    figures |= measure_rest(reader, is_quick=is_quick)
    return figures | {"minutes": (time.perf_counter() - start_s) / 60}


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
