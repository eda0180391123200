"""CPU of a delivered sample from a warm store of decoded frames against decoding it, and what each kind costs.

    python experiments/2026-12-02_frame_caches/measure.py VIDEO VIDEO VIDEO [--samples 40]

The videos become the cameras of a one-episode dataset at their own size and at 640x480: re-encoded as h264 with a key
frame every 10, which suits the decoder better than long groups do. A sample is 25 frames, every fourth, of all cameras.
The files lie in the page cache, their checksums are checked and they are open; "into new memory" is the fair peer of
the decoder, which is given none. Turns alternate between the sources; the median of a turn's CPU counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np

from wamlab.data.frame_store import FrameStore
from wamlab.data.lerobot import open_dataset
from wamlab.data.write import write_dataset
from wamlab.types import Episode

NUM_FRAMES, STRIDE = 25, 4


def recorded(videos: list[Path], size_px: tuple[int, int] | None) -> Episode:
    """Return videos as an episode without motion, at (width, height) if given."""
    frames = {}
    for number, path in enumerate(videos):
        with av.open(str(path)) as container:
            width, height = size_px or (None, None)
            pictures = [f.reformat(width, height, "rgb24").to_ndarray() for f in container.decode(video=0)]
        frames[f"camera{number}"] = np.stack(pictures)
    length = min(map(len, frames.values()))
    nothing = np.zeros((length, 0), np.float32)
    return Episode({name: view[:length] for name, view in frames.items()}, nothing, nothing, "look", 15.0)


def measure(root: Path, folder: Path, num_samples: int) -> dict[str, float]:
    """Return milliseconds of CPU a sample from the decoder and from a warm store of each kind."""
    dataset = open_dataset(root)
    length, cameras = int(dataset.lengths[0]), dataset.cameras
    shape = dataset.frames(0, cameras[0], np.array([0])).shape[1:]
    out = np.zeros((NUM_FRAMES, *shape), np.uint8)
    stores = {kind: FrameStore(dataset, folder / kind, 10**11, kind=kind) for kind in ("raw", "mjpeg")}
    for store in stores.values():
        for camera in cameras:
            store.frames(0, camera, np.array([0]))
        assert store.wait(600)
        for camera in cameras:
            store.frames(0, camera, np.arange(length))  # checks all checksums
        store.close()
    sources: dict[str, Callable[[str, np.ndarray], object]] = {
        "decoder": lambda camera, rows: dataset.frames(0, camera, rows),
        "raw, into new memory": lambda camera, rows: stores["raw"].frames(0, camera, rows),
        **{kind: lambda c, r, store=store: store.frames(0, c, r, out=out) for kind, store in stores.items()},
    }
    taken: dict[str, list[float]] = {name: [] for name in sources}
    rng = np.random.default_rng(0)
    for _ in range(num_samples):
        rows = int(rng.integers(length - NUM_FRAMES * STRIDE)) + STRIDE * np.arange(NUM_FRAMES)
        for name, read in sources.items():
            start_s = time.thread_time()
            for camera in cameras:
                read(camera, rows)
            taken[name].append((time.thread_time() - start_s) * 1e3)
    for kind, store in stores.items():
        num_bytes = store.report().used_bytes / (length * len(cameras))
        print(f"  {kind}: {num_bytes / 1e3:.1f} kB a frame, {store.report().hits} hits, {store.report().misses} misses")
    FrameStore(dataset, folder / "auto", 10**11, kind="auto")
    FrameStore(dataset, folder / "auto", int(0.1 * stores["raw"].report().used_bytes), kind="auto")
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument("--samples", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name, size_px in (("own size", None), ("640x480", (640, 480))):
            root = write_dataset([recorded(options.videos, size_px)], Path(scratch) / f"data {name}")
            found = measure(root, Path(scratch) / f"store {name}", options.samples)
            ratios = ", ".join(f"{kind} {ms:.2f} ms ({found['decoder'] / ms:.1f}x)" for kind, ms in found.items())
            print(f"{name}: {ratios}", flush=True)


if __name__ == "__main__":
    main()
