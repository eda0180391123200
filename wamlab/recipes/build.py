"""Turn a recipe into the parts of a run: data, encoder, network, and the examples it trains on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.optim import Optimizer

from wamlab.codec.clips import ClipEncoder
from wamlab.codec.features import FeatureStore, StoredEncoder
from wamlab.codec.plain import PlainClipEncoder
from wamlab.codec.pretrained import make_image_encoder, make_text_encoder, make_video_codec
from wamlab.data.apart import ApartLoader, load_clips_apart
from wamlab.data.clips import ClipReader
from wamlab.data.loader import ClipLoader, load_clips
from wamlab.data.reading import ClipSource
from wamlab.errors import InputError
from wamlab.flow import flow_loss
from wamlab.model.wam import WorldActionModel
from wamlab.recipes.augment import AugmentingEncoder
from wamlab.recipes.config import Recipe
from wamlab.recipes.features import StoredClips, check_complete, list_variants
from wamlab.recipes.loading import LoaderChoice, choose_loader
from wamlab.recipes.network import build_net, is_shared
from wamlab.recipes.parts import Part, mixed, open_parts
from wamlab.speed.clock import Clock
from wamlab.speed.graph import captured
from wamlab.speed.guard import Guard
from wamlab.speed.ranks import Ranks, read_ranks
from wamlab.speed.step_rule import StepRule
from wamlab.train import Ema, make_optimizer, noised_examples, train
from wamlab.types import Clip, Encode, FlowExample, StepRecord


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
    def ranks(self) -> Ranks:
        """Return this process's place among those that train together, as torchrun says it."""
        return read_ranks()

    @cached_property
    def device(self) -> torch.device:
        device = choose_device(self.recipe.device)
        if device.type == "cuda" and device.index is None and self.ranks.world_size > 1:
            return choose_device(f"cuda:{self.ranks.local_rank}")
        return device

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Return the datasets with their readers; one unless the recipe mixes several."""
        _ = self.device  # a wrong one shows before any data is read
        return open_parts(self.recipe)

    @cached_property
    def readers(self) -> tuple[ClipReader, ClipReader]:
        """Return readers of the training episodes and of the held-out ones of a single dataset."""
        part, *others = self.parts
        if others:
            raise InputError(
                f"features are stored of one dataset and this run mixes {len(self.parts)}: give features.mode online"
            )
        return part.training, part.held_out

    @cached_property
    def held_out(self) -> ClipSource:
        """Return the held-out clips, mixed as the training clips are."""
        single = len(self.recipe.data.roots) < 2
        return self.readers[1] if single else mixed([part.held_out for part in self.parts], self.recipe)

    @cached_property
    def encoder(self) -> ClipEncoder:
        recipe, speed = self.recipe, self.recipe.speed
        kind = ClipEncoder
        if speed.has_dead_encode or not speed.is_encode_batched:
            kind = partial(PlainClipEncoder, is_batched=speed.is_encode_batched, has_dead_encode=speed.has_dead_encode)
        return kind(
            make_video_codec(recipe.video, self.device, is_compiled=speed.has_compiled_encoders),
            make_text_encoder(recipe.text, self.device, has_cache=speed.has_text_cache),
            make_image_encoder(recipe.image, self.device),
            device=self.device,
            condition=recipe.condition,
            has_relative_video=recipe.has_relative_video,
        )

    @cached_property
    def store(self) -> FeatureStore:
        """Return the features of the training windows, which a run reads unless ``features.mode`` is "online"."""
        features, transform = self.recipe.features, self.readers[0].frames_fingerprint()
        return FeatureStore(features.root, self.encoder, transform, shard_mib=features.shard_mib)

    @cached_property
    def source(self) -> tuple[ClipSource, Encode]:
        """Return the training clips and what encodes them; refuse a store that lacks some if all must be in it."""
        if (mode := self.recipe.features.mode) == "online":
            is_on_device = self.recipe.data.augment_on == "device" and self.recipe.robot.is_augmenting
            encode = AugmentingEncoder(self.encoder, self.recipe.robot) if is_on_device else self.encoder
            return mixed([part.training for part in self.parts], self.recipe), encode
        reader = self.readers[0]
        list_variants(self.recipe, reader)  # refuses a recipe that draws without end
        if mode == "cached":
            check_complete(self.recipe, reader, self.store)
        return StoredClips(reader, self.store), StoredEncoder(self.store)

    @cached_property
    def net(self) -> WorldActionModel:
        """Build the network with its tricks, this process's share of it if there are others."""
        return build_net(self.recipe, self.device, self.ranks)

    @property
    def is_shared(self) -> bool:
        return is_shared(self.recipe, self.ranks)

    @property
    def wrap(self) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
        """Return what ``train`` wraps forward and backward in: a CUDA graph, if the recipe asks for one."""
        if not self.recipe.speed.has_graph:
            return None
        return partial(captured, device=self.device, watched=dict(self.net.named_parameters()))

    def optimizer(self) -> Optimizer:
        """Return a new optimiser of the network."""
        return make_optimizer(self.net, self.recipe.train, is_fused=self.recipe.speed.is_optimizer_fused)

    def steps(
        self,
        optimizer: Optimizer,
        examples: Generator[FlowExample, None, None],
        clock: Clock,
        *,
        first_step: int = 0,
        ema: Ema | None = None,
        guard: Guard | None = None,
        rule: StepRule | None = None,
    ) -> Generator[StepRecord, None, None]:
        """Take the steps after ``first_step`` with every trick of the recipe, and end the examples."""
        recipe, wrap = self.recipe, self.wrap
        if guard is not None and wrap is not None:
            wrap = guard.forgetting(wrap)
        if recipe.speed.has_compiled_optimizer:
            from wamlab.speed.compile import compiled_step  # the compiler takes a second to import

            vars(optimizer)["step"] = compiled_step(optimizer)
        try:
            yield from train(
                partial(flow_loss, self.net, config=recipe.noise),
                examples,
                optimizer,
                recipe.train,
                first_step=first_step,
                ema=ema,
                clock=clock,
                ranks=self.ranks,
                set_sync=getattr(self.net, "set_requires_gradient_sync", None),  # of a shared network
                wrap=wrap,
                guard=guard,
                rule=rule,
            )
        finally:
            examples.close()

    def clips(
        self, *, first_step: int = 0, tell: Callable[[LoaderChoice], Any] | None = None
    ) -> ClipLoader | ApartLoader:
        """Return the stream of training clips after ``first_step`` finished steps; ``tell`` hears how they are read."""
        recipe, data = self.recipe, self.recipe.data
        options: dict[str, Any] = {
            "batch_size": recipe.train.batch_size,
            "seed": recipe.train.seed,
            "start_batch": first_step,
            "num_threads": data.num_threads,
            "pool": data.pool,
            "on_error": data.on_error,
            "max_skipped": data.max_skipped,
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
        }
        clips, choice = choose_loader(
            recipe,
            recipe.train.num_steps - first_step,
            partial(load_clips, self.source[0], is_pinned=self.device.type == "cuda", **options),
            partial(load_clips_apart, self.source[0], **options),
        )
        if tell is not None:
            tell(choice)
        return clips

    def hit_rates(self, clips: ClipLoader | ApartLoader) -> dict[str, float]:
        """Return the share of the frames asked for that each cache had; of this process, so none of a helper's."""
        if isinstance(clips, ApartLoader):
            return {}
        caches: dict[str, list[Any]] = {
            "memory": [part.training.cache for part in self.parts],
            "disk": [part.frames for part in self.parts],
        }
        reports = {name: [c.report() for c in kind if hasattr(c, "report")] for name, kind in caches.items()}
        asked = {name: sum(report.hits + report.misses for report in kind) for name, kind in reports.items()}
        return {name: sum(r.hits for r in kind) / asked[name] for name, kind in reports.items() if asked[name]}

    def examples(
        self, clock: Clock, *, first_step: int = 0, clips: ClipLoader | ApartLoader | None = None
    ) -> Generator[FlowExample, None, None]:
        """Yield the noised training batches after ``first_step`` finished steps, timing data and encoding."""
        recipe, (_, encode) = self.recipe, self.source
        clips = self.clips(first_step=first_step) if clips is None else clips
        batches = map(clock.timed("encode", encode), self._noted(clock.waited("data", clips)))
        try:
            yield from noised_examples(
                batches, seed=recipe.train.seed, first_step=first_step, config=recipe.noise, ranks=self.ranks
            )
        finally:
            clips.close()  # ends the reading threads
            if recipe.features.mode == "cached-if-present":
                self.store.flush()

    @cached_property
    def newest_windows(self) -> list[tuple[int, int]]:
        """Return the episode and first row of each clip of the newest batch, for messages."""
        return []

    def _noted(self, batches: Iterable[Sequence[Clip]]) -> Iterator[Sequence[Clip]]:
        for clips in batches:
            self.newest_windows[:] = [(clip.episode, clip.first_row) for clip in clips]
            yield clips
