"""Recipes of reinforcement learning after training: what is played, what is learnt from it, how far."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from wamlab.errors import InputError, check_range
from wamlab.recipes.rl_examples import RewardConfig
from wamlab.rl.advantage import DAPO, GroupConfig
from wamlab.rl.nft import NftConfig
from wamlab.rl.objectives import PolicyConfig
from wamlab.rl.play import PlayConfig
from wamlab.sim.scene import SPLITS
from wamlab.train import TrainConfig

OBJECTIVES = ("grpo", "nft")
ENVS = ("tabletop", "imagined")
JUDGES = ("head", "goal")
LEVELS = ("sampler", "training")


@dataclass(frozen=True)
class ExploreConfig:
    """How a chunk's denoising is made stochastic."""

    noise_scale: float = 0.1  # of the SDE; the last of 2 steps then has a standard deviation of 0.2, actions reach 1
    steps: tuple[int, ...] = ()  # of the sampler that are stochastic and learn; none named: all of them

    def __post_init__(self) -> None:
        check_range("explore", self, 0, 10, "noise_scale")


@dataclass(frozen=True)
class RlEvaluation:
    """How often and on how many held-out scenes success is measured, without exploration."""

    every: int = 10  # iterations; also before the first and after the last
    num_episodes: int = 200
    first_seed: int = 1_000_000  # recordings use small ones

    def __post_init__(self) -> None:
        check_range("evaluation", self, 1, math.inf, "every", "num_episodes")


@dataclass(frozen=True)
class ImagineConfig:
    """Where and how imagined episodes are played; only with ``env`` "imagined"."""

    data: Path | None = None  # recordings that keyframes, endings and the world's lessons come from; None: the start's
    judge: str = "head"  # of success: a small head learnt from recorded ends, or likeness to the "goal", the end itself
    threshold: float = 0.9  # score from which on an episode has succeeded
    max_chunks: int = 10  # of an episode
    keyframe_until: float = 0.5  # episodes begin within this share of a recording; 0 at its start
    num_world_steps: int = 800  # that teach the world to follow given actions; 0 takes the network as it is
    num_sampler_steps: int = 2  # of a predicted block
    num_head_episodes: int = 1500  # recordings that the head learns from
    num_head_steps: int = 600

    def __post_init__(self) -> None:
        check_range("imagine", self, 1, math.inf, "max_chunks", "num_sampler_steps", "num_head_steps")
        check_range("imagine", self, 2, math.inf, "num_head_episodes")
        check_range("imagine", self, 0, math.inf, "num_world_steps")
        check_range("imagine", self, 0, 0.99, "keyframe_until")
        check_range("imagine", self, 0.01, 1, "threshold")
        if self.judge not in JUDGES:
            raise InputError(f'imagine.judge is "{self.judge}": give one of {", ".join(JUDGES)}')


@dataclass(frozen=True)
class RlRecipe:
    """Post-training of a run's policy on the tabletop, strictly on-policy: every update learns from its own weights."""

    name: str
    objective: str = "grpo"  # a clipped policy gradient, or "nft": DiffusionNFT
    env: str = "tabletop"  # where episodes are played; "imagined": in the world model. Success is measured on tables
    imagine: ImagineConfig = field(default_factory=ImagineConfig)
    family: str = "reach"  # of tasks
    splits: tuple[str, ...] = ("seen",)  # of scenes, in turns; others than recordings show are there to be adapted to
    reward: RewardConfig = field(default_factory=RewardConfig)
    num_groups: int = 32  # scenes of an iteration
    num_epochs: int = 1  # updates from one iteration's episodes
    first_seed: int = 2_000_000  # of the first scene; every group has the next one
    num_sampler_steps: int = 2  # of the policy, in training and evaluation
    explore: ExploreConfig = field(default_factory=ExploreConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)  # of grpo
    nft: NftConfig = field(default_factory=NftConfig)
    nft_levels: str = "sampler"  # noise levels of nft: those that the sampler visits, or as in "training"
    num_draws: int = 1  # of noise for each chunk, with nft
    play: PlayConfig = field(default_factory=PlayConfig)
    is_stored: bool = True  # keep on disk what is played until a checkpoint has learnt from it: kills lose little
    is_batch_chosen: bool = False  # plan for as many episodes a call as clocks say is fastest: last bits then vary
    is_streamed: bool = True  # learn from groups as they finish; False waits for all and then cuts them as one batch
    is_exact: bool = False  # plan one episode at a time: bit for bit the same after a kill, else but for rounding
    train: TrainConfig = field(default_factory=TrainConfig)  # its steps are updates
    evaluation: RlEvaluation = field(default_factory=RlEvaluation)
    checkpoint_every: int = 10  # iterations

    def __post_init__(self) -> None:
        check_range("rl", self, 1, math.inf, "num_groups", "num_epochs", "num_draws", "num_sampler_steps")
        check_range("rl", self, 1, math.inf, "checkpoint_every")
        for name, known in {"env": ENVS, "objective": OBJECTIVES, "nft_levels": LEVELS}.items():
            if getattr(self, name) not in known:
                raise InputError(f'{name} is "{getattr(self, name)}": give one of {", ".join(known)}')
        if not self.splits or not set(self.splits) <= set(SPLITS):
            raise InputError(f"splits are {', '.join(self.splits) or 'none'}: give some of {', '.join(SPLITS)}")
        if self.train.num_steps % self.num_epochs:
            raise InputError(
                f"train.num_steps {self.train.num_steps} is no whole number of iterations of {self.num_epochs} updates"
            )
        if self.train.lora is not None:
            raise InputError(
                "train.lora is not supported by rl, which trains the start's own weights: freeze some instead"
            )
        if self.objective == "grpo" and not self.explore.noise_scale:
            raise InputError("explore.noise_scale is 0, so every ratio is 1 and nothing is learnt: give more")

    @property
    def parts_a_group(self) -> int:
        """Return in how many passes a group of a stream is learnt: together at least ``train.num_micro_batches``."""
        return -(-self.train.num_micro_batches // self.num_groups)

    @property
    def streamed_train(self) -> TrainConfig:
        """Return the loop's settings for streams: a micro-batch is a part of a group."""
        num_parts = self.num_groups * self.parts_a_group
        return replace(self.train, batch_size=num_parts, num_micro_batches=num_parts)

    @property
    def num_iterations(self) -> int:
        return self.train.num_steps // self.num_epochs


def rl_train(num_steps: int, learning_rate: float) -> TrainConfig:
    """Return an optimiser for small steps from trained weights."""
    return TrainConfig(
        num_steps=num_steps,
        batch_size=8,
        num_micro_batches=8,
        learning_rate=learning_rate,
        warmup_fraction=0.05,
        final_rate_fraction=0.2,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        has_bf16=False,
    )


def rl_tabletop_grpo() -> RlRecipe:
    """Return GRPO on the last denoising step of the actions: 8 s an iteration on a core for ``tiny_long``'s policy.

    Half of the scenes are as in its recordings, half have the object that is meant where recordings never have it. The
    reward is progress: of groups with success alone, 18 to 25 of 32 said nothing (2026-12-03).
    """
    return RlRecipe(
        name="rl_tabletop_grpo",
        splits=("seen", "unseen_position"),
        reward=RewardConfig("progress"),
        num_groups=8,
        explore=ExploreConfig(noise_scale=0.15, steps=(1,)),
        group=DAPO,
        play=PlayConfig(num_slots=64),
        train=rl_train(60, 3e-4),
    )


def rl_tabletop_nft() -> RlRecipe:
    """Return DiffusionNFT in the place of GRPO, all else alike: it learns at the last denoising step's noise level."""
    return replace(rl_tabletop_grpo(), name="rl_tabletop_nft", objective="nft", nft=NftConfig(most_advantage=2.0))


RL_RECIPES: dict[str, Callable[[], RlRecipe]] = {
    recipe.__name__: recipe for recipe in (rl_tabletop_grpo, rl_tabletop_nft)
}


def find_rl_recipe(name: str) -> RlRecipe:
    """Return a recipe by name; an unknown one raises with the nearest name."""
    if name not in RL_RECIPES:
        near = difflib.get_close_matches(name, RL_RECIPES, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(RL_RECIPES)}"
        raise InputError(f'there is no rl recipe "{name}": {hint}')
    return RL_RECIPES[name]()
