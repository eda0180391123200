"""What a policy session has seen: per-layer keys and values, held by the caller, never by the network."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wamlab.model.block import CrossKeys
from wamlab.model.positions import rotate, rotation_of, time_shift_angles


@dataclass(frozen=True)
class History:
    """The clean frames seen so far by a batch of sessions, as keys and values of every layer.

    Keys are stored rotated; positions are never re-based. Observing returns a new history and leaves this one.
    """

    cross: tuple[CrossKeys, ...]  # a layer each: text and image, projected once
    past: tuple[tuple[Tensor, Tensor], ...] | None = None  # a layer each: (b, heads, tokens, head_dim) twice
    num_frames: int = 0

    def num_streams(self, num_sessions: int) -> int:
        """Return how many streams, e.g. with and without the instruction, the history has of so many sessions."""
        num_held = len(self.cross[0].text_key)
        if num_held % num_sessions:
            raise ValueError(f"a history of {num_held} streams is none of {num_sessions} sessions")
        return num_held // num_sessions

    @property
    def num_bytes(self) -> int:
        """Return the memory of the cached frames."""
        return sum(t.numel() * t.element_size() for pair in self.past or () for t in pair)

    def slid(self, num_dropped: int) -> History:
        """Forget the frames that follow frame 0, which stays as the anchor of its session, and move up the others.

        Kept keys are turned back in time by as many frames, which is exact, so that positions stay in the range
        that training knows and the memory of a session stays as it is.
        """
        if self.past is None or not 0 <= num_dropped < self.num_frames:
            raise ValueError(f"cannot drop {num_dropped} of {self.num_frames} frames")
        per_frame = self.past[0][0].shape[2] // self.num_frames
        kept = slice((1 + num_dropped) * per_frame, None)
        past = []
        for key, value in self.past:
            back = rotation_of(time_shift_angles(-num_dropped, key.shape[-1]), key.device)
            moved = rotate(key[:, :, kept].transpose(1, 2), back.expand(key.shape[2] - kept.start, -1, -1))
            past.append(
                tuple(
                    torch.cat([whole[:, :, :per_frame], rest], dim=2)
                    for whole, rest in ((key, moved.transpose(1, 2)), (value, value[:, :, kept]))
                )
            )
        return replace(self, past=tuple(past), num_frames=self.num_frames - num_dropped)
