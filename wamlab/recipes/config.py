"""Recipes: functions that return the whole frozen configuration of a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from tyro.conf import Suppress

from wamlab.codec.clips import check_condition
from wamlab.codec.pretrained import ClipConfig, Umt5Config, WanVaeConfig
from wamlab.codec.text import HashTextConfig
from wamlab.codec.video import DctConfig
from wamlab.data.robot import RobotConfig
from wamlab.data.windows import WindowConfig
from wamlab.errors import InputError, check_range
from wamlab.flow import NoiseConfig
from wamlab.model import presets
from wamlab.model.sampler import SamplerConfig
from wamlab.model.wam import PATCH_PX, WAMConfig
from wamlab.speed.config import SpeedConfig
from wamlab.train import TrainConfig


@dataclass(frozen=True)
class DataConfig:
    """Which datasets, how they are split and how they are read."""

    root: Path = Path("datasets/tabletop")
    roots: tuple[Path, ...] = ()  # several datasets, mixed, in place of root
    weights: tuple[float, ...] = ()  # of each of roots: its share of the samples; none: by its length and balance
    balance: float = 1.0  # 1 mixes datasets by their lengths, 0 equally; between these by a power of the length
    robots: Annotated[tuple[RobotConfig, ...], Suppress] = ()  # of each of roots; none: the recipe's robot for all
    held_out_fraction: float = 0.1  # of the episodes, never trained on; 0 evaluates on the training episodes
    backend: str = "pyav"  # "pyav", "torchcodec" or "decord"
    num_threads: int | None = 1  # that read clips ahead; 0 reads in the training thread; None adds some while it waits
    is_apart: bool | None = None  # read in a helper process, which leaves training's interpreter alone; None measures
    pool: int = 1  # windows of an episode decoded at once and spread over as many batches; 1 is an exact shuffle
    on_error: str = "raise"  # "skip" replaces clips that cannot be read, counts and lists them
    max_skipped: int = 100  # samples; more end the run
    augment_on: str = "loader"  # "device" crops and recolours whole batches on a GPU, within 3 of 255; slow on a CPU
    cache_gib: float = 1.0  # decoded frames kept in memory; 0 decodes every clip anew
    store_gib: float = 0.0  # decoded frames kept on disk, filled in passing
    store: Path = Path("frames")  # folder of these
    store_kind: str = "raw"  # "mjpeg" takes a tenth of the room and changes pixels a little; "auto" measures

    def __post_init__(self) -> None:
        if self.num_threads is not None:
            check_range("data", self, 0, 64, "num_threads")
        check_range("data", self, 1, 4096, "pool")
        check_range("data", self, 0, 1, "balance")
        for name, values in (("weights", self.weights), ("robots", self.robots)):
            if values and len(values) != len(self.roots) and (self.roots or name == "weights"):
                raise InputError(
                    f"data.{name} has {len(values)} entries for {len(self.roots)} of data.roots: give each"
                )
        if not all(0 < weight < math.inf for weight in self.weights):
            raise InputError(f"data.weights are {self.weights}: give numbers above 0")
        check_range("data", self, 0, math.inf, "max_skipped")
        check_range("data", self, 0, 1e6, "cache_gib", "store_gib")
        if self.augment_on not in ("loader", "device"):
            raise InputError(f'data.augment_on is "{self.augment_on}": give loader or device')
        if self.on_error not in ("raise", "skip"):
            raise InputError(f'data.on_error is "{self.on_error}": give raise or skip')


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured on held-out episodes, and how often."""

    every: int = 300  # steps; also at step 0 and at the end
    num_clips: int = 32
    noise_levels: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)

    def __post_init__(self) -> None:
        check_range("evaluation", self, 1, math.inf, "every", "num_clips")
        if not all(0 < level <= 1 for level in self.noise_levels):
            raise InputError(f"evaluation.noise_levels are {self.noise_levels}: give numbers above 0 up to 1")


FEATURE_MODES = ("online", "cached", "cached-if-present")


@dataclass(frozen=True)
class FeatureConfig:
    """Whether frozen encoders run in training, or what they made before is read; the losses are the same."""

    mode: str = "online"  # "cached" reads all and needs `wamlab encode`; "cached-if-present" encodes and keeps the rest
    root: Path = Path("features")  # one folder serves many recipes and datasets
    num_variants: int = 0  # crops and colours of each window, in any mode; 0 draws anew each time: online only
    shard_mib: int | float = 64.0  # size of the files

    def __post_init__(self) -> None:
        if self.mode not in FEATURE_MODES:
            raise InputError(f'features.mode is "{self.mode}": give one of {", ".join(FEATURE_MODES)}')
        check_range("features", self, 0, 1_000_000, "num_variants")
        check_range("features", self, 1e-3, 1e6, "shard_mib")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run does."""

    name: str
    data: DataConfig = field(default_factory=DataConfig)
    robot: RobotConfig = field(default_factory=RobotConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    video: DctConfig | WanVaeConfig = field(default_factory=DctConfig)
    text: HashTextConfig | Umt5Config = field(default_factory=HashTextConfig)
    image: ClipConfig | None = None  # encodes first frames for networks with model.has_image
    model: WAMConfig = field(default_factory=presets.tiny)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sampler: SamplerConfig = field(default_factory=lambda: SamplerConfig(num_steps=2))  # more are sharper, not closer
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    condition: str = "none"  # joined to the latents' channels: "grey" (published image-to-video) or "repeat"
    has_relative_video: bool = False  # predict the change since the repeated first frame
    start: Path | None = None  # published weights to begin from, in any layout of model/weights.py; None: the seed
    features: FeatureConfig = field(default_factory=FeatureConfig)
    checkpoint_every: int = 300  # steps; also at the end
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto takes CUDA if there is any

    def __post_init__(self) -> None:
        check_condition(self.condition, has_relative_video=self.has_relative_video)
        model, robot, window = self.model, self.robot, self.window
        pairs = [
            ("model.latent_channels", model.latent_channels, "video.channels", self.video.channels),
            ("model.text_dim", model.text_dim, "text.dim", self.text.dim),
            ("model.text_len", model.text_len, "text.max_tokens", self.text.max_tokens),
            ("model.max_action_dim", model.max_action_dim, "robot.max_action_dim", robot.max_action_dim),
            ("model.max_state_dim", model.max_state_dim, "robot.max_state_dim", robot.max_state_dim),
            ("model.latents_per_block", model.latents_per_block, "window.latents_per_block", window.latents_per_block),
            ("model.actions_per_block", model.actions_per_block, "window.actions_per_block", window.actions_per_block),
            ("model.has_image", model.has_image, "image is not None", self.image is not None),
            ("model.has_condition", model.has_condition, 'condition != "none"', self.condition != "none"),
            ("model.max_blocks", model.max_blocks, "window.max_blocks", window.max_blocks),
        ]
        if self.image is not None:
            pairs.append(("model.image_dim", model.image_dim, "image.dim", self.image.dim))
        differing = [f"{a} {x} and {b} {y}" for a, x, b, y in pairs if x != y]
        wrong = [f"{'; '.join(differing)} differ: give both the same value"] if differing else []
        wrong += [
            f"robot.{name} is {getattr(robot, name)}, not a multiple of a patch's {self.patch_px} px: "
            "change robot.view_height_px or robot.view_width_px"
            for name in ("canvas_height_px", "canvas_width_px")
            if getattr(robot, name) % self.patch_px
        ]
        if self.data.augment_on == "device" and (self.features.mode != "online" or self.data.robots):
            wrong.append('data.augment_on "device" needs features.mode online and one robot: give loader')
        wrong += [
            f"data.robots {number} has {field} {getattr(other, field)}, robot {getattr(robot, field)}: "
            "clips of one batch need the same"
            for number, other in enumerate(self.data.robots)
            for field in ("canvas_height_px", "canvas_width_px", "max_action_dim", "max_state_dim")
            if getattr(other, field) != getattr(robot, field)
        ]
        if wrong:
            raise InputError(f"recipe {self.name}: {'; '.join(wrong)}")
        check_range("recipe", self, 1, math.inf, "checkpoint_every")

    @property
    def patch_px(self) -> int:
        """Return the side of what becomes one token."""
        return PATCH_PX * self.video.spatial_stride


def small_model(**changes: Any) -> WAMConfig:
    """Return a network that learns from scratch: preconditioned, so that its width need not carry a patch's noise.

    Without it 64 latent channels at width 128 left the video loss above half of where it began.
    """
    return presets.tiny(
        dim=192,
        heads=6,
        ffn_dim=576,
        has_condition=True,
        position_scale=1.0,
        video_spread=1.0,
        drops_noisy_first=True,
        latents_per_block=1,
        max_blocks=1,
        **changes,
    )


def tiny() -> Recipe:
    """Return the demo: two small tabletop cameras, 2.7 M parameters, minutes on a laptop's CPU."""
    return Recipe(
        name="tiny",
        robot=RobotConfig(
            cameras=("top", "wrist"),
            layout="row",
            view_height_px=64,
            view_width_px=64,
            crop_fraction=1.0,
            has_color_jitter=False,
            max_action_dim=4,
            max_state_dim=5,
        ),
        window=WindowConfig(frame_stride=1, latents_per_block=1, actions_per_block=4, max_blocks=1),
        model=small_model(actions_per_block=4, max_action_dim=4, max_state_dim=5),
        noise=NoiseConfig(weighting="flat", action_weight=5.0),
        condition="repeat",
        has_relative_video=True,
        train=TrainConfig(
            num_steps=1300,
            batch_size=16,
            learning_rate=3e-3,
            beta1=0.9,
            beta2=0.99,
            ema_decay=0.995,
            optimizer="muon",
            has_bf16=False,  # at width 192 its casts cost more than they save: 69 against 88 samples/s (2026-12-02)
        ),
    )


def tiny_long() -> Recipe:
    """Return ``tiny`` for an hour on two CPU cores: ten times the steps; give it 6,000 episodes."""
    recipe = tiny()
    return replace(
        recipe,
        name="tiny_long",
        train=replace(recipe.train, num_steps=12_500, ema_decay=0.999),
        evaluation=replace(recipe.evaluation, every=1000, num_clips=128),
        checkpoint_every=1000,
    )


def tiny_video() -> Recipe:
    """Return a small run on video alone: three DROID-like cameras, no states, no actions."""
    return Recipe(
        name="tiny_video",
        data=DataConfig(root=Path("datasets/droid_clip"), held_out_fraction=0.0),
        robot=RobotConfig(
            cameras=("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left"),
            layout="droid",
            view_height_px=48,
            view_width_px=80,
            has_color_jitter=False,
            state_column=None,
            action_column=None,
            max_action_dim=4,
            max_state_dim=4,
        ),
        window=WindowConfig(frame_stride=3, latents_per_block=1, actions_per_block=12, max_blocks=1),
        model=small_model(actions_per_block=12, max_action_dim=4, max_state_dim=4),
        condition="repeat",
        has_relative_video=True,
        train=TrainConfig(num_steps=300, batch_size=8, learning_rate=2e-3, beta1=0.9, ema_decay=0.99, has_bf16=False),
        evaluation=EvaluationConfig(every=100, num_clips=16),
    )


def recipe_from_dict(values: Mapping[str, Any]) -> Recipe:
    """Rebuild the recipe that a run folder's ``config.json`` holds."""
    return _filled(Recipe, values, "config")


def _filled(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """Make a dataclass from a mapping of its fields, giving each value its field's type; say which ones it lacks."""
    known = get_type_hints(kind)
    if odd := sorted(values.keys() - known.keys()):
        raise InputError(
            f"{where} has the fields {', '.join(odd)}, which this version lacks: use the one that wrote it"
        )
    if missing := sorted(known.keys() - values.keys()):
        needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
        if needed & set(missing):
            raise InputError(f"{where} lacks the fields {', '.join(sorted(needed & set(missing)))}")
        message = f"{where} is of an older version and lacks {', '.join(missing)}: taken as by default"
        warnings.warn(message, stacklevel=4)
    return kind(**{name: _typed(known[name], value, f"{where}.{name}") for name, value in values.items()})


def _typed(kind: Any, given: Any, where: str) -> Any:
    value: Any = given
    if isinstance(kind, UnionType):
        if given is None and NoneType in get_args(kind):
            return None
        kinds = [member for member in get_args(kind) if member is not NoneType]
        kinds = [member for member in kinds if _fits(member, value)] or kinds
        keys = {*value} if hasattr(value, "keys") else set()
        named = [k for k in kinds if is_dataclass(k) and keys <= {f.name for f in fields(k)}]
        kind = min(named, key=lambda k: len(fields(k)), default=kinds[0])  # the one that lacks least
    if not _fits(kind, value):
        raise InputError(
            f"{where} is {str(value)[:40]!r}, no {getattr(kind, '__name__', kind)}: restore it from a copy"
        )
    if is_dataclass(kind):
        return _filled(cast(type, kind), value, where)
    if get_origin(kind) is tuple:
        return tuple(_typed(get_args(kind)[0], item, where) for item in value)
    if kind is float:
        return math.inf if value is None else float(value)
    return Path(value) if kind is Path else value


def _fits(kind: Any, value: Any) -> bool:
    """Say whether a value of JSON can be of a field's type; of types that no field here has, it can."""
    if is_dataclass(kind):
        return isinstance(value, Mapping)
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple)
    if kind is float:
        return value is None or (type(value) in (int, float) and abs(value) < 1e300)  # JSON has no infinity
    if kind is Path:
        return isinstance(value, str | Path)
    return kind not in (bool, int, str) or type(value) is kind
