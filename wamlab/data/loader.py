"""An endless stream of lists of clips, read ahead by threads, in an order that depends on nothing but a seed."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from wamlab.data.buffers import BatchBuffer, BufferPool
from wamlab.data.order import SampleOrder
from wamlab.data.pipeline import Stage, StageReport, close
from wamlab.data.reading import ClipSource, DecodedSource, Reading, Skipped
from wamlab.errors import InputError
from wamlab.types import Clip

T = TypeVar("T")
MAX_DEPTH, MAX_AHEAD_BYTES = 8, 2**30  # of batches read ahead, where late ones let the stream read further ahead
PATIENCE = 0.01  # a consumer that waits for more than this share of its step lets it


@dataclass(frozen=True)
class LoaderReport:
    """How a loader does: its stages in order, and how long the consumer waited for it."""

    stages: tuple[StageReport, ...]
    num_batches: int
    wait_s: float  # of the consumer, in all
    step_s: float  # of the consumer between its requests, in all
    skipped: tuple[Skipped, ...]
    buffer_bytes: int

    @property
    def wait_fraction(self) -> float:
        """Return the share of the consumer's time that it waited."""
        return self.wait_s / max(self.wait_s + self.step_s, 1e-12)

    @property
    def bottleneck(self) -> str:
        """Return the name of the slowest stage."""
        return max(self.stages, key=lambda stage: stage.item_s).name

    def figures(self) -> dict[str, Any]:
        """Return what a run's metrics hold of it."""
        return {
            "stages": {
                stage.name: {
                    "item_ms": 1000 * stage.item_s,
                    "num_threads": stage.num_threads,
                    "ready": stage.mean_ready,
                    "depth": stage.depth,
                }
                for stage in self.stages
            },
            "bottleneck": self.bottleneck,
            "wait_fraction": self.wait_fraction,
            "num_skipped": len(self.skipped),
            "buffer_mib": self.buffer_bytes / 2**20,
        }


def load_clips(
    reader: ClipSource,
    *,
    batch_size: int,
    seed: int,
    start_batch: int = 0,
    num_threads: int | None = 2,
    prefetch_batches: int = 2,
    rank: int = 0,
    world_size: int = 1,
    is_shuffled: bool = True,
    pool: int = 1,
    on_error: str = "raise",
    max_skipped: int = 100,
    is_pinned: bool = False,
) -> ClipLoader:
    """Yield batches for ever; batch n is the same whatever came before it and however many threads read.

    Every epoch shows each sample once and is cut into batches without regard to where it ends. Ranks take turns:
    together they see what one rank with their joint batch size would. With ``pool`` K up to K windows of an episode are
    decoded at once (``SampleOrder``). With ``num_threads`` 0 the consumer reads; None begins with one and adds threads,
    up to the number of cores, as long as the consumer waits. Where batches come fast enough on the whole but one was
    late, ``prefetch_batches`` grows by as many of the consumer's steps as it was late, up to a GiB of frames.

    A sample that cannot be read raises InputError at its turn, naming file and frame, or is skipped: another one drawn
    from the seed takes its place, and more than ``max_skipped`` raise. ``is_pinned`` puts frames into memory that a
    CUDA device reads asynchronously.
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("start_batch", start_batch, 0),
        ("num_threads", 0 if num_threads is None else num_threads, 0),
        ("prefetch_batches", prefetch_batches, 1),
        ("world_size", world_size, 1),
    ):
        if value < least:
            raise InputError(f"{name} is {value}, need at least {least}")
    if not 0 <= rank < world_size:
        raise InputError(f"rank is {rank}, need 0..{world_size - 1}")
    if on_error not in ("raise", "skip"):
        raise InputError(f'on_error is "{on_error}": give raise or skip')
    order = SampleOrder(
        reader.num_samples,
        seed,
        is_shuffled=is_shuffled,
        pool=pool,
        num_lanes=batch_size * world_size,
        episodes=reader.sample_episodes if isinstance(reader, DecodedSource) else None,
    )
    if hasattr(reader, "follow"):  # a cache of frames can keep what comes soonest
        reader.follow(order.next_use)  # pyright: ignore[reportAttributeAccessIssue]
    reading = Reading(reader, order, on_error == "skip", max_skipped, BufferPool(is_pinned=is_pinned))
    return ClipLoader(reading, batch_size, start_batch, num_threads, prefetch_batches, rank, world_size)


@dataclass
class Waits:
    """How many batches a consumer took, and how it spent its time: waiting for them, or else."""

    num_batches: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0
    _last_s: float = 0.0

    @property
    def mean_step_s(self) -> float:
        """Return how long the consumer takes from a batch to its next request."""
        return self.step_s / max(1, self.num_batches - 1)

    def took(self, asked_s: float) -> int:
        """Note a batch that was asked for then and came now; return how many of its consumer's steps it was late."""
        now_s, num_late = time.perf_counter(), 0
        if self.num_batches:  # the first batch has had no time
            waited_s, step_s = now_s - asked_s, asked_s - self._last_s
            self.wait_s += waited_s
            self.step_s += step_s
            if waited_s > PATIENCE * step_s:
                num_late = min(math.ceil(waited_s / max(self.mean_step_s, 1e-9)), MAX_DEPTH)
        self._last_s = now_s
        self.num_batches += 1
        return num_late


class ClipLoader(Iterator[list[Clip]]):
    """The stages of a stream of clips: source, decode, clip, batch. ``load_clips`` makes it.

    No thread is left when it is closed or forgotten.
    """

    def __init__(
        self,
        reading: Reading,
        batch_size: int,
        start_batch: int,
        num_threads: int | None,
        prefetch_batches: int,
        rank: int,
        world_size: int,
    ):
        self._reading, self._start_batch, self._is_growing = reading, start_batch, num_threads is None
        self._limit, self._prefetch_batches = (batch_size, world_size), prefetch_batches
        threads = 1 if num_threads is None else num_threads
        is_ahead = threads > 0
        firsts = ((batch * world_size + rank) * batch_size for batch in count(start_batch))
        draws = (
            (reading.order.draw(first + i), buffer, i)
            for first in firsts
            for buffer in [BatchBuffer(batch_size, reading.buffers)]
            for i in range(batch_size)
        )
        depth = threads + 1
        self._decode = Stage("decode", draws, reading.decode, num_threads=threads, depth=depth)
        clip = Stage("clip", self._decode, reading.clip, num_threads=is_ahead, depth=2)
        batch = Stage("batch", _chunks(clip, batch_size), list, num_threads=is_ahead, depth=prefetch_batches)
        self._stages: list[Stage] = [self._decode, clip, batch]
        self.waits = Waits()
        self._finalizer = weakref.finalize(self, close, self._stages)

    def __next__(self) -> list[Clip]:
        start_s = time.perf_counter()
        try:
            clips = next(self._stages[-1])
        except BaseException:
            self.close()
            raise
        if num_late := self.waits.took(start_s):
            self._catch_up(num_late, sum(clip.frames.nbytes for clip in clips))
        return clips

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_clips(start_batch=...)`` needs to go on after the last batch that was taken."""
        order, (batch_size, world_size) = self._reading.order, self._limit
        return {
            "next_batch": self._start_batch + self.waits.num_batches,
            "seed": order.seed,
            "pool": order.pool,
            "num_samples": order.num_samples,
            "global_batch_size": batch_size * world_size,
        }

    def check_state(self, state: Mapping[str, Any]) -> int:
        """Return the batch to start from, or raise InputError where the stream of a ``state_dict`` was another one."""
        own = self.state_dict()
        if odd := [name for name in own if name != "next_batch" and own[name] != state.get(name)]:
            listed = ", ".join(f"{name} (was {state.get(name)}, now {own[name]})" for name in odd)
            raise InputError(f"the stream of clips is another one: {listed}")
        return int(state["next_batch"])

    def report(self) -> LoaderReport:
        """Return what the stages did so far and how long their consumer waited."""
        return LoaderReport(
            tuple(stage.report() for stage in self._stages),
            self.waits.num_batches,
            self.waits.wait_s,
            self.waits.step_s,
            tuple(self._reading.skipped),
            self._reading.buffers.num_bytes,
        )

    def close(self) -> None:
        """End all threads; the stream is over."""
        self._finalizer()

    def _catch_up(self, num_late: int, batch_bytes: int) -> None:
        """Decode in one more thread, or read further ahead where that helps: where batches come fast enough."""
        last, batch_size = self._stages[-1], self._limit[0]
        if self._is_growing and self._decode.num_threads < num_cores():
            self._decode.add_thread()
        elif last.num_threads and batch_size * self._decode.report().item_s < self.waits.mean_step_s:
            most = min(MAX_DEPTH, max(self._prefetch_batches, MAX_AHEAD_BYTES // max(1, batch_bytes)))
            last.deepen(min(num_late, most - last.depth))


def _chunks(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while True:
        chunk = []
        for _ in range(size):
            try:
                chunk.append(next(items))
            except StopIteration:  # closed
                return
        yield chunk


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
