"""Turn a recipe into the parts of a run: data, encoder, network, and the examples it trains on."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from wamlab.codec.clips import ClipEncoder
from wamlab.codec.features import FeatureStore, StoredEncoder
from wamlab.codec.pretrained import make_image_encoder, make_text_encoder, make_video_codec
from wamlab.data.apart import ApartLoader, load_clips_apart
from wamlab.data.clips import ClipReader, split_episodes
from wamlab.data.frame_source import FrameSource
from wamlab.data.frame_store import FrameStore
from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.loader import ClipLoader, load_clips
from wamlab.data.reading import ClipSource
from wamlab.data.robot import check_robot
from wamlab.errors import InputError
from wamlab.model.lora import freeze, narrowed, with_lora
from wamlab.model.wam import WorldActionModel
from wamlab.model.weights import load_pretrained
from wamlab.recipes.config import Recipe
from wamlab.recipes.features import StoredClips, check_complete, list_variants
from wamlab.speed.clock import Clock
from wamlab.train import has_native_bf16, noised_examples, step_generator
from wamlab.types import Encode, FlowExample


def choose_device(name: str) -> torch.device:
    """Return the device a recipe names; "auto" takes CUDA if there is any."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f'there is no device "{name}": give auto, cpu or cuda') from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f'training on "{name}" is not supported: give auto, cpu or cuda')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f'this machine has {torch.cuda.device_count()} CUDA devices, so none is "{name}": give cpu')
    return device


@dataclass(frozen=True)
class Workbench:
    """The built parts of a recipe; each is made when it is first asked for."""

    recipe: Recipe

    @cached_property
    def device(self) -> torch.device:
        return choose_device(self.recipe.device)

    @cached_property
    def dataset(self) -> RobotDataset:
        dataset = open_dataset(self.recipe.data.root, backend=self.recipe.data.backend)
        check_robot(self.recipe.robot, dataset, self.recipe.window, patch_px=self.recipe.patch_px)
        return dataset

    @cached_property
    def frames(self) -> FrameSource:
        """Return what frames are read from: the dataset's videos, or a store of decoded frames before them."""
        data = self.recipe.data
        if not data.store_gib:
            return self.dataset
        cameras = [self.dataset.camera_named(camera) or camera for camera in self.recipe.robot.cameras]
        return FrameStore(self.dataset, data.store, int(data.store_gib * 2**30), kind=data.store_kind, cameras=cameras)

    @cached_property
    def readers(self) -> tuple[ClipReader, ClipReader]:
        """Return readers of the training episodes and of the held-out ones."""
        recipe, _ = self.recipe, self.device  # a wrong device shows before any data is read
        train, held_out = split_episodes(self.dataset, recipe.data.held_out_fraction, recipe.train.seed)
        if not held_out:
            warnings.warn("no episode is held out: evaluations measure the training episodes", stacklevel=2)
        training = ClipReader(
            self.dataset,
            recipe.robot,
            recipe.window,
            episodes=train,
            is_training=True,
            source=self.frames,
            cache_gib=recipe.data.cache_gib,
            num_variants=recipe.features.num_variants,
        )
        evaluation = ClipReader(
            self.dataset,
            recipe.robot,
            recipe.window,
            episodes=held_out or train,
            is_training=False,
            source=self.frames,
            normalizers=training.normalizers,
        )
        return training, evaluation

    @cached_property
    def encoder(self) -> ClipEncoder:
        return ClipEncoder(
            make_video_codec(self.recipe.video, self.device),
            make_text_encoder(self.recipe.text, self.device),
            make_image_encoder(self.recipe.image, self.device),
            device=self.device,
            condition=self.recipe.condition,
            has_relative_video=self.recipe.has_relative_video,
        )

    @cached_property
    def store(self) -> FeatureStore:
        """Return the features of the training windows, which a run reads unless ``features.mode`` is "online"."""
        features, transform = self.recipe.features, self.readers[0].frames_fingerprint()
        return FeatureStore(features.root, self.encoder, transform, shard_mib=features.shard_mib)

    @cached_property
    def source(self) -> tuple[ClipSource, Encode]:
        """Return the training clips and what encodes them; refuse a store that lacks some if all must be in it."""
        reader, mode = self.readers[0], self.recipe.features.mode
        if mode == "online":
            return reader, self.encoder
        list_variants(self.recipe, reader)  # refuses a recipe that draws without end
        if mode == "cached":
            check_complete(self.recipe, reader, self.store)
        return StoredClips(reader, self.store), StoredEncoder(self.store)

    @cached_property
    def net(self) -> WorldActionModel:
        """Build the network: drawn from the seed or read from ``start``, then adapters, then frozen parameters."""
        recipe, train = self.recipe, self.recipe.train
        torch.manual_seed(train.seed)
        generator = step_generator(train.seed, 0)
        if recipe.start is None:
            net = WorldActionModel(recipe.model).to(self.device)
        else:
            with torch.device("meta"):
                net = WorldActionModel(recipe.model)
            if train.lora is not None and train.has_bf16 and has_native_bf16(self.device):
                narrowed(net, train.lora)  # before any memory is taken
            net.to_empty(device=self.device)
            load_pretrained(net, recipe.start, generator=generator)
        if train.lora is not None:
            with_lora(net, train.lora, generator)
        freeze(net, train.frozen)
        return net

    def clips(self, *, first_step: int = 0) -> ClipLoader | ApartLoader:
        """Return the stream of training clips after ``first_step`` finished steps."""
        recipe, data = self.recipe, self.recipe.data
        load = load_clips_apart if data.is_apart else load_clips
        return load(
            self.source[0],
            batch_size=recipe.train.batch_size,
            seed=recipe.train.seed,
            start_batch=first_step,
            num_threads=data.num_threads,
            pool=data.pool,
            on_error=data.on_error,
            max_skipped=data.max_skipped,
            is_pinned=self.device.type == "cuda" and not data.is_apart,
        )

    def hit_rates(self) -> dict[str, float]:
        """Return the share of the frames asked for that each cache had; of this process, so none of a helper's."""
        caches: dict[str, Any] = {}
        if not self.recipe.data.is_apart:
            caches = {"memory": self.readers[0].cache, "disk": self.frames}
        reports = {name: cache.report() for name, cache in caches.items() if hasattr(cache, "report")}
        return {name: report.hit_rate for name, report in reports.items() if report.hits + report.misses}

    def examples(
        self, clock: Clock, *, first_step: int = 0, clips: ClipLoader | ApartLoader | None = None
    ) -> Generator[FlowExample, None, None]:
        """Yield the noised training batches after ``first_step`` finished steps, timing data and encoding."""
        recipe, (_, encode) = self.recipe, self.source
        clips = self.clips(first_step=first_step) if clips is None else clips
        batches = map(clock.timed("encode", encode), clock.waited("data", clips))
        try:
            yield from noised_examples(batches, seed=recipe.train.seed, first_step=first_step, config=recipe.noise)
        finally:
            clips.close()  # ends the reading threads
            if recipe.features.mode == "cached-if-present":
                self.store.flush()
