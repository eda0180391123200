"""Frames that carry their number as blocks large and dark enough to survive a lossy codec."""

import numpy as np

BITS = 12
BLOCK_PX = 8


def barcode_frames(numbers: np.ndarray, height: int = 32, width: int = 96) -> np.ndarray:
    """Draw numbers below 4096 as a row of black and white blocks over a moving gradient, uint8 [n h w 3]."""
    ramp = (np.arange(width)[None, :] * 2 + np.arange(height)[:, None] + 3 * numbers[:, None, None]) % 200
    frames = np.repeat(ramp[..., None].astype(np.uint8), 3, axis=-1)
    for bit in range(BITS):
        is_set = (numbers >> bit & 1).astype(np.uint8) * 255
        frames[:, :BLOCK_PX, bit * BLOCK_PX : (bit + 1) * BLOCK_PX] = is_set[:, None, None, None]
    return frames


def read_barcodes(frames: np.ndarray) -> np.ndarray:
    """Read the numbers back, int64 [n]."""
    blocks = frames[:, :BLOCK_PX, : BITS * BLOCK_PX].mean(axis=(1, 3)).reshape(len(frames), BITS, BLOCK_PX)
    return ((blocks.mean(axis=2) > 127) << np.arange(BITS)).sum(axis=1)
