"""How close predicted frames are to real ones."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, UInt8


def measure_frame_errors(
    predicted: UInt8[np.ndarray, "b t h w 3"], real: UInt8[np.ndarray, "b t h w 3"]
) -> Float[np.ndarray, "b t"]:
    """Return each frame's mean squared error in units of the full range (0..1)."""
    difference = (predicted.astype(np.float32) - real.astype(np.float32)) / 255
    return np.square(difference).mean(axis=(2, 3, 4))


def psnr_db(squared_errors: np.ndarray | float) -> float:
    """Return the peak signal-to-noise ratio of the pooled error.

    Errors are averaged before the logarithm: averaging decibels would let the frames in which nothing moves,
    whose ratio is infinite, decide.
    """
    error = float(np.mean(squared_errors))
    return -10 * math.log10(error) if error > 0 else math.inf
