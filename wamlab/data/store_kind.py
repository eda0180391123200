"""How to keep decoded frames on a disk: raw where all of them fit, else what saves most decoding there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wamlab.data.frame_filling import FREE_BYTES, FREE_SHARE
from wamlab.data.lerobot import RobotDataset
from wamlab.data.stored_frames import Kind, pack, unpack
from wamlab.errors import InputError

NUM_SAMPLED, STRIDE = 25, 4  # frames of a measured window, and rows from one to the next


@dataclass(frozen=True)
class KindCost:
    """What a kind of stored frames costs, measured on a few frames of each camera."""

    frame_bytes: float
    read_ms: float  # CPU of one frame
    miss_ms: float  # CPU of a frame that is not stored, besides decoding it
    share: float  # of all frames, that fits
    saved_ms: float  # CPU a frame on the average, against decoding; 0 or less: no use
    psnr_db: float  # against the decoder's frames; infinite for raw


def choose_kind(
    dataset: RobotDataset,
    folder: Path,
    max_bytes: int,
    cameras: Sequence[str] | None,
    say: Callable[[str], Any],
) -> Kind | Literal["none"]:
    """Choose by measuring, and say why; "none" where reading stored frames would save nothing."""
    names = tuple(dataset.cameras if cameras is None else cameras)
    room = min(max_bytes, _disk_room(folder))
    try:
        windows = [window for camera in names for window in _windows(dataset, camera)]
        decode_ms, costs = measure_kinds(windows, len(names) * int(dataset.lengths.sum()), room)
    except InputError as error:
        say(f"frame store: raw, as the costs cannot be measured ({error})")
        return "raw"
    best = max(costs, key=lambda kind: costs[kind].saved_ms)
    kind: Kind | Literal["none"] = "raw" if costs["raw"].share == 1 else best
    if costs[kind].saved_ms <= 0:
        kind = "none"
    told = "; ".join(
        f"{name} {cost.frame_bytes / 1e3:.0f} kB and {cost.read_ms:.2f} ms a frame, {cost.share:.0%} fit in "
        f"{room / 2**30:.3g} GiB, saves {cost.saved_ms:.2f} ms a frame"
        + (f", {cost.psnr_db:.1f} dB" if name == "mjpeg" else "")
        for name, cost in costs.items()
    )
    say(f"frame store: {kind} (decoding takes {decode_ms:.2f} ms of CPU a frame; {told})")
    return kind


def measure_kinds(
    windows: Sequence[Callable[[], np.ndarray]], num_frames: int, room: int
) -> tuple[float, dict[Kind, KindCost]]:
    """Return CPU milliseconds a frame of decoding some windows, and what each kind costs for so many frames."""
    decode_s, packed_s, unpacked_s, copied_s = 0.0, 0.0, 0.0, 0.0
    count = num_bytes = num_packed = squares = 0
    for window in windows:
        decode_s -= time.thread_time()
        frames = window()
        decode_s += time.thread_time()
        packed_s -= time.thread_time()
        packed = pack(frames)
        packed_s += time.thread_time()
        out = np.empty_like(frames)
        out[:] = 0  # the first touch of memory is not reading
        unpacked_s -= time.thread_time()
        unpack(packed, out)
        unpacked_s += time.thread_time()
        squares += float(((frames.astype(np.float32) - out) ** 2).sum())
        copied_s -= time.thread_time()
        np.copyto(out, frames)
        copied_s += time.thread_time()
        count, num_bytes = count + len(frames), num_bytes + frames.nbytes
        num_packed += sum(map(len, packed))
    ms = 1e3 / max(1, count)
    psnr_db = float("inf") if not squares else 10 * float(np.log10(255**2 * num_bytes / squares))
    costs: dict[Kind, KindCost] = {}
    measured: list[tuple[Kind, float, float, float, float]] = [
        ("raw", num_bytes / count, copied_s * ms, 0.0, float("inf")),
        ("mjpeg", num_packed / count, unpacked_s * ms, (packed_s + unpacked_s) * ms, psnr_db),
    ]
    for kind, size, read_ms, miss_ms, quality in measured:
        share = min(1.0, room / max(1.0, size * num_frames))
        saved_ms = share * (decode_s * ms - read_ms) - (1 - share) * miss_ms
        costs[kind] = KindCost(size, read_ms, miss_ms, share, saved_ms, quality)
    return decode_s * ms, costs


def _windows(dataset: RobotDataset, camera: str) -> list[Callable[[], np.ndarray]]:
    """Return what reads strided windows of a camera, of the first, middle and last episode; their files are open."""
    windows = []
    for episode in sorted({0, dataset.num_episodes // 2, dataset.num_episodes - 1}):
        length = int(dataset.lengths[episode])
        rows = np.arange(0, length, STRIDE)
        start = max(0, (len(rows) - NUM_SAMPLED) // 2)
        rows = rows[start : start + NUM_SAMPLED]
        dataset.frames(episode, camera, rows[:1])
        windows.append(lambda episode=episode, rows=rows: dataset.frames(episode, camera, rows))
    return windows


def _disk_room(folder: Path) -> int:
    """Return the bytes a folder's disk can take, beside those its files have already."""
    place = next(place for place in (folder.resolve(), *folder.resolve().parents) if place.exists())
    disk = shutil.disk_usage(place)
    held = sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0
    return max(0, held + disk.free - int(min(FREE_BYTES, FREE_SHARE * disk.total)))
