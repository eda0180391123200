"""What a policy session has seen: per-layer keys and values, held by the caller, never by the network."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wamlab.model.block import CrossKeys


@dataclass(frozen=True)
class History:
    """The clean frames seen so far by a batch of sessions, as keys and values of every layer.

    Keys are stored rotated; positions are never re-based. Observing returns a new history and leaves this one.
    """

    cross: tuple[CrossKeys, ...]  # a layer each: text and image, projected once
    past: tuple[tuple[Tensor, Tensor], ...] | None = None  # a layer each: (b, heads, tokens, head_dim) twice
    num_frames: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the memory of the cached frames."""
        return sum(t.numel() * t.element_size() for pair in self.past or () for t in pair)
