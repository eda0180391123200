"""Read the clips that an order draws: frames once for a group, another clip for one that cannot be read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from wamlab.data.buffers import BatchBuffer, BufferPool
from wamlab.data.order import Draw, SampleOrder
from wamlab.errors import InputError
from wamlab.types import Clip

T = TypeVar("T")


@runtime_checkable
class ClipSource(Protocol):
    """Clips by number. ``read`` is called by several threads at once."""

    @property
    def num_samples(self) -> int: ...

    def read(self, sample_index: int, seed: int) -> Clip: ...


@runtime_checkable
class DecodedSource(ClipSource, Protocol):
    """Clips whose frames are decoded in one step, for several samples of an episode at once, and used in another."""

    @property
    def sample_episodes(self) -> np.ndarray: ...  # a number for each sample's episode

    def decode(self, samples: Sequence[int], position: int, new: Callable[..., np.ndarray] | None) -> Any: ...

    def clip(self, sample_index: int, seed: int, decoded: Any, new: Callable[..., np.ndarray]) -> Clip: ...


@dataclass(frozen=True)
class Skipped:
    """A sample that could not be read, and why."""

    sample: int
    reason: str


@dataclass
class _Group:
    """Frames decoded for several samples; the first thread that comes decodes, the others wait."""

    num_left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    decoded: Any = None
    error: InputError | None = None
    is_done: bool = False


class Reading:
    """What the stages do with one draw; shared by their threads."""

    def __init__(
        self, source: ClipSource, order: SampleOrder, is_skipping: bool, max_skipped: int, buffers: BufferPool
    ):
        self.source, self.order, self.buffers = source, order, buffers
        self.skipped: list[Skipped] = []
        self._is_skipping, self._max_skipped = is_skipping, max_skipped
        self._decoded = source if isinstance(source, DecodedSource) else None  # asking each time would take 40 µs
        self._groups: dict[tuple[int, int], _Group] = {}
        self._lock = threading.Lock()

    def decode(self, item: tuple[Draw, BatchBuffer, int]) -> tuple[Draw, BatchBuffer, int, Any]:
        """Decode a draw's frames, or take those that another draw of its group decoded."""
        draw, buffer, row = item
        if self._decoded is None:
            return draw, buffer, row, self._try(lambda: self.source.read(draw.sample, draw.seed))
        if len(draw.members) == 1:
            return (
                draw,
                buffer,
                row,
                self._try(lambda: self._decode([draw.sample], draw.position, partial(buffer.row, row))),
            )
        return draw, buffer, row, self._try(lambda: self._shared(draw))

    def clip(self, item: tuple[Draw, BatchBuffer, int, Any]) -> Clip:
        """Make a draw's clip of its decoded frames; in place of one that cannot be read, take another."""
        draw, buffer, row, decoded = item
        attempt = decoded
        if not isinstance(attempt, InputError):
            if self._decoded is None:
                return attempt
            attempt = self._try(lambda: self._clip(draw.sample, draw.seed, decoded, buffer, row))
        rng = np.random.default_rng([draw.seed % 2**32, draw.position])
        sample = draw.sample
        while isinstance(attempt, InputError):
            self._skip(sample, attempt)
            sample = int(rng.integers(self.order.num_samples))
            attempt = self._try(lambda sample=sample: self.source.read(sample, draw.seed))
        return attempt

    def _decode(self, samples: Sequence[int], position: int, new: Callable[..., np.ndarray] | None = None) -> Any:
        assert self._decoded is not None
        return self._decoded.decode(samples, position, new)

    def _clip(self, sample: int, seed: int, decoded: Any, buffer: BatchBuffer, row: int) -> Clip:
        assert self._decoded is not None
        return self._decoded.clip(sample, seed, decoded, partial(buffer.row, row))

    def _shared(self, draw: Draw) -> Any:
        """Return the group's frames; they are forgotten when the last draw of the group has them."""
        left = draw.members[draw.members.index(draw.sample) :]  # after a resume the first ones are not needed
        with self._lock:
            group = self._groups.setdefault(draw.group, _Group(len(left)))
        with group.lock:
            if not group.is_done:
                try:
                    group.decoded = self._decode(left, draw.position)
                except InputError as error:
                    group.error = error
                group.is_done = True
        with self._lock:
            group.num_left -= 1
            if not group.num_left:
                del self._groups[draw.group]
        if group.error is None:
            return group.decoded
        return self._decode([draw.sample], draw.position)  # one bad window must not spoil its group

    def _try(self, read: Callable[[], T]) -> T | InputError:
        try:
            return read()
        except InputError as error:
            if not self._is_skipping:
                raise
            return error

    def _skip(self, sample: int, error: InputError) -> None:
        with self._lock:
            self.skipped.append(Skipped(sample, str(error)))
            if len({skipped.sample for skipped in self.skipped}) > self._max_skipped:
                raise InputError(
                    f"more than {self._max_skipped} samples cannot be read; the last one: {error}; "
                    "run wamlab data check on the dataset"
                ) from error
