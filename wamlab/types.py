"""The nouns of wamlab and the few function types that join its rooms.

Axes, one letter each, used in every shape annotation:

    b  batch                    t  latent frames (in video arrays before encoding: video frames)
    c  channels                 h, w  height and width
    a  action ticks             j  action dimensions
    s  state rows (1 a block)   k  state dimensions
    n  text tokens              d  text feature width

Clocks: ``frame`` (video), ``tick`` (robot control), ``noise_level`` (0 clean, 1 noise), ``step`` (optimiser).
Spaces: ``frames`` (uint8), ``video`` (float -1..1), ``latents`` (codec), ``tokens`` (network).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from wamlab.errors import InputError

__all__ = [
    "Batch", "Clip", "Encode", "Env", "Episode", "FlowExample", "InputError", "Loss", "LossTerms", "Net",
    "Noised", "Observation", "Policy", "Samples", "StepRecord", "Velocity",
]  # fmt: skip


@dataclass(frozen=True)
class Episode:
    """One recorded episode in robot units, as an environment plays it and a dataset stores it."""

    frames: Mapping[str, UInt8[np.ndarray, "t h w 3"]]  # camera name -> one RGB frame a tick
    state: Float[np.ndarray, "t k"]  # robot units, row i belongs to frame i
    action: Float[np.ndarray, "t j"]  # robot units, row i is commanded after frame i was seen
    instruction: str
    fps: float  # ticks per second
    signals: Mapping[str, np.ndarray] = field(default_factory=dict)  # further columns, e.g. "next.reward" [t]

    @property
    def num_ticks(self) -> int:
        return len(self.state)


@dataclass(frozen=True)
class Clip:
    """One training sample on the host: a window of an episode, tiled, normalised, not yet encoded."""

    frames: UInt8[np.ndarray, "t h w 3"]  # cameras tiled on one canvas; t = 1 + 4 * latents after the first
    actions: Float[np.ndarray, "a j"]  # -1..1 between the 1st and 99th percentile, padded with 0
    action_mask: Bool[np.ndarray, "a j"]  # False where a robot has no such joint or the episode no actions
    state: Float[np.ndarray, "s k"]  # normalised like actions, padded with 0
    instruction: str
    episode: int  # index of the episode in its dataset
    first_row: int  # row of the episode that the first frame shows
    augmentation_seed: int = 0  # with episode and first_row it decides the frames; a clip of stored features has none


S = TypeVar("S", bound="Samples")  # typing.Self would stop the runtime shape checker


class Samples:
    """Mix-in of nouns whose tensors all lead with the batch axis: slice them, move them, count them."""

    def __getitem__(self: S, samples: slice) -> S:
        """Return some of the samples, e.g. one micro-batch."""
        return self._map(lambda tensor: tensor[samples])

    def to(self: S, device: Any, *, is_non_blocking: bool = False) -> S:
        """Return the same samples on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=is_non_blocking))

    def __len__(self) -> int:
        first = getattr(self, fields(self)[0].name)  # pyright: ignore[reportArgumentType]
        return len(first)

    def _map(self: S, change: Callable[[Tensor], Tensor]) -> S:
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # pyright: ignore[reportArgumentType]
        changed = {
            name: value._map(change) if isinstance(value, Samples) else change(value)
            for name, value in values.items()
            if value is not None
        }
        return replace(self, **changed)  # pyright: ignore[reportArgumentType, reportReturnType]


@dataclass(frozen=True)
class Batch(Samples):
    """One training batch, already encoded, normalised and on the device."""

    latents: Float[Tensor, "b t c h w"]  # unit variance; frame 0 is the observation
    actions: Float[Tensor, "b a j"]  # -1..1 between the 1st and 99th percentile of the dataset
    action_mask: Bool[Tensor, "b a j"]  # False where a robot has no such joint
    state: Float[Tensor, "b s k"]  # one row per block, at the block's first tick
    text: Float[Tensor, "b n d"]  # instruction, encoded once per prompt, never per step; pads are zero
    condition: Float[Tensor, "b t e h w"] | None = None  # first-frame mask and latents (Wan image-to-video)
    image: Float[Tensor, "b m i"] | None = None  # image tokens of the first frame (CLIP)


@dataclass(frozen=True)
class Noised(Samples):
    """A batch's latents and actions after noise was added, with the noise level of each."""

    latents: Float[Tensor, "b t c h w"]
    actions: Float[Tensor, "b a j"]
    video_noise_level: Float[Tensor, "b t"]  # float64: the time embedding needs 1000 * level to 1e-5
    action_noise_level: Float[Tensor, "b a"]  # float64


@dataclass(frozen=True)
class Velocity(Samples):
    """What the network predicts: d(noised)/d(noise_level) = noise - clean."""

    video: Float[Tensor, "b t c h w"]
    actions: Float[Tensor, "b a j"]


@dataclass(frozen=True)
class FlowExample(Samples):
    """A batch with its noise already drawn: all that the flow loss needs, so that micro-batches add up."""

    batch: Batch
    seen: Noised
    target: Velocity


@dataclass(frozen=True)
class LossTerms:
    """A training loss and what it is made of; all but ``total`` are detached."""

    total: Float[Tensor, ""]
    video: Float[Tensor, ""]
    action: Float[Tensor, ""]


@dataclass(frozen=True)
class Observation:
    """What a policy sees before it acts, in robot units; the axes count parallel sessions."""

    frames: Mapping[str, UInt8[np.ndarray, "b h w 3"]]
    state: Float[np.ndarray, "b k"]
    instructions: Sequence[str]
    session: Int[np.ndarray, " b"]  # a new number means a new episode: forget history
    films: Sequence[Mapping[str, UInt8[np.ndarray, "_ _ _ 3"]]] = ()  # a session each: camera -> [t h w 3], what it
    # saw since its last observation, at even times, the newest frame last; none: the newest frame alone


@dataclass(frozen=True)
class StepRecord:
    """What one optimiser step did; written to ``metrics.jsonl`` as it is."""

    step: int  # 1 after the first update
    loss: float
    video_loss: float
    action_loss: float
    gradient_norm: float  # before clipping
    learning_rate: float
    num_samples: int
    step_s: float  # wall time of the whole step
    split_s: Mapping[str, float]  # wall time of its parts: data, encode, forward, backward, optimizer
    memory_gib: float  # peak device memory, or peak resident memory on a CPU
    num_skipped: int = 0  # steps since the run began that were left out by rule; this one too if its loss is one

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.step_s


@runtime_checkable
class Encode(Protocol):
    """Turns clips into a batch: video to latents, instructions to text features."""

    def __call__(self, clips: Sequence[Clip], /) -> Batch: ...


@runtime_checkable
class Env(Protocol):
    """A vector of environments that plays chunks of actions; one that has ended costs nothing more.

    Observations are mappings with "pixels" (camera -> uint8 [b h w 3]) and "agent_pos" (float32 [b k]).
    """

    num_envs: int

    @property
    def instructions(self) -> Sequence[str]: ...

    @property
    def is_done(self) -> Bool[np.ndarray, " b"]: ...

    @property
    def is_success(self) -> Bool[np.ndarray, " b"]: ...

    def reset(self, *, seed: Any = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]: ...

    def chunk_step(self, actions: Float[np.ndarray, "b a j"], /) -> tuple[Any, ...]: ...


Net = Callable[[Batch, Noised], Velocity]
Policy = Callable[[Observation], Float[np.ndarray, "b a j"]]  # one action chunk a session, robot units
Loss = Callable[[Any], LossTerms]  # of a FlowExample, or of whatever an RL objective needs; must be a mean
