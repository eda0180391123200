"""Loaders of other projects, rewritten for measuring: what they do to a sample, without what is not loading.

Each takes its samples in the order it is given and delivers every camera's frames at their stored size. Rows of states
and actions, which all of them also read, are left out, which favours the peers.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from wamlab.data.decode import open_video
from wamlab.data.frame_index import read_frame_index

BATCH_SIZE, NUM_WORKERS = 2, 2
PREFETCH = 1  # fewer than usual fill sooner and cost a sample the same
CACHED_DECODERS = 100  # LeRobot's LRU
SHARD_SHARE = 0.1  # of a shard's steps that DreamZero shows

try:
    from torchcodec.decoders import VideoDecoder  # pyright: ignore[reportPrivateImportUsage, reportMissingImports]

    NO_TORCHCODEC = ""
except (ImportError, OSError, RuntimeError) as error:  # a wheel that does not fit its torch raises the latter two
    VideoDecoder = None
    NO_TORCHCODEC = str(error).strip().split("\n")[0][:100]

try:
    import decord

    NO_DECORD = ""
except (ImportError, OSError, RuntimeError) as error:
    decord = None
    NO_DECORD = str(error).strip().split("\n")[0][:100]


@dataclass(frozen=True)
class Recorded:
    """A dataset's videos and the samples to show."""

    paths: Sequence[Sequence[str]]  # of each episode and camera
    times_s: Sequence[Sequence[np.ndarray]]  # of each episode and camera: when its rows are shown
    episodes: np.ndarray  # of each sample
    first_rows: np.ndarray  # of each sample
    offsets: np.ndarray  # of a sample's rows from its first

    def wanted(self, sample: int) -> list[tuple[str, np.ndarray]]:
        """Return each camera's file and the times of a sample's frames."""
        episode = int(self.episodes[sample])
        rows = self.first_rows[sample] + self.offsets
        return [(p, t[rows]) for p, t in zip(self.paths[episode], self.times_s[episode], strict=True)]


@dataclass(frozen=True)
class Shown:
    """Decoded frames and when they are shown."""

    data: torch.Tensor
    pts_seconds: torch.Tensor


class PyAVDecoder:
    """What the peers use of torchcodec's decoder, where that does not load."""

    def __init__(self, source: Any, seek_mode: str = "exact", dimension_order: str = "NCHW", **_: Any):
        path = Path(getattr(source, "path", source))  # fsspec's open file knows its own
        self._reader = open_video(path)
        self._is_nchw = dimension_order == "NCHW"
        times_s = self._reader.index.times_s
        self.average_fps = (len(times_s) - 1) / (times_s[-1] - times_s[0])

    @property
    def metadata(self) -> PyAVDecoder:
        return self

    def get_frames_at(self, indices: list[int]) -> Shown:
        frames = torch.from_numpy(self._reader.read(np.array(indices)))
        frames = frames.permute(0, 3, 1, 2) if self._is_nchw else frames
        return Shown(frames, torch.from_numpy(self._reader.index.times_s[indices]))


Decoder: Any = PyAVDecoder if VideoDecoder is None else VideoDecoder


class LeRobotLike(Dataset):
    """Cached approximate decoders, one thread a camera, a check by distances, frames stacked again, floats or bytes."""

    def __init__(self, recorded: Recorded, *, is_uint8: bool):
        self._recorded, self._is_uint8 = recorded, is_uint8
        self._decoders: OrderedDict[str, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recorded.episodes)

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        wanted = self._recorded.wanted(sample)
        with ThreadPoolExecutor(len(wanted)) as threads:
            frames = list(threads.map(lambda one: self._frames(*one), wanted))
        return {str(camera): views for camera, views in enumerate(frames)}

    def _decoder(self, path: str) -> Any:
        if path not in self._decoders:
            if len(self._decoders) >= CACHED_DECODERS:
                self._decoders.popitem(last=False)
            self._decoders[path] = Decoder(fsspec.open(path).__enter__(), seek_mode="approximate")
        self._decoders.move_to_end(path)
        return self._decoders[path]

    def _frames(self, path: str, times_s: np.ndarray) -> torch.Tensor:
        decoder = self._decoder(path)
        fps = decoder.metadata.average_fps
        found = decoder.get_frames_at(indices=[round(time_s * fps) for time_s in times_s.tolist()])
        frames, shown = [], []
        for frame, pts in zip(found.data, found.pts_seconds, strict=True):
            frames.append(frame)
            shown.append(pts.item())
        asked_s, shown_s = torch.tensor(times_s), torch.tensor(shown, dtype=torch.float64)
        off_s, nearest = torch.cdist(asked_s[:, None], shown_s[:, None], p=1).min(1)
        if not (off_s < 1e-4).all():
            raise ValueError(f"{path}: frames {off_s.max():.4f} s off")
        closest = torch.stack([frames[index] for index in nearest])
        return closest if self._is_uint8 else closest.type(torch.float32) / 255


class RLinfLike(Dataset):
    """A new approximate decoder for every camera of every sample, channels last."""

    def __init__(self, recorded: Recorded):
        self._recorded = recorded

    def __len__(self) -> int:
        return len(self._recorded.episodes)

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        return {str(c): self._frames(*one) for c, one in enumerate(self._recorded.wanted(sample))}

    def _frames(self, path: str, times_s: np.ndarray) -> np.ndarray:
        decoder = Decoder(path, seek_mode="approximate", dimension_order="NHWC")
        fps = decoder.metadata.average_fps
        found = decoder.get_frames_at(indices=[round(time_s * fps) for time_s in times_s.tolist()])
        if np.abs(found.pts_seconds.numpy() - times_s).max() > 0.1:
            raise ValueError(f"{path}: frames are off by more than 0.1 s")
        return found.data.numpy()


class DecordLike(Dataset):
    """A new decord reader for every camera of every sample, all time stamps asked for, as GR00T reads a step."""

    def __init__(self, recorded: Recorded):
        self._recorded = recorded

    def __len__(self) -> int:
        return len(self._recorded.episodes)

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        return {str(c): decord_frames(*one) for c, one in enumerate(self._recorded.wanted(sample))}


def decord_frames(path: str, times_s: np.ndarray) -> np.ndarray:
    assert decord is not None
    reader = decord.VideoReader(path)
    shown_s = reader.get_frame_timestamp(range(len(reader)))[:, :1]
    indices = np.abs(shown_s - times_s).argmin(axis=0)
    return reader.get_batch(indices).asnumpy()


class DreamZeroLike(IterableDataset):
    """Shards decoded whole by decord in one background thread while a tenth of the last one's steps is shown.

    A shard is an episode: DreamZero's are about 10,000 steps of many, with as many samples for each decoded frame.
    """

    def __init__(self, recorded: Recorded, seed: int = 0):
        self._recorded, self._seed = recorded, seed

    @property
    def shard_samples(self) -> int:
        """Samples shown of a shard, in whole batches."""
        steps = len(self._recorded.episodes) / len(np.unique(self._recorded.episodes))
        return max(1, round(SHARD_SHARE * steps / BATCH_SIZE)) * BATCH_SIZE

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(self._seed)
        recorded = self._recorded
        episodes = np.unique(recorded.episodes)
        with ThreadPoolExecutor(1) as thread:
            following = int(rng.choice(episodes))
            job = thread.submit(self._decode, following)
            while True:
                episode, shard = following, job.result()
                following = int(rng.choice(episodes))
                job = thread.submit(self._decode, following)
                steps = np.flatnonzero(recorded.episodes == episode)
                for sample in rng.permutation(steps)[: self.shard_samples]:
                    rows = recorded.first_rows[sample] + recorded.offsets
                    yield {str(camera): frames[rows] for camera, frames in enumerate(shard)}

    def _decode(self, episode: int) -> list[np.ndarray]:
        both = zip(self._recorded.paths[episode], self._recorded.times_s[episode], strict=True)
        return [np.concatenate([decord_frames(path, times_s)]) for path, times_s in both]


class InOrder(Sampler[int]):
    """Samples in a given endless order."""

    def __init__(self, draw: Callable[[int], int]):
        self._draw = draw

    def __iter__(self) -> Iterator[int]:
        position = 0
        while True:
            yield self._draw(position)
            position += 1


def batches(dataset: Dataset, draw: Callable[[int], int]) -> Iterator[Any]:
    """Read a dataset as its users do: forked workers that stay and read ahead."""
    sharded = isinstance(dataset, IterableDataset)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    loader = DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        sampler=None if sharded else InOrder(draw),
        num_workers=1 if sharded else NUM_WORKERS,
        prefetch_factor=PREFETCH,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    return iter(loader)


def bare_batches(recorded: Recorded, draw: Callable[[int], int]) -> Iterator[list[list[np.ndarray]]]:
    """Decode the same frames with open exact decoders and do nothing else: the least any such loader can cost."""
    decoders: dict[str, Any] = {}
    position = 0
    while True:
        batch = []
        for _ in range(BATCH_SIZE):
            batch.append(bare_sample(recorded, draw(position), decoders))
            position += 1
        yield batch


def bare_sample(recorded: Recorded, sample: int, decoders: dict[str, Any]) -> list[np.ndarray]:
    frames = []
    for path, times_s in recorded.wanted(sample):
        if path not in decoders:
            decoder = Decoder(path, seek_mode="exact", dimension_order="NHWC", num_ffmpeg_threads=1)
            decoders[path] = decoder, read_frame_index(Path(path))
        decoder, index = decoders[path]
        frames.append(decoder.get_frames_at(indices=index.nearest(times_s)[0].tolist()).data.numpy())
    return frames
