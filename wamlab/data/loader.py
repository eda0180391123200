"""An endless stream of lists of clips, read ahead by threads, in an order that depends on nothing but a seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import count, islice
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from wamlab.errors import InputError
from wamlab.types import Clip

T = TypeVar("T")


@runtime_checkable
class ClipSource(Protocol):
    """Clips by number: a ``ClipReader`` or a mixture of them. ``read`` is called by several threads at once."""

    @property
    def num_samples(self) -> int: ...

    def read(self, sample_index: int, seed: int) -> Clip: ...


def load_clips(
    reader: ClipSource,
    *,
    batch_size: int,
    seed: int,
    start_batch: int = 0,
    num_threads: int = 2,
    prefetch_batches: int = 2,
    rank: int = 0,
    world_size: int = 1,
    is_shuffled: bool = True,
) -> Generator[list[Clip], None, None]:
    """Yield batches for ever; batch n is the same whatever came before it and however many threads read.

    Every epoch is a permutation of all samples, cut into batches without regard to where an epoch ends, so
    that each sample comes once an epoch. Ranks take turns: together they see what one rank with their joint
    batch size would. No thread is left when the generator is closed. With ``num_threads`` 0 the consumer reads.
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("start_batch", start_batch, 0),
        ("num_threads", num_threads, 0),
        ("prefetch_batches", prefetch_batches, 1),
        ("world_size", world_size, 1),
    ):
        if value < least:
            raise InputError(f"{name} is {value}, need at least {least}")
    if not 0 <= rank < world_size:
        raise InputError(f"rank is {rank}, need 0..{world_size - 1}")

    draw = _order(reader.num_samples, seed, is_shuffled=is_shuffled)
    firsts = ((batch * world_size + rank) * batch_size for batch in count(start_batch))
    batches = ([draw(first + i) for i in range(batch_size)] for first in firsts)
    if num_threads == 0:
        return ([reader.read(*sample) for sample in batch] for batch in batches)
    return read_ahead(reader.read, batches, num_threads, prefetch_batches)


def _order(num_samples: int, seed: int, *, is_shuffled: bool) -> Callable[[int], tuple[int, int]]:
    """Return the function from a position in the endless stream to (sample index, seed of its augmentation)."""

    @lru_cache(maxsize=2)  # a batch may lie across two epochs
    def epoch_of(epoch: int) -> tuple[np.ndarray, int]:
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(num_samples) if is_shuffled else np.arange(num_samples)
        return order, int(rng.integers(2**63))

    def draw(position: int) -> tuple[int, int]:
        epoch, place = divmod(position, num_samples)
        order, epoch_seed = epoch_of(epoch)
        return int(order[place]), epoch_seed

    return draw


def read_ahead(
    read: Callable[..., T], batches: Iterator[list[tuple[Any, ...]]], num_threads: int, prefetch_batches: int = 2
) -> Generator[list[T], None, None]:
    """Call ``read`` with each tuple of this and the next batches in threads, those of one batch in parallel."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="clips")

    def submit(batch: list[tuple[Any, ...]]) -> list[Future[T]]:
        return [pool.submit(read, *sample) for sample in batch]

    try:
        waiting = deque(map(submit, islice(batches, prefetch_batches)))
        for batch in batches:
            waiting.append(submit(batch))
            yield [clip.result() for clip in waiting.popleft()]
        while waiting:
            yield [clip.result() for clip in waiting.popleft()]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
