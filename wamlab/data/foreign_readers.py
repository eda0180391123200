"""Optional video backends, each behind a check that refuses the files it is known to return wrong frames of."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from types import ModuleType

import numpy as np
from jaxtyping import Int, UInt8

from wamlab.data.decode import checked_buffer, checked_frames
from wamlab.data.foreign_comparison import compare_frames
from wamlab.data.foreign_probe import probe, refuse
from wamlab.data.frame_index import FrameIndex
from wamlab.errors import InputError

PICTURES_HELD, LEAST_BYTES = 12, 4 << 20  # by an open torchcodec decoder: 5 MB at 640x480, measured 2026-12


class TorchCodecReader:
    """Decode by torchcodec's exact mode; every frame's time stamp is checked against the index."""

    def __init__(self, path: Path, index: FrameIndex):
        decoders = _import("torchcodec.decoders", "pip install 'wamlab[torchcodec]' (it needs FFmpeg libraries)")
        self.path, self.index = path, index
        found = probe(path, self.index)
        refuse("torchcodec", path, found)
        try:
            self._decoder = decoders.VideoDecoder(
                str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact"
            )
            self._size = self._decoder.metadata.height, self._decoder.metadata.width
        except (RuntimeError, ValueError) as error:
            raise InputError(f"torchcodec cannot open {path}: {_first_line(error)}") from error
        name = f"torchcodec {importlib.metadata.version('torchcodec')}"
        compare_frames(name, path, index, found, self.read)

    @property
    def num_bytes(self) -> int:
        """Return about how much memory the open reader holds."""
        return LEAST_BYTES + PICTURES_HELD * self._size[0] * self._size[1] * 3 // 2

    def close(self) -> None:
        del self._decoder

    def read(
        self, frames: Int[np.ndarray, " n"], out: UInt8[np.ndarray, "n h w 3"] | None = None
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Return the frames with these numbers; InputError where torchcodec fails or answers with another."""
        frames = checked_frames(frames, self.path, len(self.index))
        if len(frames) == 0:
            return checked_buffer(out, (0, *self._size, 3), self.path)
        try:
            batch = self._decoder.get_frames_at(indices=frames.tolist())
        except (RuntimeError, IndexError) as error:
            raise InputError(_cannot_decode("torchcodec", self.path, error)) from error
        drift_s = np.abs(batch.pts_seconds.numpy() - self.index.times_s[frames])
        if drift_s.max() > 1e-4:
            raise InputError(
                f"torchcodec returned another frame than number {frames[drift_s.argmax()]} of {self.path}; "
                'use backend="pyav"'
            )
        return _into(out, batch.data.numpy(), self.path)


class DecordReader:
    """Decode by decord, opened anew for every read: an open decord reader decodes ahead without bound."""

    num_bytes = 0  # no decoder outlives a read

    def __init__(self, path: Path, index: FrameIndex):
        self._decord = _import("decord", "pip install decord, or decord2 for AV1")
        self.path, self.index = path, index
        name, found = _name_of(self._decord), probe(path, self.index)
        refuse(name, path, found)
        compare_frames(f"{name} {self._decord.__version__}", path, index, found, self.read)

    def close(self) -> None:
        """Do nothing: no decoder outlives a read."""

    def read(
        self, frames: Int[np.ndarray, " n"], out: UInt8[np.ndarray, "n h w 3"] | None = None
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Return the frames with these numbers; InputError where decord fails or counts other frames."""
        frames = checked_frames(frames, self.path, len(self.index))
        try:
            reader = self._decord.VideoReader(str(self.path), num_threads=1)
            num_frames = len(reader)
            pixels = reader.get_batch(frames.tolist() or [0]).asnumpy()[: len(frames)]
        except (self._decord.DECORDError, RuntimeError, IndexError) as error:
            raise InputError(_cannot_decode("decord", self.path, error)) from error
        if num_frames != len(self.index):
            raise InputError(f'decord sees {num_frames} of {len(self.index)} frames in {self.path}; use backend="pyav"')
        return _into(out, pixels, self.path)


def _into(out: np.ndarray | None, pixels: np.ndarray, path: Path) -> np.ndarray:
    if out is None:
        return pixels
    checked_buffer(out, pixels.shape, path)[:] = pixels
    return out


def _name_of(decord: ModuleType) -> str:
    """Tell decord (and eva-decord) from decord2: all three install a module of the same name."""
    version = getattr(decord, "__version__", "")
    major = version.split(".")[0]
    if not major.isdigit():
        raise InputError("the installed decord states no version; reinstall decord or decord2")
    return "decord" if int(major) < 1 else "decord2"


def _import(module: str, advice: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # broken binary pairs raise the latter two
        name = module.split(".")[0]
        raise InputError(
            f'the video backend {name} does not load ({_first_line(error)}): {advice}, or use backend="pyav"'
        ) from error


def _cannot_decode(backend: str, path: Path, error: Exception) -> str:
    return f'{backend} cannot decode {path} ({_first_line(error)}); use backend="pyav"'


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
