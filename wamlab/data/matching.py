"""Which frame of a video file each row of an episode shows: the nearest in time, or a sentence about why none does."""

from __future__ import annotations

import warnings
from pathlib import Path
from threading import Lock

import numpy as np
from jaxtyping import Float, Int64

from wamlab.data.frame_index import FrameIndex
from wamlab.data.layout import VideoSpan
from wamlab.errors import InputError

TOLERANCE = 0.1  # of a frame: further off is reported, half a frame is broken


class DriftWarning(UserWarning):
    """The rows of a dataset are so far off their frames that it should be known."""


class Drifts:
    """How far rows were off their frames at most, by video file; safe to share by threads."""

    def __init__(self, root: Path, fps: float):
        self._root, self._fps = root, fps
        self._largest_s: dict[tuple[str, Path], float] = {}
        self._is_told = False
        self._lock = Lock()

    def add(self, camera: str, path: Path, off_s: float) -> None:
        """Keep a file's largest offset; the first one of the dataset beyond the tolerance is warned of."""
        with self._lock:
            self._largest_s[camera, path] = max(off_s, self._largest_s.get((camera, path), 0.0))
            is_news = off_s > TOLERANCE / self._fps and not self._is_told
            self._is_told |= is_news
        if is_news:
            warnings.warn(
                f"rows of {self._root} are up to {off_s * 1000:.1f} ms ({off_s * self._fps:.2f} frames) off the frames "
                f"of {path}, and each takes the nearest; wamlab data check lists all such places",
                DriftWarning,
                stacklevel=2,
            )

    def by_file(self) -> dict[tuple[str, Path], float]:
        """Return the largest offset in seconds of every camera and file matched so far."""
        with self._lock:
            return dict(self._largest_s)

    def by_camera(self) -> dict[str, tuple[float, Path]]:
        """Return each camera's largest offset in seconds, and the file it is in."""
        largest: dict[str, tuple[float, Path]] = {}
        for (camera, path), off_s in self.by_file().items():
            if camera not in largest or off_s > largest[camera][0]:
                largest[camera] = off_s, path
        return largest


def match_frames(
    index: FrameIndex, span: VideoSpan, timestamps_s: Float[np.ndarray, " t"], fps: float, where: str
) -> tuple[Int64[np.ndarray, " t"], float]:
    """Find the number of the frame each row shows, by time, and the largest offset in s; every row must have one.

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
    return numbers, float(off_s.max(initial=0.0))
