"""Streams that go on and on keep their memory, their open files and their threads.

``WAMLAB_LEAK_CLIPS=10000 pytest tests/test_leaks.py -s`` reads more clips and prints the figures.
"""

import gc
import os
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
from test_loader import PLAIN, WINDOW, recorded

from wamlab.data.apart import ApartLoader, load_clips_apart
from wamlab.data.clips import ClipReader
from wamlab.data.lerobot import open_dataset
from wamlab.data.loader import load_clips
from wamlab.data.write import write_dataset

NUM_CLIPS = int(os.environ.get("WAMLAB_LEAK_CLIPS", "1000"))
BATCH, PARTS = 8, 5
ROOM_BYTES = 16 * 2**20  # that heaps may still grow by (8.2 MiB were seen); 1,000 leaked clips of 28 kB take 27
ROOM_FILES = 4  # the blocks that a helper hands batches over in are few; how many depends on who was quick

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory, files and threads are read from /proc"),
    pytest.mark.timeout(60 + NUM_CLIPS // 10),
]


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    memory_bytes: int
    num_files: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.memory_bytes / 2**20:.1f} MiB, {self.num_files} files, {self.num_threads} threads"


def footprint(pid: int) -> Footprint:
    proc = Path("/proc") / str(pid)
    pages = int((proc / "statm").read_text().split()[1])
    held = (len(list((proc / name).iterdir())) for name in ("fd", "task"))
    return Footprint(pages * os.sysconf("SC_PAGE_SIZE"), *held)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ClipReader:
    root = write_dataset(map(recorded, range(12, 24)), tmp_path_factory.mktemp("leaks") / "robot")
    return ClipReader(open_dataset(root), PLAIN, WINDOW, is_training=True)


@pytest.mark.parametrize("load", [load_clips, load_clips_apart])
def test_a_long_stream_holds_no_more_than_a_short_one(reader: ClipReader, load) -> None:
    def come_and_go() -> Footprint:
        """Open a stream, read from it, close it; return what stays."""
        gone = load(reader, batch_size=BATCH, seed=0, pool=2)
        list(islice(gone, 25))
        gone.close()
        del gone
        gc.collect()
        return footprint(os.getpid())

    come_and_go()  # opens what readers, and Python's processes, keep open
    stream = load(reader, batch_size=BATCH, seed=0, pool=2)
    pids = [os.getpid(), *([stream._helper.pid] if isinstance(stream, ApartLoader) else [])]

    def take(num_clips: int) -> list[Footprint]:
        for _ in range(num_clips // BATCH):
            assert len(next(stream)) == BATCH
        gc.collect()
        return [footprint(pid) for pid in pids]

    first = take(max(200, NUM_CLIPS // 10))  # every queue, buffer and heap has had its fill
    for _ in range(PARTS):
        last = take(NUM_CLIPS // PARTS)
        for was, now in zip(first, last, strict=True):
            assert now.memory_bytes <= was.memory_bytes + ROOM_BYTES
            assert now.num_files <= was.num_files + ROOM_FILES
            assert now.num_threads <= was.num_threads
    for name, was, now in zip(("training", "helper"), first, last, strict=False):
        print(f"\n{load.__name__}, {NUM_CLIPS} clips, {name} process: {was} -> {now}", end="")
    stream.close()
    del stream
    gc.collect()
    kept = [come_and_go() for _ in range(5)]
    assert kept[-1].num_files <= kept[0].num_files + 1  # Python keeps one open now and then, but not one a stream
    assert kept[-1].num_threads <= kept[0].num_threads
