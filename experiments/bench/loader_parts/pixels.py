"""The frames of any loader's batch in one form, to tell whether loaders show the same."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from wamlab.types import Clip


def digest(batch: Any) -> int:
    """Return a checksum of a batch's frames as bytes, cameras side by side, whatever form they come in."""
    found = 0
    for sample in _samples(batch):
        found = zlib.crc32(np.ascontiguousarray(sample).data, found)
    return found


def _samples(batch: Any) -> list[np.ndarray]:
    """Return each sample's frames [t h w 3]."""
    if isinstance(batch, Mapping):  # of a DataLoader: cameras of [b t c h w] or [b t h w c]
        cameras = [_bytes(np.asarray(views)) for views in batch.values()]
        return [np.concatenate(views, axis=2) for views in zip(*cameras, strict=True)]
    return [sample.frames if isinstance(sample, Clip) else np.concatenate(sample, axis=2) for sample in batch]


def _bytes(views: np.ndarray) -> np.ndarray:
    if views.dtype == np.float32:
        views = np.rint(views * np.float32(255)).astype(np.uint8)
    return views.transpose(0, 1, 3, 4, 2) if views.shape[2] == 3 else views
