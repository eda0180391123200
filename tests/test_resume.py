"""Processes that load clips are killed at any batch; others, with other threads and ranks, finish the same sequence."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_loader import PLAIN, WINDOW, recorded

from wamlab.data.clips import ClipReader
from wamlab.data.lerobot import open_dataset
from wamlab.data.loader import load_clips
from wamlab.data.mixture import DecodedMixture, mix
from wamlab.data.write import write_dataset

BATCH_SIZE = 4  # of all ranks together
JOB = """
import json, os, sys
root, ledger, rank, world_size, num_threads, pool, state = sys.argv[1:]
sys.path.insert(0, {tests!r})
from test_resume import BATCH_SIZE, load, mixture
rank, world_size, state = int(rank), int(world_size), json.loads(state)
source = mixture(root)
start = load(source, rank, world_size, 0, int(pool), 0).check_state(state) if state else 0
stream = load(source, rank, world_size, int(num_threads), int(pool), start)
with open(ledger, "a") as file:
    for clips in stream:
        seen = [[clip.episode, clip.first_row, clip.augmentation_seed, len(clip.instruction)] for clip in clips]
        file.write(json.dumps([stream.state_dict(), seen]) + "\\n")
        file.flush()
"""


def mixture(root: str) -> DecodedMixture:
    dataset = open_dataset(root)
    parts = [ClipReader(dataset, PLAIN, WINDOW, episodes=which, is_training=True) for which in ([0, 2], [1, 3])]
    mixed = mix(parts, [1.0, 2.0])
    assert isinstance(mixed, DecodedMixture)
    return mixed


def load(source: DecodedMixture, rank: int, world_size: int, num_threads: int, pool: int, start: int):
    return load_clips(
        source,
        batch_size=BATCH_SIZE // world_size,
        seed=11,
        pool=pool,
        rank=rank,
        world_size=world_size,
        num_threads=num_threads,
        start_batch=start,
    )


def whole_lines(ledger: Path) -> list:
    """Return what a killed process had written; the last line may be cut."""
    lines = ledger.read_text().split("\n")[:-1] if ledger.exists() else []
    return [json.loads(line) for line in lines]


def killed(root: Path, folder: Path, world_size: int, num_threads: int, pool: int, state: dict, num: int) -> list:
    """Load in one process a rank, kill all when each took ``num`` batches or more; return what all of them took.

    That is a state and the clips of all ranks for each batch, as far as every rank came.
    """
    ledgers = [folder / f"{world_size}-{num_threads}-{rank}.jsonl" for rank in range(world_size)]
    code = JOB.format(tests=str(Path(__file__).parent))
    jobs = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                code,
                *map(str, (root, ledger, rank, world_size, num_threads, pool)),
                json.dumps(state),
            ]
        )
        for rank, ledger in enumerate(ledgers)
    ]
    try:
        deadline_s = time.monotonic() + 60
        while min(len(whole_lines(ledger)) for ledger in ledgers) < num:
            assert time.monotonic() < deadline_s
            assert all(job.poll() is None for job in jobs), "a job ended before it could be killed"
            time.sleep(0.002)
    finally:
        for job in jobs:
            os.kill(job.pid, signal.SIGKILL)
            job.wait()
    taken = zip(*map(whole_lines, ledgers), strict=False)
    return [(ranks[0][0], list(itertools.chain(*(seen for _, seen in ranks)))) for ranks in taken]


@pytest.mark.parametrize("pool", [1, 3])
@pytest.mark.parametrize("plan", [((1, 1), (1, 2), (1, 4)), ((2, 1), (1, 2))], ids=["threads 1 2 4", "ranks 2 1"])
def test_killed_streams_go_on_with_exactly_what_was_left(plan, pool, tmp_path):
    root = write_dataset(map(recorded, (30, 25, 12, 40)), tmp_path / "robot")
    rng = random.Random(f"{plan} {pool}")
    state, seen, starts = {}, [], [0]
    for world_size, num_threads in plan:
        taken = killed(root, tmp_path, world_size, num_threads, pool, state, rng.randrange(3, 12))
        kept = taken[: rng.randrange(1, len(taken) + 1)]  # the newest checkpoint lies somewhere behind
        state = kept[-1][0]
        seen += [clip for _, clips in kept for clip in clips]
        starts.append(state["next_batch"])
        assert starts[-1] == len(seen) // BATCH_SIZE
    stream = load(mixture(str(root)), 0, 1, 0, pool, 0)
    for clip, was in zip(itertools.chain.from_iterable(stream), seen, strict=False):
        assert [clip.episode, clip.first_row, clip.augmentation_seed, len(clip.instruction)] == was
    assert sorted(set(starts)) == starts  # each process made some way
