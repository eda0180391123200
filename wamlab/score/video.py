"""How close predicted frames are to real ones."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, UInt8

SSIM_SIGMA_PX, SSIM_RADIUS_PX = 1.5, 5  # of the Gaussian window of Wang et al. (2004)
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2  # steady the quotients where a patch is dark or flat
LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # of BT.601


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


def measure_ssim(
    predicted: UInt8[np.ndarray, "b t h w 3"], real: UInt8[np.ndarray, "b t h w 3"]
) -> Float[np.ndarray, "b t"]:
    """Return each frame's structural similarity of luminance, 1 where equal (Wang et al. 2004, eq. 13).

    A Gaussian window of 11 x 11 px that stays inside the frame; frames smaller than it have a window of their size.
    """
    x, y = ((frames.astype(np.float32) / 255) @ LUMA for frames in (predicted, real))
    mean_x, mean_y = _blurred(x), _blurred(y)
    variance_x = _blurred(x * x) - mean_x**2
    variance_y = _blurred(y * y) - mean_y**2
    covariance = _blurred(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + SSIM_C1) / (mean_x**2 + mean_y**2 + SSIM_C1)
    structure = (2 * covariance + SSIM_C2) / (variance_x + variance_y + SSIM_C2)
    return (luminance * structure).mean(axis=(2, 3))


def _blurred(frames: np.ndarray) -> np.ndarray:
    """Average under the window along height, then width; only whole windows are kept."""
    for axis in (2, 3):
        radius = min(SSIM_RADIUS_PX, (frames.shape[axis] - 1) // 2)
        weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / SSIM_SIGMA_PX) ** 2)
        weights = (weights / weights.sum()).astype(np.float32)
        length = frames.shape[axis] - 2 * radius
        parts = (w * np.take(frames, np.arange(i, i + length), axis=axis) for i, w in enumerate(weights))
        frames = np.sum(list(parts), axis=0)
    return frames
