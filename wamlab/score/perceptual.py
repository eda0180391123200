"""Learnt perceptual distance of frames (LPIPS), where the package and its weights are there."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, UInt8

INSTALL = "pip install lpips"


def measure_lpips(
    predicted: UInt8[np.ndarray, "b t h w 3"], real: UInt8[np.ndarray, "b t h w 3"], net: str = "alex"
) -> Float[np.ndarray, "b t"] | str:
    """Return each frame's distance (Zhang et al. 2018), or one sentence that says why there is none.

    The package fetches the weights of its backbone when they are not in torch's cache.
    """
    try:
        import lpips  # pyright: ignore[reportMissingImports]  # optional
    except ModuleNotFoundError:
        return f"LPIPS needs the package lpips: {INSTALL}"
    try:
        measure = lpips.LPIPS(net=net, verbose=False).eval()
    except OSError as error:
        return f"the weights of LPIPS could not be fetched ({error}): put them into torch's cache"
    num_clips, num_frames = predicted.shape[:2]
    pairs = (torch.from_numpy(f.reshape(-1, *f.shape[2:])).movedim(-1, 1) / 127.5 - 1 for f in (predicted, real))
    with torch.no_grad():
        parts = zip(*(frames.split(64) for frames in pairs), strict=True)
        distances = torch.cat([measure(a, b).flatten() for a, b in parts])
    return distances.reshape(num_clips, num_frames).numpy()
