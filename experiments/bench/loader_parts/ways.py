"""The loaders that are compared, over the same few windows of a dataset, and wamlab's reader of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from loader_parts import peers
from loader_parts.rounds import Way

from wamlab.data.clips import ClipReader
from wamlab.data.frame_store import FrameStore
from wamlab.data.lerobot import open_dataset
from wamlab.data.loader import ClipLoader, Waits, load_clips
from wamlab.data.robot import RobotConfig
from wamlab.data.windows import WindowConfig
from wamlab.errors import InputError
from wamlab.types import Clip

POOL = 8
GOLDEN = 0.618034  # multiples of it fill 0..1 evenly from the first on
SEED = 0
OWN, POOLED, STORED, BARE = "wamlab", f"wamlab, pool {POOL}", "wamlab, warm store", "bare decoder"
FLOAT32, UINT8, WINDOW, SHARDS, RLINF = (
    "LeRobot, float32", "LeRobot, uint8", "DreamZero, a window", "DreamZero, shards", "RLinf",
)  # fmt: skip


def window_of(num_frames: int, stride: int) -> WindowConfig:
    """Return windows of so many frames, 1 and 8 for each block."""
    return WindowConfig(stride, latents_per_block=2, actions_per_block=8 * stride, max_blocks=(num_frames - 1) // 8)


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
        [dataset.video_span(episode, camera) for camera in reader._cameras.values()]
        for episode in range(dataset.num_episodes)
    ]
    times_s = [dataset.rows(episode, "timestamp").astype(np.float64) for episode in range(dataset.num_episodes)]
    return peers.Recorded(
        [[str(span.path) for span in row] for row in spans],
        [[span.start_s + own_s for span in row] for row, own_s in zip(spans, times_s, strict=True)],
        windows[:, 0],
        windows[:, 1],
        rows,
    )


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


def choose_samples(reader: ClipReader, number: int, most_store_bytes: int) -> tuple[np.ndarray, int]:
    """Choose windows spread evenly over the places of as many episodes as possible; return them and a store's size.

    The episodes are those whose decoded frames fit a store, or all of them and no size where not even one's do.
    """
    rng = np.random.default_rng(SEED)
    episodes = rng.permutation(np.unique(reader.sample_episodes))
    robot = reader.robot
    frame_bytes = robot.canvas_height_px * robot.canvas_width_px * 3
    sizes = np.cumsum(reader.dataset.lengths[episodes[:number]] * frame_bytes)
    if num_fitting := int((sizes <= most_store_bytes).sum()):
        episodes, store_bytes = episodes[:num_fitting], int(sizes[num_fitting - 1])
    else:
        store_bytes = 0
    chosen = []
    for turn, episode in enumerate(np.resize(episodes, number).tolist()):
        own = np.flatnonzero(reader.sample_episodes == episode)
        chosen.append(own[int((turn + 0.5) * GOLDEN % 1 * len(own))])
    return np.array(chosen), store_bytes


@dataclass(frozen=True)
class Load:
    """How much a turn of every loader delivers."""

    num_batches: int  # a multiple of the peers' workers
    most_store_bytes: int
    has_shards: bool = False  # also compare with DreamZero's shards, which take ten times as long


def ways_of(reader: ClipReader, load: Load, store: Path) -> dict[str, Way]:
    """Return every loader by name; the frame store lies in the folder ``store``."""
    recorded, size = recorded_of(reader), peers.BATCH_SIZE
    chosen, store_bytes = choose_samples(reader, load.num_batches * size, load.most_store_bytes)

    def drawn(position: int) -> int:
        return int(chosen[position % len(chosen)])

    def peer(dataset: Any) -> Way:
        return Way(partial(peers.batches, dataset, drawn), load.num_batches, size)

    def pooled(pool: int) -> Way:
        num_cycles = 2 if pool == POOL else 1  # a group of windows more or less in a turn should not matter
        return Way(partial(_pooled, reader, pool), num_cycles * pool, size, is_in_order=False)

    ways = {
        FLOAT32: peer(peers.LeRobotLike(recorded, is_uint8=False)),
        UINT8: peer(peers.LeRobotLike(recorded, is_uint8=True)),
        WINDOW: peer(peers.DecordLike(recorded)),
        RLINF: peer(peers.RLinfLike(recorded)),
        BARE: Way(partial(peers.bare_batches, recorded, drawn), load.num_batches, size),
        OWN: Way(partial(_exact, Chosen(reader, chosen)), load.num_batches, size),
        POOLED: pooled(POOL),
    }
    if store_bytes:  # so cheap that a turn is long for its cost to be seen
        ways[STORED] = Way(partial(_stored, reader, chosen, store), 8 * load.num_batches, size)
    if load.has_shards:
        shards = peers.DreamZeroLike(recorded)
        turn = shards.shard_samples // size
        ways[SHARDS] = replace(peer(shards), batches=turn, is_in_order=False)
        ways[pool_of_shards(shards.shard_samples)] = pooled(shards.shard_samples)
    return ways


def pool_of_shards(num_samples: int) -> str:
    """Return the name of the pool that shows as many windows for one decoding as DreamZero's shards."""
    return f"wamlab, pool {num_samples}"


def _exact(source: Any) -> Iterator[list[Clip]]:
    return _each_first(load_clips(source, batch_size=peers.BATCH_SIZE, seed=SEED, is_shuffled=False))


def _pooled(reader: ClipReader, pool: int) -> Iterator[list[Clip]]:
    """Read in pools, after comparing a batch with the same windows read one by one."""
    samples = {(episode, first): sample for sample, (episode, first, _) in enumerate(reader.windows.tolist())}
    batches = _each_first(load_clips(reader, batch_size=peers.BATCH_SIZE, seed=SEED, pool=pool))
    first = next(batches)
    for clip in first:
        alone = reader.read(samples[clip.episode, clip.first_row], 0)
        assert np.array_equal(clip.frames, alone.frames), "frames of a pool are others than those of a window alone"
    yield first
    yield from batches


def _stored(reader: ClipReader, chosen: np.ndarray, folder: Path) -> Iterator[list[Clip]]:
    """Read from a store that holds every frame of the chosen windows' episodes before the first batch."""
    store = FrameStore(reader.dataset, folder, 2**40)
    episodes = np.unique(reader.sample_episodes[chosen]).tolist()

    def fill(item: tuple[int, str]) -> None:
        store.frames(*item, np.arange(reader.dataset.lengths[item[0]]))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(fill, product(episodes, reader._cameras.values())))
    stored = ClipReader(reader.dataset, reader.robot, reader.window, is_training=False, source=store)
    assert stored.read(int(chosen[0]), 0).frames.size
    num_missed = store.report().misses
    for batch in _exact(Chosen(stored, chosen)):
        assert store.report().misses == num_missed, "the store is not warm"
        yield batch


def _each_first(loader: ClipLoader) -> Iterator[list[Clip]]:
    """Yield a loader's batches, each as if it were the first.

    Between turns of other loaders a loader would learn to read further ahead, and be charged for more than it delivers.
    """
    while True:
        loader.waits = Waits()
        yield next(loader)
