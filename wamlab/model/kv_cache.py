"""What a policy session has seen: per-layer keys and values, held by the caller, never by the network."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from wamlab.model.block import CrossKeys
from wamlab.model.positions import rotate, rotation_of, step_rotation, time_shift_angles

Past = tuple[tuple[Tensor, Tensor], ...]  # keys and values, a layer each


@dataclass(frozen=True)
class History:
    """The clean frames seen so far by a batch of sessions, as keys and values of every layer.

    Keys are stored rotated; positions are never re-based. Observing returns a new history and leaves this one.
    Sessions of different length end together: in front of the shorter ones stand keys that ``past_bias`` hides.
    """

    cross: tuple[CrossKeys, ...]  # a layer each: text and image, projected once
    past: Past | None = None  # each (b, heads, tokens, head_dim)
    num_frames: int = 0  # of the longest session
    lengths: tuple[int, ...] = ()  # frames of each session, where they differ
    past_bias: Tensor | None = None  # (sessions, tokens): -inf where a shorter session has no frame, else 0

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

    @property
    def context_bytes(self) -> int:
        """Return the memory of the projected context."""
        values = [value for keys in self.cross for value in vars(keys).values() if value is not None]
        return sum(value.numel() * value.element_size() for value in values)

    def grown(self, past: Past, num_frames: int) -> History:
        """Return the history with the keys and values that it has after so many more frames."""
        bias = self.past_bias
        if bias is not None:
            bias = F.pad(bias, (0, past[0][0].shape[2] - bias.shape[1]))
        lengths = tuple(length + num_frames for length in self.lengths)
        return replace(self, past=past, num_frames=self.num_frames + num_frames, lengths=lengths, past_bias=bias)

    def spread(self, rotation: Tensor, num_streams: int) -> tuple[Tensor, Tensor | None]:
        """Return rotation and ``past_bias`` for the rows of every stream, once these differ."""
        if self.past_bias is None:
            return rotation, None
        return rotation.repeat(num_streams, 1, 1, 1), self.past_bias.repeat(num_streams, 1)

    def rotations(
        self,
        num_frames: int,
        height: int,
        width: int,
        head_dim: int,
        latents_per_block: int,
        num_actions: int,
        num_states: int,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Return ``step_rotation`` of the frames that come next; for each session where lengths differ."""
        sizes = (num_frames, height, width, head_dim, latents_per_block, num_actions, num_states, device)
        found = [step_rotation(length, *sizes) for length in self.lengths or (self.num_frames,)]
        if not self.lengths:
            return found[0]
        both, video = zip(*found, strict=True)
        return torch.stack(both), torch.stack(video)

    def slid(self, num_dropped: int) -> History:
        """Forget the frames that follow frame 0, which stays as the anchor of its session, and move up the others.

        Kept keys are turned back in time by as many frames, which is exact, so that positions stay in the range
        that training knows and the memory of a session stays as it is.
        """
        if self.lengths:
            raise ValueError("sessions of different length slide one by one: part them first")
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
