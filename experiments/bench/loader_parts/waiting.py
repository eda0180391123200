"""What training notices of loading: how long it waits for batches, and how much it is slowed; and a file's index."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from loader_parts import peers
from loader_parts.rounds import FORK, wait_until_quiet
from loader_parts.videos import joined

from wamlab.data.apart import load_clips_apart
from wamlab.data.clips import ClipReader
from wamlab.data.frame_index import read_frame_index
from wamlab.data.loader import load_clips

SEED = 0
WARM_UP = 4  # batches


def in_child(call: Callable[[], Any]) -> Any:
    """Return a call's result from a process of its own: decoders do not survive the forks of later loaders."""
    ours, theirs = FORK.Pipe()

    def answer() -> None:
        try:
            theirs.send((call(), None))
        except Exception as error:
            theirs.send((None, f"{type(error).__name__}: {error}"))

    process = FORK.Process(target=answer)
    process.start()
    theirs.close()
    try:
        result, error = ours.recv()
    except EOFError:
        raise RuntimeError("a measuring process died") from None
    finally:
        process.join()
    if error:
        raise RuntimeError(error)
    return result


def measure_index(path: Path, num_frames: int, num_rounds: int) -> tuple[int, float, float, list[float]]:
    """Join a video until it is long; return its length, CPU seconds of an index, of an exact open, and the ratios."""
    own_s, other_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = joined(path, Path(folder) / "long.mp4", -(-num_frames // len(read_frame_index(path))))
        length = len(read_frame_index(path))
        for _ in range(num_rounds + 1):
            start_s = time.process_time()
            index = read_frame_index(path)
            middle_s = time.process_time()
            decoder = peers.Decoder(str(path), seek_mode="exact")
            own_s.append(middle_s - start_s)
            other_s.append(time.process_time() - middle_s)
            assert peers.NO_TORCHCODEC or len(decoder) == len(index)
    found = sorted(b / a for a, b in zip(own_s[1:], other_s[1:], strict=True))
    return length, statistics.median(own_s[1:]), statistics.median(other_s[1:]), found


def measure_waits(reader: ClipReader, headrooms: Sequence[float], num_batches: int) -> tuple[float, list[float]]:
    """Train without training: a step sleeps a number of times what the loader alone takes for a batch.

    As on a GPU, where the CPU is free meanwhile. Return the seconds a batch takes alone, measured right before, and the
    share of its time that training waits at each headroom.
    """
    loader = load_clips(reader, batch_size=peers.BATCH_SIZE, seed=SEED)
    _take(loader, WARM_UP)
    alone_s = _take(loader, num_batches) / num_batches
    shares = []
    for headroom in headrooms:
        time.sleep(4 * alone_s)  # training begins with full queues
        next(loader)
        before = loader.report()
        for _ in range(num_batches):
            time.sleep(headroom * alone_s)
            next(loader)
        after = loader.report()
        waited_s, spent_s = after.wait_s - before.wait_s, after.step_s - before.step_s
        shares.append(waited_s / (waited_s + spent_s))
    loader.close()
    return alone_s, shares


def measure_step_rate(reader: ClipReader, headroom: float, num_steps: int, num_rounds: int) -> list[float]:
    """Return by round how fast training goes beside a helper process that loads, against no loader at all; sorted.

    Training multiplies matrices on one core, ``headroom`` times as long as the helper, on the others, takes for a
    batch. Empty on a machine with one core.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return []
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores[1:])  # the helper takes it over
    loader = load_clips_apart(reader, batch_size=peers.BATCH_SIZE, seed=SEED, num_threads=1)
    _take(loader, WARM_UP)
    os.sched_setaffinity(0, cores[:1])
    batch_s = _take(loader, num_steps) / num_steps
    matrix = torch.full((384, 384), 1e-3)
    num_products = max(1, round(headroom * batch_s / _product_s(matrix)))

    def train(batches: Iterator[Any]) -> float:
        start_s = time.perf_counter()
        for _ in range(num_steps):
            next(batches)
            for _ in range(num_products):
                torch.mm(matrix, matrix)
        return time.perf_counter() - start_s

    rates = []
    for turn in range(num_rounds + 1):
        seconds = {}
        for is_loading in (turn % 2 == 0, turn % 2 == 1):
            wait_until_quiet()  # the helper has read ahead all it will
            seconds[is_loading] = train(loader if is_loading else repeat(None))
        rates.append(seconds[False] / seconds[True])
    loader.close()
    return sorted(rates[1:])


def _take(loader: Iterator[Any], number: int) -> float:
    """Return the seconds that so many batches take."""
    start_s = time.perf_counter()
    for _ in range(number):
        next(loader)
    return time.perf_counter() - start_s


def _product_s(matrix: torch.Tensor) -> float:
    """Return the seconds of one product."""
    start_s, number = time.perf_counter(), 0
    while time.perf_counter() - start_s < 0.2:
        torch.mm(matrix, matrix)
        number += 1
    return (time.perf_counter() - start_s) / number
