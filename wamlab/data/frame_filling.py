"""A background thread of low priority that works off what it is asked for, and the room it may take on a disk."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from wamlab.data.stored_frames import TEMPORARY, remove_if_dead

FREE_BYTES, FREE_SHARE = 2 * 2**30, 0.05  # the smaller stays free: a run has checkpoints to write
SCAN_SHARE = 0.05  # of the time, at most, goes into looking what other processes have written

Item = tuple[int, str]  # episode, camera


class Room:
    """The bytes that the files of a folder may take, whichever processes write them."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        self.used_bytes = self.num_files = 0
        self._next_scan_s = 0.0

    def is_left(self) -> bool:
        """Say whether all that is there, and being written, keeps within the budget and leaves the disk some space."""
        self.scan()
        disk = shutil.disk_usage(self.folder)
        return self.used_bytes <= self.max_bytes and disk.free >= min(FREE_BYTES, FREE_SHARE * disk.total)

    def scan(self, *, is_forced: bool = False) -> None:
        """Look what is there, unless that was done lately."""
        start_s = time.monotonic()
        if start_s < self._next_scan_s and not is_forced:
            return
        sizes = []
        if self.folder.is_dir():
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    try:
                        sizes.append(entry.stat().st_size)
                    except OSError:
                        continue  # moved meanwhile
        self.used_bytes, self.num_files = sum(sizes), len(sizes)
        end_s = time.monotonic()
        self._next_scan_s = end_s + (end_s - start_s) / SCAN_SHARE

    def sweep(self) -> None:
        """Delete what killed writers left unfinished."""
        for temporary in self.folder.glob(f".*{TEMPORARY}"):
            remove_if_dead(temporary)


class Filler:
    """Do ``work`` for each item that is asked for, once, in a thread that yields to all others.

    ``work`` must not raise; it returns False to end. The thread ends with this object; a forked child starts another.
    """

    def __init__(self, work: Callable[[Item, threading.Event], bool]):
        self._work = work
        self._start_anew()

    def ask(self, item: Item) -> None:
        """Put an item in line."""
        if self._pid != os.getpid():
            self._start_anew()
        with self._changed:
            if self._end.is_set() or item in self._items:
                return
            self._items[item] = None
            if self._thread is None:
                arguments = (weakref.WeakMethod(self._work), self._items, self._changed, self._end)
                self._thread = threading.Thread(target=_work_off, args=arguments, name="frame store", daemon=True)
                self._thread.start()
                weakref.finalize(self, _end, self._thread, self._changed, self._end)
            self._changed.notify_all()

    def wait(self, timeout_s: int | float | None = None) -> bool:
        """Wait until nothing is in line; say whether that came about."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._items or self._end.is_set(), timeout_s)

    def close(self) -> None:
        """End the thread; what is in line stays undone."""
        if self._thread is not None and self._pid == os.getpid():
            _end(self._thread, self._changed, self._end)
        self._end.set()

    def _start_anew(self) -> None:
        self._items: OrderedDict[Item, None] = OrderedDict()
        self._changed, self._end = threading.Condition(), threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()


def _work_off(
    work: weakref.WeakMethod, items: OrderedDict[Item, None], changed: threading.Condition, end: threading.Event
) -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    while not end.is_set():
        with changed:
            changed.wait_for(lambda: items or end.is_set())
            item = next(iter(items), None)
        call = work()
        if item is None or call is None or end.is_set() or not call(item, end):
            end.set()
        del call
        with changed:
            items.pop(item or (-1, ""), None)  # only now: nobody asks for it anew while it is being done
            changed.notify_all()


def _end(thread: threading.Thread, changed: threading.Condition, end: threading.Event) -> None:
    with changed:
        end.set()
        changed.notify_all()
    if thread is not threading.current_thread():
        thread.join()
