"""The loader in a helper process of its own, so that its threads and the training loop do not share an interpreter.

Frames cross in memory that both processes map, without a copy on the training side; the rest of a clip is pickled. The
helper is spawned, never forked: decoders do not survive a fork.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.data.loader import ClipLoader, LoaderReport, load_clips
from wamlab.data.reading import ClipSource
from wamlab.errors import InputError
from wamlab.types import Clip

# In memory where there is one; else the mapped files lie in the folder of temporary files. Names are random.
SHARED = Path("/dev/shm")  # nosec B108
SENT_AHEAD = 2  # batches handed over before they are asked for, besides those the stages hold
TAKEN = ""  # what the training side says when it takes a batch; the name of a block frees that


def load_clips_apart(reader: ClipSource, **options: Any) -> ApartLoader:
    """Yield the batches of ``load_clips(reader, **options)``, read by the threads of a helper process.

    The reader must be picklable. Raises InputError for what ``load_clips`` refuses, and when the helper was killed.
    """
    state = partial(load_clips, reader, **options)(num_threads=0)  # wrong options show here
    return ApartLoader(reader, options, state)


class ApartLoader(Iterator[list[Clip]]):
    """The training side of a helper process; it ends with this object, and with this process."""

    def __init__(self, reader: ClipSource, options: dict[str, Any], state: ClipLoader):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._helper = context.Process(target=_serve, args=(theirs, reader, options), name="clips", daemon=True)
        self._helper.start()
        theirs.close()
        self._state = state  # says where the stream stands and how it was waited for, reads nothing
        self._maps: dict[str, mmap.mmap] = {}
        self._free: list[str] = []  # blocks nobody looks at any more
        self._report: LoaderReport | None = None
        self._finalizer = weakref.finalize(self, _end, self._helper, self._connection)

    def __next__(self) -> list[Clip]:
        start_s = time.perf_counter()
        self._give_back()
        try:
            kind, *content = self._connection.recv()
        except (EOFError, OSError):
            code = self._exit_code()
            self.close()
            raise InputError(
                f"the process that reads clips ended (exit code {code}): if memory ran out, lower data.pool, "
                "data.cache_gib or the batch size"
            ) from None
        if kind == "error":
            self.close()
            raise content[0]
        self._send(TAKEN)
        name, size, clips, places, self._report = content
        frames = self._block(name, size)
        self._state.waits.took(start_s)
        return [
            replace(clip, frames=frames[start : start + int(np.prod(shape))].reshape(shape))
            for clip, (start, shape) in zip(clips, places, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_clips(start_batch=...)`` needs to go on after the last batch that was taken."""
        return self._state.state_dict()

    def check_state(self, state: dict[str, Any]) -> int:
        """Return the batch to start from, as ``ClipLoader.check_state`` does."""
        return self._state.check_state(state)

    def report(self) -> LoaderReport:
        """Return what the helper's stages did and how long this process waited for them."""
        found = self._report or self._state.report()
        waits = self._state.waits
        return replace(found, num_batches=waits.num_batches, wait_s=waits.wait_s, step_s=waits.step_s)

    def close(self) -> None:
        """End the helper; the stream is over. Frames that are still looked at stay."""
        self._finalizer()

    def _give_back(self) -> None:
        while self._free:
            self._send(self._free.pop())

    def _send(self, name: str) -> None:
        with contextlib.suppress(OSError):  # a helper that is gone needs no block; receiving will say so
            self._connection.send(name)

    def _exit_code(self) -> int | None:
        self._helper.join(5)
        return self._helper.exitcode

    def _block(self, name: str, size: int) -> np.ndarray:
        """Return a batch's frames as bytes; when the last view of them is gone the helper may write there again."""
        if name not in self._maps:
            descriptor = os.open(name, os.O_RDWR)
            try:
                self._maps[name] = mmap.mmap(descriptor, 0)
            finally:
                os.close(descriptor)
                Path(name).unlink()  # mapped by both now; gone with them, however they end
        block = np.frombuffer(self._maps[name], np.uint8, size)
        weakref.finalize(block, self._free.append, name)
        return block


def _end(helper: Any, connection: Connection) -> None:
    connection.close()  # the helper notices
    helper.join(2)
    if helper.is_alive():
        helper.terminate()
        helper.join(5)


def _serve(connection: Connection, reader: ClipSource, options: dict[str, Any]) -> None:
    """Read batches and hand them over until the other side is gone."""
    blocks: dict[str, mmap.mmap] = {}
    free: list[str] = []
    num_ahead = 0
    loader = load_clips(reader, **options)
    try:
        while True:
            clips = next(loader)
            size = sum(clip.frames.nbytes for clip in clips)
            while connection.poll() or num_ahead >= SENT_AHEAD:
                message = connection.recv()
                if message == TAKEN:
                    num_ahead -= 1
                else:
                    free.append(message)
            name = _take_block(blocks, free, size)
            places, start = [], 0
            target = np.frombuffer(blocks[name], np.uint8)
            for clip in clips:
                target[start : start + clip.frames.nbytes] = clip.frames.reshape(-1)
                places.append((start, clip.frames.shape))
                start += clip.frames.nbytes
            nothing = np.zeros((0, *clips[0].frames.shape[1:]), np.uint8)
            bare = [replace(clip, frames=nothing) for clip in clips]
            connection.send(("batch", name, size, bare, places, loader.report()))
            num_ahead += 1
    except (BrokenPipeError, ConnectionResetError, EOFError, KeyboardInterrupt):
        pass  # the training side is gone or going
    except Exception as error:  # raised over there
        with contextlib.suppress(OSError):
            connection.send(("error", error if isinstance(error, InputError) else RuntimeError(repr(error))))
    finally:
        loader.close()
        for name in blocks:
            Path(name).unlink(missing_ok=True)


def _take_block(blocks: dict[str, mmap.mmap], free: list[str], size: int) -> str:
    """Return a block with room that nobody looks at, a new one if there is none."""
    for name in free:
        if len(blocks[name]) >= size:
            free.remove(name)
            return name
    descriptor, name = tempfile.mkstemp(prefix="wamlab-clips-", dir=_folder())
    try:
        os.posix_fallocate(descriptor, 0, max(1, size))  # a full disk shows here, not as a crash later
        blocks[name] = mmap.mmap(descriptor, 0)
    except OSError as error:
        Path(name).unlink()
        raise InputError(
            f"there is no room for a batch of {size / 2**20:.0f} MiB in {Path(name).parent}: "
            "read with threads instead, or free space there"
        ) from error
    finally:
        os.close(descriptor)
    return name


def _folder() -> Path:
    return SHARED if SHARED.is_dir() and os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir())


def room_for_batches() -> int:
    """Return how many bytes of batches a helper can hand over at a time."""
    return shutil.disk_usage(_folder()).free


def measure_slowdown(start: Callable[[], ClipLoader], seconds: float = 0.6) -> tuple[ClipLoader, float]:
    """Start a loader; return it, and how much longer small operations take on this thread while its threads read.

    About 1 where decoding leaves the interpreter and the cores free; well above, a helper process pays. A training loop
    gives the interpreter away with each operation it starts and waits to have it back, which a loop of plain Python
    hardly does: beside one reading thread that took 1.0 times as long and small operations 4.7 times (2026-12-02).
    """
    _count_operations(seconds / 8)  # warms up
    alone = _count_operations(seconds / 2)
    loader = start()  # its threads fill the queues from now on
    return loader, alone / max(1, _count_operations(seconds / 2))


def _count_operations(seconds: float) -> int:
    import torch

    number = torch.zeros(1)
    end_s, num_done = time.perf_counter() + seconds, 0
    while time.perf_counter() < end_s:
        number.add_(1)
        num_done += 1
    return num_done
