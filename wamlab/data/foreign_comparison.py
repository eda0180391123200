"""Frames of an optional backend beside PyAV's, where seeking goes wrong: what no known refusal foresees is caught.

Done once per file and backend version; the verdict is kept in the user's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from wamlab.data.foreign_probe import Probe
from wamlab.data.frame_index import FrameIndex
from wamlab.data.pyav_reader import PyAVReader
from wamlab.data.video_notes import read_note, write_note
from wamlab.errors import InputError

EXACT_FORMATS = {"yuv420p", "yuvj420p"}  # every FFmpeg's converter gives the same bytes
EXACT_CODECS = {"h264", "hevc", "vp8", "vp9", "av1"}  # decoders of others may round differently
MOST_LEVELS_OFF = 3.0  # mean difference between two decoders or converters of the rest, of 255
GROUPS_COMPARED = 4  # spread over the file


def compare_frames(
    backend: str, path: Path, index: FrameIndex, found: Probe, decode: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Raise InputError if a backend, named with its version, decodes a file's frames otherwise than PyAV.

    ``decode`` is the backend's reading of frames by number.
    """
    kind = f"compared-{backend.replace(' ', '-')}"
    note = read_note(path, kind, ("reason",))
    if note is None:
        reason = _difference(path, index, found, decode)
        write_note(path, kind, reason=np.array(reason))
    else:
        reason = str(note["reason"])
    if reason:
        raise InputError(f'{backend.split()[0]} does not give exact frames of {path}: {reason}; use backend="pyav"')


def _difference(path: Path, index: FrameIndex, found: Probe, decode: Callable[[np.ndarray], np.ndarray]) -> str:
    """Say which frame at a key frame differs, each reached by a seek of its own; empty if none does."""
    is_exact = found.codec in EXACT_CODECS and found.pixel_format in EXACT_FORMATS
    limit = 0.0 if is_exact else MOST_LEVELS_OFF
    own = PyAVReader(path, index)
    try:
        for number in _frames_at_keys(index)[::-1].tolist():  # backwards: none is reached by decoding on
            try:
                expected = own.read(np.array([number]))[0]
            except InputError:
                continue  # damaged here: nothing to compare with
            try:
                frame = decode(np.array([number]))[0]
            except InputError:
                return f"it fails at frame {number}, which can be decoded"
            if frame.shape != expected.shape or np.abs(frame.astype(np.int16) - expected).mean() > limit:
                return f"its frame {number} differs from the one a sequential decode gives"
    finally:
        own.close()
    return ""


def _frames_at_keys(index: FrameIndex) -> np.ndarray:
    """Choose the frames before, at and after a few key frames, and the last one."""
    last = len(index) - 1
    keys = np.searchsorted(index.pts, index.key_pts)
    if len(keys):
        keys = keys[np.linspace(0, len(keys) - 1, min(GROUPS_COMPARED, len(keys))).astype(int)]
    return np.unique(np.clip(np.concatenate([keys - 1, keys, keys + 1, [last]]), 0, last))
