"""Which frame of a video file each row of an episode shows: the nearest in time, or a sentence about why none does."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int64

from wamlab.data.frame_index import FrameIndex
from wamlab.data.layout import VideoSpan
from wamlab.errors import InputError


def match_frames(
    index: FrameIndex, span: VideoSpan, timestamps_s: Float[np.ndarray, " t"], fps: float, where: str
) -> Int64[np.ndarray, " t"]:
    """Find the number of the frame each row shows, by time; every row must have one.

    ``timestamps_s`` count from the episode's start. Raises InputError, which says ``where``, for a video that is too
    short, half a frame off the rows' times or shows two rows one frame.
    """
    shown_s, half_s = index.times_s, 0.5 / fps
    times_s = span.start_s + timestamps_s.astype(np.float64)
    numbers, off_s = index.nearest(times_s)
    is_off = off_s > half_s * (1 + 1e-6)
    # Where episodes follow one another in a file, the frames of a short one end where the next begins.
    end_s = np.inf if span.end_s is None else span.end_s
    num_shown = int(((shown_s >= span.start_s - half_s) & (shown_s < end_s - half_s)).sum())
    if num_shown < len(numbers) and (span.end_s is not None or is_off.any()):
        raise InputError(f"{where} has {len(numbers)} rows but {num_shown} frames")
    if is_off.any():
        row = int(off_s.argmax())
        raise InputError(
            f"{where}: row {row} is at {times_s[row]:.4f} s, more than half a frame from the nearest "
            f"frame, at {shown_s[numbers[row]]:.4f} s"
        )
    is_regular = np.abs(np.diff(times_s) - 2 * half_s) < 0.1 * half_s
    if (is_repeated := is_regular & (np.diff(numbers) < 1)).any():
        row = int(is_repeated.argmax())
        raise InputError(f"{where}: rows {row} and {row + 1} would show the same frame")
    return numbers
