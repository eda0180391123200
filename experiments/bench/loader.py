"""Loading clips: CPU time a sample against loaders of other projects and against the bare decoder.

    wamlab bench loader [DATASET] [--quick] [--json]

Every loader delivers the same few windows of all cameras over and over, at their stored size, in batches of 4. Each
runs in a process of its own and is charged for what a turn of batches costs, worker processes included; turns alternate
and ratios are paired by round. Pools, and DreamZero's shards, show several windows of an episode for one decoding. No
loader that decodes each window can beat the bare decoder: "limit" says how many times it beats a peer. Besides: the
index of a long file, and how long training waits.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader_parts import peers, rounds
from loader_parts.rounds import Costs, Way
from loader_parts.videos import Videos, find_clip, joined, make_dataset

from wamlab.data.clips import ClipReader
from wamlab.data.frame_index import read_frame_index
from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.loader import MAX_DEPTH, load_clips
from wamlab.data.order import SampleOrder
from wamlab.data.robot import RobotConfig
from wamlab.data.windows import WindowConfig
from wamlab.errors import InputError
from wamlab.lab.table import Table
from wamlab.types import Clip

POOL = 8
GOLDEN = 0.618034  # multiples of it fill 0..1 evenly from the first on
SEED = 0
HEADROOMS = (1.3, 1.1)  # step time over what the loader needs for a batch on its own


@dataclass(frozen=True)
class Setting:
    """Which windows of which videos."""

    videos: Videos
    num_frames: int
    stride: int

    @property
    def name(self) -> str:
        episodes = f", {self.videos.num_episodes} episodes" if self.videos.num_episodes != 4 else ""
        return f"{self.videos.name}, {self.num_frames} frames of stride {self.stride}{episodes}"


PUBLISHED = Setting(Videos(), 25, 1)
SETTINGS = (
    PUBLISHED,
    Setting(Videos(), 25, 4),
    Setting(Videos(num_episodes=32), 25, 1),  # more files than decoders that stay open
    Setting(Videos("h264", 2), 25, 1),
    Setting(Videos("h264", 30), 33, 2),
    Setting(Videos("h264", 250), 25, 4),
    Setting(Videos("av1", 2), 25, 4),
    Setting(Videos("av1", 30), 25, 1),
    Setting(Videos("h264", 30, 480, 640), 33, 2),
    Setting(Videos("av1", 2, 480, 640), 25, 4),
    Setting(Videos("av1", 250, 480, 640), 25, 1),
)


def window_of(num_frames: int, stride: int) -> WindowConfig:
    """Return windows of so many frames, 1 and 8 for each block."""
    return WindowConfig(stride, latents_per_block=2, actions_per_block=8 * stride, max_blocks=(num_frames - 1) // 8)


@dataclass(frozen=True)
class Chosen:
    """Some of a reader's samples, so that every turn of every loader shows the same ones."""

    reader: ClipReader
    samples: np.ndarray

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def sample_episodes(self) -> np.ndarray:
        return self.reader.sample_episodes[self.samples]

    def read(self, sample_index: int, seed: int) -> Clip:
        return self.reader.read(int(self.samples[sample_index]), seed)

    def decode(self, samples: Sequence[int], *args: Any, **options: Any) -> Any:
        return self.reader.decode([int(self.samples[sample]) for sample in samples], *args, **options)

    def clip(self, sample_index: int, *args: Any, **options: Any) -> Clip:
        return self.reader.clip(int(self.samples[sample_index]), *args, **options)


def choose_samples(reader: ClipReader, number: int) -> np.ndarray:
    """Choose windows of as many episodes as possible, spread evenly over the places of an episode."""
    episodes = np.unique(reader.sample_episodes)
    rng = np.random.default_rng(SEED)
    chosen = []
    for turn, episode in enumerate(rng.permutation(np.resize(episodes, number)).tolist()):
        own = np.flatnonzero(reader.sample_episodes == episode)
        chosen.append(own[int((turn + 0.5) * GOLDEN % 1 * len(own))])
    return np.array(chosen)


def open_reader(root: Path, num_frames: int, stride: int, most_cameras: int = 3) -> ClipReader:
    """Return wamlab's reader with views at their stored size side by side, so that a clip is a copy of its frames."""
    dataset = open_dataset(root)
    videos = [c for c in dataset.cameras if dataset.features[c]["dtype"] == "video"]
    if not videos:
        raise InputError(f"{root} stores no videos: there is no decoding to measure")
    sizes = {camera: dataset.frames(0, camera, np.array([0])).shape[1:3] for camera in videos}
    cameras = tuple(camera for camera in videos if sizes[camera] == sizes[videos[0]])[:most_cameras]
    height_px, width_px = sizes[cameras[0]]
    robot = RobotConfig(
        cameras, "row", height_px, width_px, crop_fraction=1.0, has_color_jitter=False,
        state_column=None, action_column=None,
    )  # fmt: skip
    return ClipReader(dataset, robot, window_of(num_frames, stride), is_training=False)


def recorded_of(reader: ClipReader) -> peers.Recorded:
    """Return what the peers need to know of the reader's dataset and windows."""
    dataset, windows = reader.dataset, reader.windows
    rows = reader.window.frame_stride * np.arange(reader.window.num_frames)
    spans = [
        [dataset._layout.video_span(episode, camera) for camera in reader._cameras.values()]
        for episode in range(dataset.num_episodes)
    ]
    times_s = [_times_s(dataset, episode) for episode in range(dataset.num_episodes)]
    return peers.Recorded(
        [[str(span.path) for span in row] for row in spans],
        [[span.start_s + own_s for span in row] for row, own_s in zip(spans, times_s, strict=True)],
        windows[:, 0],
        windows[:, 1],
        rows,
    )


def _times_s(dataset: RobotDataset, episode: int) -> np.ndarray:
    return dataset.rows(episode, "timestamp").astype(np.float64)


def ways_of(reader: ClipReader, *, is_quick: bool) -> dict[str, Way]:
    """Return every loader; those of decord only where it reads the files."""
    recorded = recorded_of(reader)
    # wamlab's loaders begin at MAX_DEPTH: one that still reads further ahead from turn to turn decodes more than a turn
    # delivers (12 samples for 8) and would be charged for it.
    turn = peers.NUM_WORKERS * (1 if is_quick else 2)  # batches
    chosen = choose_samples(reader, turn * peers.BATCH_SIZE)
    prefetch = peers.QUICK_PREFETCH if is_quick else peers.PREFETCH

    def drawn(position: int) -> int:
        return int(chosen[position % len(chosen)])

    def peer(dataset: Any, num_batches: int = turn) -> Way:
        return Way(partial(peers.batches, dataset, drawn, prefetch), num_batches, peers.BATCH_SIZE)

    def single() -> Iterator[Any]:
        return load_clips(
            Chosen(reader, chosen),
            batch_size=peers.BATCH_SIZE,
            seed=SEED,
            is_shuffled=False,
            prefetch_batches=MAX_DEPTH,
        )

    def pooled(pool: int) -> Way:
        def make() -> Iterator[Any]:
            return load_clips(reader, batch_size=peers.BATCH_SIZE, seed=SEED, pool=pool, prefetch_batches=MAX_DEPTH)

        return Way(make, pool, peers.BATCH_SIZE)

    shards = peers.DreamZeroLike(recorded)
    ways = {
        "LeRobot, float32": peer(peers.LeRobotLike(recorded, is_uint8=False)),
        "LeRobot, uint8": peer(peers.LeRobotLike(recorded, is_uint8=True)),
        "DreamZero, a window": peer(peers.DecordLike(recorded)),
        "DreamZero, shards": peer(shards, shards.shard_samples // peers.BATCH_SIZE),
        "RLinf": peer(peers.RLinfLike(recorded)),
        "bare decoder": Way(partial(peers.bare_batches, recorded, drawn), turn, peers.BATCH_SIZE),
        "wamlab": Way(single, turn, peers.BATCH_SIZE),
        f"wamlab, pool {POOL}": pooled(POOL),
    }
    if not is_quick:
        ways[f"wamlab, pool {shards.shard_samples}"] = pooled(shards.shard_samples)
    return ways


def measure_setting(name: str, reader: ClipReader, *, is_quick: bool, budget_s: float) -> dict[str, float]:
    """Measure all loaders on one setting; print the table and return ratios."""
    ways = ways_of(reader, is_quick=is_quick)
    costs = rounds.measure(ways, num_rounds=5 if budget_s else 1, budget_s=budget_s)
    equal, differing = check_pixels(reader)
    print(f"\n{name}: CPU time a sample; {equal} frames equal the bare decoder's, {differing} differ")
    print(Table([_row(way, costs) for way in ways]))
    figures = {f"cpu_ms, {way}": cost.ms for way, cost in costs.items() if cost.seconds}
    keys = {
        "speedup_vs_lerobot_float32": ("LeRobot, float32", "wamlab"),
        "speedup_vs_lerobot_uint8": ("LeRobot, uint8", "wamlab"),
        "speedup_vs_dreamzero": ("DreamZero, a window", "wamlab"),
        "speedup_vs_dreamzero_pool": ("DreamZero, a window", f"wamlab, pool {POOL}"),
        "speedup_vs_dreamzero_shards": ("DreamZero, shards", f"wamlab, pool {POOL}"),
        "speedup_vs_rlinf": ("RLinf", "wamlab"),
        "speedup_vs_rlinf_pool": ("RLinf", f"wamlab, pool {POOL}"),
        "cpu_vs_bare_torchcodec": ("wamlab", "bare decoder"),
    }
    for key, (peer, own) in keys.items():
        if found := rounds.ratios(costs[peer], costs[own]):
            figures[key] = statistics.median(found)
    return figures


def _row(way: str, costs: Mapping[str, Costs]) -> dict[str, Any]:
    """Return a loader's line: what it costs, how many times what wamlab costs, and the bare decoder's lead."""
    cost = costs[way]
    if cost.error:
        return {"loader": way, "ms, median": cost.error[:70]}
    single, pooled = rounds.ratios(cost, costs["wamlab"]), rounds.ratios(cost, costs[f"wamlab, pool {POOL}"])
    bare = rounds.ratios(cost, costs["bare decoder"])
    return {
        "loader": way + (_note() if way in ("LeRobot, float32", "LeRobot, uint8", "RLinf", "bare decoder") else ""),
        "ms, median": cost.ms,
        "/ wamlab": statistics.median(single),
        "lowest": single[0],
        "highest": single[-1],
        f"/ pool {POOL}": statistics.median(pooled),
        "/ bare (limit)": statistics.median(bare),
    }


def _note() -> str:
    return " (PyAV in torchcodec's place)" if peers.NO_TORCHCODEC else ""


def check_pixels(reader: ClipReader, num_samples: int = 3) -> tuple[int, int]:
    """Count the frames of some samples that are, and are not, the bare decoder's to the last bit."""
    return in_child(partial(_compare_pixels, reader, num_samples))


def _compare_pixels(reader: ClipReader, num_samples: int) -> tuple[int, int]:
    recorded, order = recorded_of(reader), SampleOrder(reader.num_samples, SEED)
    equal = differing = 0
    for position in range(num_samples):
        sample = order.draw(position).sample
        own = reader.read(sample, 0).frames
        other = np.concatenate(peers.bare_sample(recorded, sample, {}), axis=2)
        same = int((own == other).all(axis=(1, 2, 3)).sum())
        equal, differing = equal + same, differing + len(own) - same
    return equal, differing


def in_child(call: Callable[[], Any]) -> Any:
    """Return a call's result from a process of its own: decoders do not survive the forks of later loaders."""
    ours, theirs = rounds.FORK.Pipe()

    def answer() -> None:
        try:
            theirs.send((call(), None))
        except Exception as error:
            theirs.send((None, f"{type(error).__name__}: {error}"))

    process = rounds.FORK.Process(target=answer)
    process.start()
    theirs.close()
    try:
        result, error = ours.recv()
    except EOFError:
        raise RuntimeError("a measuring process died") from None
    finally:
        process.join()
    if error:
        raise RuntimeError(error)
    return result


def measure_index(path: Path, num_rounds: int) -> tuple[float, float, list[float]]:
    """Return CPU seconds of indexing a file, those of torchcodec's exact opening, and the ratios."""
    own_s, other_s = [], []
    for _ in range(num_rounds + 1):
        start_s = time.process_time()
        index = read_frame_index(path)
        middle_s = time.process_time()
        decoder = peers.Decoder(str(path), seek_mode="exact")
        own_s.append(middle_s - start_s)
        other_s.append(time.process_time() - middle_s)
        assert peers.NO_TORCHCODEC or len(decoder) == len(index)
    found = sorted(b / a for a, b in zip(own_s[1:], other_s[1:], strict=True))
    return statistics.median(own_s[1:]), statistics.median(other_s[1:]), found


def measure_wait(reader: ClipReader, headroom: float, seconds: float) -> dict[str, float]:
    """Train without training: a step sleeps ``headroom`` times what the loader alone takes for a batch.

    As on a GPU, where the CPU is free meanwhile. The rate alone is measured right before, over as many batches.
    """
    loader = load_clips(reader, batch_size=peers.BATCH_SIZE, seed=SEED)
    for _ in range(4):
        next(loader)
    start_s, num_batches = time.perf_counter(), 0
    while time.perf_counter() - start_s < seconds / 3:
        next(loader)
        num_batches += 1
    alone_s = (time.perf_counter() - start_s) / num_batches
    step_s = headroom * alone_s
    time.sleep(4 * alone_s)  # training begins with full queues
    next(loader)
    waited_s, spent_s = loader.report().wait_s, loader.report().step_s
    for _ in range(max(8, round(seconds * 2 / 3 / step_s))):
        time.sleep(step_s)
        next(loader)
    waited_s, spent_s = loader.report().wait_s - waited_s, loader.report().step_s - spent_s
    loader.close()
    return {"share": waited_s / (waited_s + spent_s), "batch_s": alone_s, "step_s": step_s}


def measure_rest(reader: ClipReader, *, is_quick: bool) -> dict[str, Any]:
    """Measure the index and the waiting; print both."""
    figures: dict[str, Any] = {}
    paths = recorded_of(reader).paths
    with tempfile.TemporaryDirectory() as folder:
        times = -(-10_000 // len(read_frame_index(Path(paths[0][0]))))
        path = joined(Path(paths[0][0]), Path(folder) / "long.mp4", times)
        own_s, other_s, found = in_child(partial(measure_index, path, 7))
        name = "PyAV reader" if peers.NO_TORCHCODEC else "torchcodec exact"
        length = len(read_frame_index(path))
        print(
            f"\nindex of {length:,} frames: {1000 * own_s:.2f} ms, {name} {1000 * other_s:.1f} ms, "
            f"{statistics.median(found):.0f} times (from {found[0]:.0f} to {found[-1]:.0f})"
        )
        figures["index_speedup_vs_torchcodec"] = statistics.median(found)
    for headroom in HEADROOMS[: 1 if is_quick else 2]:
        wait = in_child(partial(measure_wait, reader, headroom, 9 if is_quick else 30))
        print(
            f"step of {headroom} times what a batch takes to load ({1000 * wait['batch_s']:.0f} ms): "
            f"training waits {100 * wait['share']:.2f} % of its time"
        )
        figures["wait_fraction" if headroom == HEADROOMS[0] else f"wait_fraction, {headroom}"] = wait["share"]
    return figures


def run(*, is_quick: bool, dataset: Path | None = None) -> dict[str, Any]:
    """Measure every setting, or the user's dataset; return the figures of the first and print a table a setting."""
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    for missing, package, so in (
        (peers.NO_TORCHCODEC, "torchcodec", "PyAV takes its place in LeRobot's, RLinf's and the bare loader"),
        (peers.NO_DECORD, "decord", "DreamZero's loader is left out"),
    ):
        if missing:
            print(f"{package} does not load ({missing}): {so}")
    if dataset is None and find_clip() is None:
        print("the DROID clip is not there (WAMLAB_DROID_CLIP names its folder): videos are synthetic")
    figures: dict[str, Any] = {}
    if dataset is not None:
        reader = open_reader(dataset, 25, 1)
        figures |= measure_setting(f"{dataset}, 25 frames of stride 1", reader, is_quick=is_quick, budget_s=60)
    else:
        for setting in SETTINGS[: 1 if is_quick else None]:
            reader = open_reader(make_dataset(setting.videos), setting.num_frames, setting.stride)
            is_small = setting.videos.height_px < 400
            found = measure_setting(
                setting.name, reader, is_quick=is_quick, budget_s=0 if is_quick else 25 if is_small else 40
            )
            figures |= found if setting is PUBLISHED else {f"{key}, {setting.name}": found[key] for key in found}
        reader = open_reader(make_dataset(PUBLISHED.videos), PUBLISHED.num_frames, PUBLISHED.stride)
    figures |= measure_rest(reader, is_quick=is_quick)
    figures["minutes"] = (time.perf_counter() - start_s) / 60
    return figures


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
