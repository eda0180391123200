"""Memory for the frames of batches, used again when nobody looks at it any more."""

from __future__ import annotations

import threading
import weakref

import numpy as np

KEPT = 4  # blocks of one size kept for later


class BufferPool:
    """Blocks of bytes. New memory of this size costs a page fault every 4 KiB, a twentieth of decoding into it."""

    def __init__(self, *, is_pinned: bool = False):
        self._is_pinned = is_pinned
        self._free: dict[int, list[np.ndarray]] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0  # in use or kept

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return an uninitialised uint8 block; it is free again when the last view of it is gone."""
        size = int(np.prod(shape))
        with self._lock:
            free = self._free.setdefault(size, [])
            memory = free.pop() if free else self._allocate(size)
        # a view through a memoryview is the base of all further views, which thus keep it alive
        block = np.frombuffer(memoryview(memory), np.uint8)  # pyright: ignore[reportArgumentType]
        weakref.finalize(block, self._give_back, memory)
        return block.reshape(shape)

    def _allocate(self, size: int) -> np.ndarray:
        self.num_bytes += size
        if not self._is_pinned:
            return np.empty(size, np.uint8)
        import torch

        return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()

    def _give_back(self, memory: np.ndarray) -> None:
        """Keep a block for later; called when its last view is gone, on whatever thread that happens."""
        free = self._free[len(memory)]  # appending is atomic: no lock, which this thread may hold already
        if len(free) < KEPT:
            free.append(memory)
        else:
            self.num_bytes -= len(memory)


class BatchBuffer:
    """One block for the frames of a batch, taken when its first clip is made."""

    def __init__(self, num_rows: int, pool: BufferPool):
        self._num_rows, self._pool, self._block = num_rows, pool, None
        self._lock = threading.Lock()

    def row(self, row: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the place of one clip's frames, uint8; one of another shape than the first gets memory of its own."""
        with self._lock:
            if self._block is None:
                self._block = self._pool.take((self._num_rows, *shape))
        return self._block[row] if self._block.shape[1:] == shape else np.empty(shape, np.uint8)
