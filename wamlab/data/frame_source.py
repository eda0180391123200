"""What frames are read from: a dataset, or a cache before one. Caches nest: memory, then disk, then the decoder."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int64, UInt8


@runtime_checkable
class FrameSource(Protocol):
    """Frames of episodes by row. ``frames`` is called by several threads at once."""

    @property
    def lengths(self) -> Int64[np.ndarray, " episodes"]: ...  # rows of each

    def frames(
        self, episode: int, camera: str, rows: Int[np.ndarray, " n"], /
    ) -> UInt8[np.ndarray, "n h w 3"]: ...  # in the rows' order, repeats allowed; InputError for what does not exist


def has_rows(source: FrameSource, episode: int, rows: Int[np.ndarray, " n"]) -> bool:
    """Say whether there are rows, and all of them lie in the episode."""
    if not len(rows) or not 0 <= episode < len(source.lengths):
        return False
    return bool(rows.min() >= 0 and rows.max() < source.lengths[episode])
