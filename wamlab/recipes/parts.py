"""The datasets of a run, each with its readers, and their clips as one source."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wamlab.data.clips import ClipReader, split_episodes
from wamlab.data.frame_source import FrameSource
from wamlab.data.frame_store import FrameStore
from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.mixture import mix
from wamlab.data.reading import ClipSource
from wamlab.data.robot import RobotConfig, check_robot
from wamlab.errors import InputError
from wamlab.recipes.config import Recipe


@dataclass(frozen=True)
class Part:
    """One dataset of a run: where its frames come from, its training episodes and its held-out ones."""

    dataset: RobotDataset
    frames: FrameSource  # the dataset's videos, or a store of decoded frames before them
    training: ClipReader
    held_out: ClipReader


def open_parts(recipe: Recipe) -> tuple[Part, ...]:
    """Open all datasets of a recipe; memory for decoded frames goes by their shares of the samples."""
    data = recipe.data
    roots = data.roots or (data.root,)
    robots = data.robots or (recipe.robot,) * len(roots)
    if len(robots) != len(roots):
        raise InputError(f"there are {len(robots)} robots and one dataset: give data.roots, a dataset for each")
    datasets = [open_dataset(root, backend=data.backend) for root in roots]
    for dataset, robot in zip(datasets, robots, strict=True):
        check_robot(robot, dataset, recipe.window, patch_px=recipe.patch_px)
    shares = np.array(data.weights or [float(dataset.lengths.sum()) ** data.balance for dataset in datasets])
    rooms_gib = (data.cache_gib * shares / shares.sum()).tolist()
    if not data.held_out_fraction:
        warnings.warn("no episode is held out: evaluations measure the training episodes", stacklevel=2)
    return tuple(_open_part(recipe, *part) for part in zip(datasets, robots, rooms_gib, strict=True))


def _open_part(recipe: Recipe, dataset: RobotDataset, robot: RobotConfig, room_gib: float) -> Part:
    data, frames = recipe.data, dataset
    if data.store_gib:
        cameras = [dataset.camera_named(camera) or camera for camera in robot.cameras]
        frames = FrameStore(dataset, data.store, int(data.store_gib * 2**30), kind=data.store_kind, cameras=cameras)
    train, held_out = split_episodes(dataset, data.held_out_fraction, recipe.train.seed)
    training = ClipReader(
        dataset,
        robot,
        recipe.window,
        episodes=train,
        is_training=True,
        source=frames,
        cache_gib=room_gib,
        num_variants=recipe.features.num_variants,
        has_stored_views=data.augment_on == "device",
    )
    evaluation = ClipReader(
        dataset,
        robot,
        recipe.window,
        episodes=held_out or train,
        is_training=False,
        source=frames,
        normalizers=training.normalizers,
    )
    return Part(dataset, frames, training, evaluation)


def mixed(readers: Sequence[ClipReader], recipe: Recipe) -> ClipSource:
    """Return the clips of all readers by the recipe's weights; a single reader as it is."""
    if len(readers) == 1:
        return readers[0]
    return mix(readers, recipe.data.weights or None, balance=recipe.data.balance)


def fingerprint_of(readers: Sequence[ClipReader], recipe: Recipe) -> str:
    """Hash all that decides the clips of a run."""
    if len(readers) == 1:
        return readers[0].fingerprint()
    data = recipe.data
    told = [*(reader.fingerprint() for reader in readers), str(data.weights or data.balance)]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()
