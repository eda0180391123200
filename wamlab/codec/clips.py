"""Clips to batches: video to latents, instructions to features, all samples at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from wamlab.errors import InputError
from wamlab.types import Batch, Clip

CONDITIONS = ("none", "grey", "repeat")  # what follows the first frame in the condition; published models: grey
MASK_CHANNELS = 4  # of the first-frame mask; the Wan image-to-video networks expect four


@runtime_checkable
class VideoCodec(Protocol):
    """What encodes and decodes video: the embedded codec, or a video autoencoder."""

    @property
    def fingerprint(self) -> str: ...

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]: ...

    def encode(self, frames: Tensor) -> Tensor: ...

    def encode_video(self, video: Tensor) -> Tensor: ...

    def decode(self, latents: Tensor) -> Tensor: ...


@runtime_checkable
class TextEncoder(Protocol):
    """What turns instructions into token features."""

    @property
    def fingerprint(self) -> str: ...

    def encode(self, instructions: Sequence[str]) -> Tensor: ...


class ClipEncoder:
    """The ``Encode`` of a run: frozen encoders behind one call."""

    def __init__(
        self,
        video: VideoCodec,
        text: TextEncoder,
        *,
        device: torch.device | str = "cpu",
        condition: str = "none",
    ) -> None:
        if condition not in CONDITIONS:
            raise InputError(f"condition is {condition!r}: give one of {', '.join(CONDITIONS)}")
        self.video, self.text = video, text
        self.device = torch.device(device)
        self.condition = condition

    @torch.no_grad()
    def __call__(self, clips: Sequence[Clip]) -> Batch:
        """Encode clips of one shape; raise InputError if they differ."""
        shapes = {(clip.frames.shape, clip.actions.shape, clip.state.shape) for clip in clips}
        if len(shapes) != 1:
            raise InputError(
                f"clips of one batch differ in (frames, actions, state) shapes: {sorted(shapes)}; "
                "sample full windows only"
            )
        frames = self._stacked([clip.frames for clip in clips])
        return Batch(
            latents=self.video.encode(frames),
            actions=self._stacked([clip.actions for clip in clips]),
            action_mask=self._stacked([clip.action_mask for clip in clips]),
            state=self._stacked([clip.state for clip in clips]),
            text=self.encode_text([clip.instruction for clip in clips]),
            condition=self.encode_condition(frames[:, 0], frames.shape[1]) if self.condition != "none" else None,
        )

    @torch.no_grad()
    def encode_first(
        self, frames: UInt8[Tensor, "b h w 3"], num_frames: int
    ) -> tuple[Float[Tensor, "b 1 c y x"], Float[Tensor, "b t e y x"] | None]:
        """Encode what a policy sees first: its latent and, where the network wants one, a window's condition."""
        frames = frames.to(self.device)
        condition = self.encode_condition(frames, num_frames) if self.condition != "none" else None
        return self.video.encode(frames[:, None]), condition

    def encode_condition(self, first: UInt8[Tensor, "b h w 3"], num_frames: int) -> Float[Tensor, "b t e y x"]:
        """Return [mask | latents of the first frame followed by mid-grey, 0 in -1..1 (spec 1.8), or by itself]."""
        video = (first.float() / 127.5 - 1)[:, None].repeat(1, num_frames, 1, 1, 1)
        if self.condition == "grey":
            video[:, 1:] = 0
        latents = self.video.encode_video(video)
        mask = torch.zeros_like(latents[:, :, :1]).repeat(1, 1, MASK_CHANNELS, 1, 1)
        mask[:, 0] = 1
        return torch.cat([mask, latents], dim=2)

    def encode_text(self, instructions: Sequence[str]) -> Float[Tensor, "b n d"]:
        """Encode instructions, each distinct one once in the encoder's life."""
        return self.text.encode(instructions).to(self.device)

    def decode(self, latents: Float[Tensor, "b n c y x"]) -> UInt8[Tensor, "b t h w 3"]:
        """Decode latents to frames."""
        return self.video.decode(latents)

    def _stacked(self, arrays: Sequence[np.ndarray | Bool[np.ndarray, ...]]) -> Tensor:
        return torch.from_numpy(np.stack(arrays)).to(self.device, non_blocking=True)
