"""Recipes: functions that return the whole frozen configuration of a run."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from wamlab.codec.text import HashTextConfig
from wamlab.codec.video import DctConfig
from wamlab.data.robot import RobotConfig
from wamlab.data.windows import WindowConfig
from wamlab.errors import InputError
from wamlab.flow import NoiseConfig
from wamlab.model import presets
from wamlab.model.wam import WAMConfig
from wamlab.train import TrainConfig


@dataclass(frozen=True)
class DataConfig:
    """Which dataset, how it is split and how it is read."""

    root: Path = Path("datasets/tabletop")
    held_out_fraction: float = 0.1  # of the episodes; never trained on
    backend: str = "pyav"  # "pyav", "torchcodec" or "decord"
    num_threads: int = 2  # that read clips ahead; 0 reads in the training thread
    cache_gib: float = 1.0  # decoded frames kept in memory; 0 decodes every clip anew


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured on held-out episodes, and how often."""

    every: int = 250  # steps; also at step 0 and at the end
    num_clips: int = 32
    noise_levels: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    num_sampler_steps: int = 8  # network evaluations per sampled block
    solver: str = "euler"  # or "unipc"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run does."""

    name: str
    data: DataConfig = field(default_factory=DataConfig)
    robot: RobotConfig = field(default_factory=RobotConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    video: DctConfig = field(default_factory=DctConfig)
    text: HashTextConfig = field(default_factory=HashTextConfig)
    model: WAMConfig = field(default_factory=presets.tiny)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint_every: int = 500  # steps; also at the end
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto takes CUDA if there is any

    def __post_init__(self) -> None:
        pairs = [
            ("model.latent_channels", self.model.latent_channels, "video.channels", self.video.channels),
            ("model.text_dim", self.model.text_dim, "text.dim", self.text.dim),
            ("model.text_len", self.model.text_len, "text.max_tokens", self.text.max_tokens),
            ("model.max_action_dim", self.model.max_action_dim, "robot.max_action_dim", self.robot.max_action_dim),
            ("model.max_state_dim", self.model.max_state_dim, "robot.max_state_dim", self.robot.max_state_dim),
        ] + [
            (f"model.{name}", getattr(self.model, name), f"window.{name}", getattr(self.window, name))
            for name in ("latents_per_block", "actions_per_block", "max_blocks")
        ]
        wrong = [f"{a} {x} and {b} {y}" for a, x, b, y in pairs if x != y]
        if wrong:
            raise InputError(f"recipe {self.name}: {'; '.join(wrong)} differ: give both the same value")
