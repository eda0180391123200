"""Clips to batches: video to latents, instructions to features, all samples at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from wamlab.codec.video import to_frames, to_video
from wamlab.errors import InputError
from wamlab.types import Batch, Clip

CONDITIONS = ("none", "grey", "repeat")  # what follows the first frame in the condition; published models: grey
CHANGE_GAIN = 1.8  # gives the change of latents since the first frame unit variance on tabletop recordings
MASK_CHANNELS = 4  # of the first-frame mask; the Wan image-to-video networks expect four


@runtime_checkable
class VideoCodec(Protocol):
    """What encodes and decodes video: the embedded codec, or a video autoencoder."""

    @property
    def fingerprint(self) -> str: ...

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]: ...

    def encode(self, frames: Tensor) -> Tensor: ...

    def encode_video(self, video: Tensor) -> Tensor: ...

    def decode_video(self, latents: Tensor) -> Tensor: ...


@runtime_checkable
class TextEncoder(Protocol):
    """What turns instructions into token features."""

    @property
    def fingerprint(self) -> str: ...

    def encode(self, instructions: Sequence[str]) -> Tensor: ...


@runtime_checkable
class ImageEncoder(Protocol):
    """What turns first frames into image tokens."""

    @property
    def fingerprint(self) -> str: ...

    def encode(self, frames: Tensor) -> Tensor: ...


def check_condition(condition: str, *, has_relative_video: bool) -> None:
    """Refuse a condition that does not exist, or that lacks what relative video is relative to."""
    if condition not in CONDITIONS:
        raise InputError(f"condition is {condition!r}: give one of {', '.join(CONDITIONS)}")
    if has_relative_video and condition != "repeat":
        raise InputError(f'has_relative_video needs condition "repeat", not "{condition}": change either')


class ClipEncoder:
    """The ``Encode`` of a run: frozen encoders behind one call.

    With ``has_relative_video`` the latents after the first hold the change since the repeated first frame, as relative
    actions hold the change since the state; decoding adds it to that very frame. What stands still is then
    predicted, and shown, without any loss, and a small network is left with what moves.
    """

    def __init__(
        self,
        video: VideoCodec,
        text: TextEncoder,
        image: ImageEncoder | None = None,
        *,
        device: torch.device | str = "cpu",
        condition: str = "none",
        has_relative_video: bool = False,
    ) -> None:
        check_condition(condition, has_relative_video=has_relative_video)
        self.video, self.text, self.image = video, text, image
        self.device = torch.device(device)
        self.condition = condition
        self.has_relative_video = has_relative_video

    @property
    def fingerprint(self) -> str:
        """Identify what ``encode_window`` computes, so that stored features notice another encoder."""
        settings = {
            "video": self.video.fingerprint,
            "image": None if self.image is None else self.image.fingerprint,
            "condition": self.condition,
            "change_gain": CHANGE_GAIN if self.has_relative_video else None,
        }
        return json.dumps(settings, sort_keys=True)

    @torch.no_grad()
    def __call__(self, clips: Sequence[Clip]) -> Batch:
        """Encode clips of one shape; raise InputError if they differ."""
        check_shapes(clips)
        return self.batch_of(clips, self.encode_window(np.stack([clip.frames for clip in clips])))

    @torch.no_grad()
    def encode_window(self, frames: UInt8[np.ndarray | Tensor, "b t h w 3"]) -> dict[str, Tensor]:
        """Return all that frames alone decide, each [b ...]: the features worth storing.

        They are "latents" [b t c y x], "still" (the condition without its mask) [b t c y x] where the run has a
        condition, and "image" [b m i] where it has image tokens.
        """
        clips = torch.as_tensor(frames).to(self.device, non_blocking=True)
        features = {"latents": self.video.encode(clips)}
        if self.condition != "none":
            features["still"] = self._encode_still(clips[:, 0], clips.shape[1])
            features["latents"] = self._relative(features["latents"], features["still"])
        if (image := self.encode_image(clips[:, 0])) is not None:
            features["image"] = image
        return features

    def batch_of(
        self, clips: Sequence[Clip], features: Mapping[str, Tensor], text: Float[Tensor, "b n d"] | None = None
    ) -> Batch:
        """Join the features of clips' frames with their motion and instructions, encoding these unless given."""
        still, image = features.get("still"), features.get("image")
        return Batch(
            latents=features["latents"].to(self.device),
            actions=self._stacked([clip.actions for clip in clips]),
            action_mask=self._stacked([clip.action_mask for clip in clips]),
            state=self._stacked([clip.state for clip in clips]),
            text=self.encode_text([clip.instruction for clip in clips]) if text is None else text.to(self.device),
            condition=None if still is None else with_mask(still.to(self.device)),
            image=None if image is None else image.to(self.device),
        )

    @torch.no_grad()
    def encode_first(
        self, frames: UInt8[Tensor, "b h w 3"], num_frames: int
    ) -> tuple[Float[Tensor, "b 1 c y x"], Float[Tensor, "b t e y x"] | None]:
        """Encode what a policy sees first: its latent and, where the network wants one, a window's condition."""
        frames = frames.to(self.device)
        condition = self.encode_condition(frames, num_frames) if self.condition != "none" else None
        return self.video.encode(frames[:, None]), condition

    @torch.no_grad()
    def encode_block(
        self, first: UInt8[Tensor, "b h w 3"], previous: UInt8[Tensor, "b h w 3"], frames: UInt8[Tensor, "b t h w 3"]
    ) -> tuple[Float[Tensor, "b n c y x"], Float[Tensor, "b n e y x"] | None]:
        """Encode what a policy saw next: a block's latents and condition, given its window's first frame.

        Like the reference it encodes the frame before the block and the block as a clip of their own (spec 6.1).
        """
        clip = torch.cat([previous[:, None], frames], dim=1).to(self.device)
        latents, condition = self.video.encode(clip), None
        if self.condition != "none":
            still = self._encode_still(first.to(self.device), clip.shape[1])
            latents, condition = self._relative(latents, still), with_mask(still)[:, 1:]
        return latents[:, 1:], condition

    def encode_condition(self, first: UInt8[Tensor, "b h w 3"], num_frames: int) -> Float[Tensor, "b t e y x"]:
        """Return [mask | latents of the first frame followed by mid-grey, 0 in -1..1 (spec 1.8), or by itself]."""
        return with_mask(self._encode_still(first, num_frames))

    @torch.no_grad()
    def encode_image(self, first: UInt8[Tensor, "b h w 3"]) -> Float[Tensor, "b m i"] | None:
        """Encode first frames to image tokens, where the run has them."""
        return None if self.image is None else self.image.encode(first.to(self.device))

    def encode_text(self, instructions: Sequence[str]) -> Float[Tensor, "b n d"]:
        """Encode instructions, each distinct one once in the encoder's life."""
        return self.text.encode(instructions).to(self.device)

    @torch.no_grad()
    def decode(
        self, latents: Float[Tensor, "b n c y x"], first: UInt8[Tensor, "b h w 3"], num_frames: int
    ) -> UInt8[Tensor, "b t h w 3"]:
        """Decode a window's latents to its frames; ``first`` is the real frame that the window begins with."""
        latents, first = latents.float(), first.to(self.device)
        if not self.has_relative_video:
            return to_frames(self.video.decode_video(latents))
        still = self._encode_still(first, num_frames)
        moved = torch.cat([still[:, :1], still[:, 1:] + latents[:, 1:] / CHANGE_GAIN], dim=1)
        change = self.video.decode_video(moved) - self.video.decode_video(still)
        return to_frames(to_video(first)[:, None] + change)

    def _encode_still(self, first: Tensor, num_frames: int) -> Float[Tensor, "b t c y x"]:
        video = to_video(first)[:, None].repeat(1, num_frames, 1, 1, 1)
        if self.condition == "grey":
            video[:, 1:] = 0
        return self.video.encode_video(video)

    def _relative(self, latents: Tensor, still: Tensor) -> Tensor:
        if not self.has_relative_video:
            return latents
        return torch.cat([latents[:, :1], CHANGE_GAIN * (latents[:, 1:] - still[:, 1:])], dim=1)

    def _stacked(self, arrays: Sequence[np.ndarray | Bool[np.ndarray, ...]]) -> Tensor:
        return torch.from_numpy(np.stack(arrays)).to(self.device, non_blocking=True)


def check_shapes(clips: Sequence[Clip]) -> None:
    """Refuse clips that do not fit into one batch; those read without frames fit all that have as many states."""
    shapes = {(clip.frames.shape if len(clip.frames) else None, clip.actions.shape, clip.state.shape) for clip in clips}
    if len({shape for shape in shapes if shape[0]}) > 1 or len({shape[1:] for shape in shapes}) != 1:
        raise InputError(
            f"clips of one batch differ in (frames, actions, state) shapes: {sorted(shapes, key=str)}; "
            "sample full windows only"
        )


def with_mask(still: Float[Tensor, "b t c y x"]) -> Float[Tensor, "b t e y x"]:
    """Return a condition: in front of its latents the mask, which is 1 in the first frame and 0 after it."""
    mask = torch.zeros_like(still[:, :, :1]).repeat(1, 1, MASK_CHANNELS, 1, 1)
    mask[:, 0] = 1
    return torch.cat([mask, still], dim=2)
