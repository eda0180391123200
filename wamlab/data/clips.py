"""Clips of a dataset's episodes, each read when asked for and determined by its index and a seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from wamlab.data.check import camera_size
from wamlab.data.decode import WrongBuffer
from wamlab.data.eviction import NextUse
from wamlab.data.frame_cache import FrameCache
from wamlab.data.frame_source import FrameSource
from wamlab.data.frame_store import FrameStore
from wamlab.data.lerobot import RobotDataset
from wamlab.data.normalize import Normalizers, measure_normalizers, read_vectors
from wamlab.data.robot import RobotConfig, check_robot
from wamlab.data.views import AUGMENTATION, CENTRE, Augmentation, canvas_of, draw_augmentation, stored_row
from wamlab.data.windows import Window, WindowConfig, list_windows, window_at
from wamlab.errors import InputError
from wamlab.types import Clip

PIXEL_FIELDS = (  # of a RobotConfig
    "cameras", "layout", "view_height_px", "view_width_px", "crop_fraction", "has_color_jitter",
)  # fmt: skip
NewFrames = Callable[[tuple[int, ...]], np.ndarray]  # of a shape
EMPTY_FRAMES: NewFrames = partial(np.empty, dtype=np.uint8)


@dataclass(frozen=True)
class Decoded:
    """Frames of some rows of an episode by camera, as they are stored."""

    rows: Int[np.ndarray, " n"]  # rising
    frames: Mapping[str, UInt8[np.ndarray, "n _ _ 3"]]
    canvas: UInt8[np.ndarray, "n h w 3"] | None = None  # of the one window, decoded straight into it

    def of(self, rows: Int[np.ndarray, " t"]) -> Mapping[str, UInt8[np.ndarray, "t _ _ 3"]]:
        """Return the frames of some of the rows."""
        if np.array_equal(rows, self.rows):
            return self.frames
        places: np.ndarray | slice = np.searchsorted(self.rows, rows)
        steps = np.diff(places)
        if len(steps) and (steps == steps[0]).all():  # a view is enough
            places = slice(places[0], places[-1] + 1, steps[0])
        return {camera: frames[places] for camera, frames in self.frames.items()}


class ClipReader:
    """Every usable window of some episodes as a clip; safe to share by threads.

    The list of windows is made up front from the instructions of all episodes; frames, states and actions are
    read when a clip is.
    """

    def __init__(
        self,
        dataset: RobotDataset,
        robot: RobotConfig,
        window: WindowConfig,
        *,
        episodes: Sequence[int] | None = None,
        is_training: bool,
        normalizers: Normalizers | None = None,
        source: FrameSource | None = None,
        cache_gib: float = 0.0,
        num_variants: int = 0,
        has_stored_views: bool = False,
    ):
        """Take all episodes for None, and measure the whole dataset's normalisers unless given.

        In training, crops and colours vary with the seed: without end for ``num_variants`` 0, else among so many of
        each window. Frames come from ``source``, e.g. a ``FrameStore``; None decodes the dataset's videos.
        ``cache_gib`` of decoded frames stay in memory. With ``has_stored_views`` clips that would be augmented show
        their views side by side as they are stored, for ``augmented``.
        Raises InputError for a configuration the dataset does not fit, episodes it lacks and no usable window.
        """
        check_robot(robot, dataset, window)
        self.dataset, self.robot, self.window, self.is_training = dataset, robot, window, is_training
        self.episodes = tuple(range(dataset.num_episodes) if episodes is None else map(int, episodes))
        if outside := [e for e in self.episodes if not 0 <= e < dataset.num_episodes]:
            raise InputError(f"{dataset.root} has {dataset.num_episodes} episodes, none numbered {outside}")
        self._episode, self._first_row, self._num_blocks = self._list()
        self.normalizers = normalizers or measure_normalizers(dataset, robot, window.actions_per_block)
        self.num_variants = num_variants if is_training and robot.is_augmenting else 1
        self._has_stored_views = has_stored_views and is_training and robot.is_augmenting
        self._source: FrameSource = dataset if source is None else source
        self._cache_bytes = int(cache_gib * 2**30)
        self.forget_frames()
        size_px = robot.view_height_px, robot.view_width_px
        self._cameras = {camera: dataset.camera_named(camera) or "" for camera in robot.cameras}
        self._has_stored_size = isinstance(self._source, RobotDataset | FrameStore) and all(
            camera_size(dataset.features.get(name, {})) == size_px for name in self._cameras.values()
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"cache": None}  # a spawned process begins with an empty one

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.forget_frames()

    @property
    def num_samples(self) -> int:
        return len(self._episode)

    @property
    def num_unusable_episodes(self) -> int:
        """Count the episodes too short, or of too short tasks, for even one window."""
        return len(set(self.episodes)) - len(np.unique(self._episode))

    @property
    def windows(self) -> Int[np.ndarray, "n 3"]:
        """Return episode, first row and number of blocks of every sample; samples may share a window."""
        return np.stack([self._episode, self._first_row, self._num_blocks], axis=1)

    @property
    def instructions(self) -> list[str]:
        """Return every instruction that clips can have, once."""
        tasks: dict[str, None] = {}
        order = np.argsort(self._episode, kind="stable")
        episodes, starts = np.unique(self._episode[order], return_index=True)
        for episode, rows in zip(episodes.tolist(), np.split(self._first_row[order], starts[1:]), strict=True):
            labels = self.dataset.labels(episode)
            tasks |= dict.fromkeys(str(labels[row]) for row in rows)
        return [self.robot.instruct(task) for task in tasks]

    def augmentation_seed(self, seed: int) -> int:
        """Return what decides crop and colours of a clip read with ``seed``."""
        return seed % self.num_variants if self.num_variants else seed

    @property
    def sample_episodes(self) -> Int[np.ndarray, " n"]:
        """Return the episode of every sample."""
        return self._episode

    def read(self, sample_index: int, seed: int, *, has_frames: bool = True) -> Clip:
        """Read one clip; in training ``seed`` decides its crop and colours. Without frames no video is touched."""
        decoded = self.decode([sample_index]) if has_frames else None
        return self.clip(sample_index, seed, decoded)

    def decode(self, samples: Sequence[int], position: int | None = None, new: NewFrames | None = None) -> Decoded:
        """Decode the frames of several samples of one episode, each frame once.

        ``position`` is where the stream of samples stands, for caches that look ahead. Frames of a single sample that
        are tiled as they are stored go straight into the canvas that ``new`` gives.
        """
        places = [self._place(sample) for sample in samples]
        if len({episode for episode, *_ in places}) != 1:
            raise InputError(f"samples {list(samples)} are not of one episode")
        rows = np.unique(np.concatenate([window_at(first, n, self.window).frame_rows for _, first, n in places]))
        if new is not None and len(samples) == 1 and self._is_tiled_as_stored():
            try:
                return Decoded(rows, {}, self._decode_into(new, places[0][0], rows))
            except WrongBuffer:  # the dataset's description is wrong about its videos
                self._has_stored_size = False
        return self._decode(places[0][0], rows, position)

    def clip(
        self,
        sample_index: int,
        seed: int,
        decoded: Decoded | None,
        new: NewFrames = EMPTY_FRAMES,
    ) -> Clip:
        """Make a sample's clip of decoded frames, on a canvas from ``new``; without frames of None."""
        episode, first_row, num_blocks = self._place(sample_index)
        window = window_at(first_row, num_blocks, self.window)
        actions, action_mask, state = self._read_motion(episode, window)
        augmentation_seed = self.augmentation_seed(seed)
        canvas = decoded.canvas if decoded else None
        if decoded is not None and self._has_stored_views:
            canvas = stored_row(decoded.of(window.frame_rows), new)
        elif canvas is None:
            canvas = new(self._canvas_shape(len(window.frame_rows) if decoded else 0))
            if decoded is not None:
                augmentation = self._augmentation(episode, first_row, augmentation_seed)
                canvas_of(decoded.of(window.frame_rows), self.robot, augmentation, out=canvas)
        return Clip(
            frames=canvas,
            actions=actions,
            action_mask=action_mask,
            state=state,
            instruction=self.robot.instruct(self.dataset.labels(episode)[first_row]),
            episode=episode,
            first_row=first_row,
            augmentation_seed=augmentation_seed,
        )

    def read_frames(
        self, episode: int, first_row: int, num_blocks: int, augmentation_seeds: Sequence[int]
    ) -> list[UInt8[np.ndarray, "t h w 3"]]:
        """Return a window's canvases, decoded once and augmented with each seed."""
        frames = self._decode(episode, window_at(first_row, num_blocks, self.window).frame_rows).frames
        return [
            canvas_of(frames, self.robot, self._augmentation(episode, first_row, seed)) for seed in augmentation_seeds
        ]

    def _decode(self, episode: int, rows: np.ndarray, position: int | None = None) -> Decoded:
        frames = {
            camera: self.cache.frames(episode, name, rows, position=position) for camera, name in self._cameras.items()
        }
        return Decoded(rows, frames)

    def _decode_into(self, new: NewFrames, episode: int, rows: np.ndarray) -> np.ndarray:
        """Return the canvas of a window whose views are tiled in a row as they are stored."""
        canvas, width = new(self._canvas_shape(len(rows))), self.robot.view_width_px
        for column, name in enumerate(self._cameras.values()):
            strip = canvas[:, :, column * width : (column + 1) * width]
            self._source.frames(episode, name, rows, out=strip)  # pyright: ignore[reportCallIssue]
        return canvas

    def _is_tiled_as_stored(self) -> bool:
        """Say whether a canvas is nothing but decoded frames side by side."""
        is_changed = (self.is_training and self.robot.is_augmenting) or self.robot.crop_fraction < 1
        is_row = self.robot.layout in ("single", "row") and not self._cache_bytes
        return self._has_stored_size and is_row and not is_changed

    def _canvas_shape(self, num_frames: int) -> tuple[int, ...]:
        return num_frames, self.robot.canvas_height_px, self.robot.canvas_width_px, 3

    def _place(self, sample: int) -> tuple[int, int, int]:
        """Return episode, first row and number of blocks of a sample."""
        if not 0 <= sample < self.num_samples:
            raise InputError(f"there are {self.num_samples} samples, got index {sample}")
        return int(self._episode[sample]), int(self._first_row[sample]), int(self._num_blocks[sample])

    def forget_frames(self) -> None:
        """Make room for the frames of other episodes in memory."""
        self.cache = FrameCache(self._source, self._cache_bytes)

    def follow(self, next_use: NextUse) -> None:
        """Keep in memory what a stream of samples needs soonest."""
        self.cache.follow(next_use)

    def frames_fingerprint(self) -> str:
        """Hash all that decides a window's pixels besides its place and augmentation seed."""
        robot, window = asdict(self.robot), asdict(self.window)
        settings = {
            "dataset": self.dataset.fingerprint(),
            "robot": {name: robot[name] for name in PIXEL_FIELDS},
            "window": {name: window[name] for name in ("frame_stride", "latents_per_block")},
            "augmentation": AUGMENTATION if self.is_training and self.robot.is_augmenting else "none",
        }
        if pixels := getattr(self._source, "pixels", ""):  # frames are not as they were decoded
            settings["pixels"] = pixels
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def _augmentation(self, episode: int, first_row: int, seed: int) -> Augmentation:
        if not self.is_training:
            return CENTRE
        return augmentation_at(self.robot, seed, episode, first_row)

    def fingerprint(self) -> str:
        """Hash all that decides the clips, so that stored features notice a change."""
        settings = {
            "dataset": self.dataset.fingerprint(),
            "robot": asdict(self.robot),
            "window": asdict(self.window),
            "normalizers": self.normalizers.to_dict(),
            "episodes": self.episodes,
            "is_training": self.is_training,
            "num_variants": self.num_variants,
            "pixels": getattr(self._source, "pixels", ""),
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def _read_motion(self, episode: int, window: Window) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return normalised actions [a j], their mask [a j] and one state a block [s k]."""
        states = read_vectors(self.dataset, episode, self.robot.state_column)[window.anchors]
        ticks = window.anchors[:, None] + np.arange(self.window.actions_per_block)
        actions = read_vectors(self.dataset, episode, self.robot.action_column)[ticks]
        flat = self.normalizers.actions_to_model(actions, states).reshape(ticks.size, -1)
        mask = np.broadcast_to(self.normalizers.action_mask, flat.shape).copy()
        return flat, mask, self.normalizers.state_to_model(states)

    def _list(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return episode, first row and number of blocks of every sample."""
        lengths = self.dataset.lengths
        parts = [np.zeros((3, 0), np.int32)]
        of_one_task = lru_cache(maxsize=4096)(lambda length: list_windows(length, np.zeros(length), self.window))
        for episode in self.episodes:
            length = int(lengths[episode])
            if self.dataset.sole_instruction(episode) is not None:  # nothing is read
                first, num_blocks = of_one_task(length)
            else:
                first, num_blocks = list_windows(length, self.dataset.labels(episode), self.window)
            parts.append(np.stack([np.full_like(first, episode), first, num_blocks]).astype(np.int32))
        listed = np.concatenate(parts, axis=1)
        if not listed.size:
            longest = max((int(lengths[e]) for e in self.episodes), default=0)
            raise InputError(
                f"none of {len(self.episodes)} episodes of {self.dataset.root} holds a window of "
                f"{self.window.num_rows} rows under one instruction; the longest has {longest} rows"
            )
        return listed[0], listed[1], listed[2]


def augmentation_at(robot: RobotConfig, seed: int, episode: int, first_row: int) -> Augmentation:
    """Draw the augmentation of a training window, which depends on nothing but these numbers."""
    rng = np.random.default_rng([seed, episode, first_row])
    return draw_augmentation(rng, has_color_jitter=robot.has_color_jitter)


def split_episodes(
    dataset: RobotDataset, held_out_fraction: float, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide whole episodes into (for training, held out), each in order and neither empty.

    A fraction of 0 holds none out. Raises InputError for one outside 0..1 and for too few episodes.
    """
    num_episodes = dataset.num_episodes
    if not 0 <= held_out_fraction < 1:
        raise InputError(f"held_out_fraction is {held_out_fraction}, need 0 up to below 1")
    num_held_out = min(max(round(held_out_fraction * num_episodes), held_out_fraction > 0), num_episodes - 1)
    if held_out_fraction > 0 and num_held_out < 1:
        raise InputError(f"{dataset.root} has {num_episodes} episode: too few to hold any out")
    order = np.random.default_rng(seed).permutation(num_episodes).tolist()
    return tuple(sorted(order[num_held_out:])), tuple(sorted(order[:num_held_out]))
