"""Clips encoded as published training encodes them: the baseline of what is saved there; the same features."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from wamlab.codec.clips import ClipEncoder


class PlainClipEncoder(ClipEncoder):
    """Encodes clip by clip, and a condition that nobody reads where the published 5B training does so."""

    def __init__(self, *args: Any, is_batched: bool = False, has_dead_encode: bool = True, **options: Any) -> None:
        """Take the arguments of ``ClipEncoder``; each of the two wastes can be left out."""
        super().__init__(*args, **options)
        self.is_batched, self.has_dead_encode = is_batched, has_dead_encode

    @torch.no_grad()
    def encode_window(self, frames: UInt8[np.ndarray | Tensor, "b t h w 3"]) -> dict[str, Tensor]:
        """Return the features of ``ClipEncoder.encode_window``."""
        clips = torch.as_tensor(frames)
        parts = [clips] if self.is_batched else clips.split(1)
        found = []
        for part in parts:
            found.append(super().encode_window(part))
            if self.has_dead_encode and self.condition == "none":
                self.encode_condition(part[:, 0].to(self.device), part.shape[1])
        return {name: torch.cat([features[name] for features in found]) for name in found[0]}
