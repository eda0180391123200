"""Exact frames of a window: CPU time against bare torchcodec asked for the same frames, with identical pixels.

    wamlab bench decode [--quick] [--json]

The published DROID clip is read as it is and encoded anew: h264 and AV1, 180 and 480
lines, groups of 2, 30 and 250 frames. Windows alternate between the two readers, each charged for its own process time
with one decoding thread. Besides: the index of a file of 10,000 frames against torchcodec's exact opening.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from loader_parts.videos import CAMERAS, Videos, encode, find_clip, joined, read_frames

from wamlab.data.decode import open_video
from wamlab.data.frame_index import read_frame_index
from wamlab.errors import InputError
from wamlab.lab.table import Table

WINDOWS = ((25, 1), (25, 4), (33, 1))  # frames, stride


def cost_s(call: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    """Return the process time of a call and what it gives."""
    start = time.process_time()
    pixels = call()
    return time.process_time() - start, pixels


def compare(path: Path, num_windows: int) -> list[dict]:
    """Read the same random windows by both; one row for each kind of window."""
    from torchcodec.decoders import VideoDecoder  # pyright: ignore[reportPrivateImportUsage, reportMissingImports]

    reader, rows = open_video(path), []
    bare = VideoDecoder(str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")
    for length, stride in WINDOWS:
        rng = np.random.default_rng(length * stride)
        starts = rng.integers(0, len(reader.index) - (length - 1) * stride, num_windows + 1)
        costs = []
        for turn, start in enumerate(starts.tolist()):
            asked = start + stride * np.arange(length)
            readings = [
                lambda asked=asked: reader.read(asked),
                lambda asked=asked: bare.get_frames_at(indices=asked.tolist()).data.numpy(),
            ]
            pairs = {way: cost_s(readings[way]) for way in ((0, 1) if turn % 2 else (1, 0))}
            assert np.array_equal(pairs[0][1], pairs[1][1]), f"{path}: frames {asked} differ"
            costs.append((pairs[0][0], pairs[1][0]))
        own, other = np.array(costs[1:]).sum(axis=0) / (num_windows * length) * 1e3
        rows.append(
            {
                "video": path.stem,
                "window": f"{length} of stride {stride}",
                "wamlab ms a frame": float(own),
                "torchcodec ms a frame": float(other),
                "ratio": float(own / other),
                "median of ratios": statistics.median(ours / theirs for ours, theirs in costs[1:]),
            }
        )
    return rows


def compare_index(path: Path) -> float:
    """Print what indexing a long file costs beside torchcodec's exact opening; return how many times less it is."""
    from torchcodec.decoders import VideoDecoder  # pyright: ignore[reportPrivateImportUsage, reportMissingImports]

    def least_s(call: Callable[[], object], times: int) -> float:
        costs = []
        for _ in range(times):
            start = time.process_time()
            call()
            costs.append(time.process_time() - start)
        return min(costs)

    own = least_s(lambda: read_frame_index(path), 20)
    other = least_s(lambda: VideoDecoder(str(path), num_ffmpeg_threads=1, seek_mode="exact"), 5)
    num = len(read_frame_index(path))
    print(f"index of {num:,} frames: {own * 1e3:.3f} ms, torchcodec {other * 1e3:.1f} ms, ratio {other / own:.0f}")
    return other / own


def run(*, is_quick: bool) -> dict[str, Any]:
    """Print the table and the cost of an index; return the ratios, the first being the median over all settings.

    Raises InputError where the DROID clip or torchcodec is not there.
    """
    start_s, clip = time.perf_counter(), find_clip()
    if clip is None:
        raise InputError("the DROID clip is not in shared/data/droid_clip; WAMLAB_DROID_CLIP can name its folder")
    try:
        import torchcodec  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError, OSError) as error:
        raise InputError(f"torchcodec does not load ({error}): run pip install 'wamlab[torchcodec]'") from error
    published = clip / f"{CAMERAS[0]}.mp4"
    rows = compare(published, 4 if is_quick else 16)
    with tempfile.TemporaryDirectory() as folder:
        for codec in ("h264", "av1"):
            for height_px, width_px in ((180, 320), (480, 640)):
                for group in (30,) if is_quick else (2, 30, 250):
                    videos = Videos(codec=codec, group=group, height_px=height_px, width_px=width_px)
                    path = Path(folder) / f"{codec}_{height_px}_group_{group}.mp4"
                    encode(path, read_frames(clip, CAMERAS[0], 0, videos), videos)
                    rows += compare(path, 4 if is_quick else 16)
        print(Table(rows))
        index_speedup = compare_index(joined(published, Path(folder) / "joined.mp4", 24))
    return {
        "cpu_vs_torchcodec": statistics.median(row["ratio"] for row in rows),
        "cpu_vs_torchcodec, worst": max(row["ratio"] for row in rows),
        "num_settings": len(rows),
        "index_speedup_vs_torchcodec": index_speedup,
        "minutes": (time.perf_counter() - start_s) / 60,
    }


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
