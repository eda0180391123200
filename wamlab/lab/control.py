"""What others want of a run: a word in a file of its folder, from any process or host, or a signal to its process."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.records import write_whole
from wamlab.lab.run import Run, open_run

CONTROL = "control"  # in the run folder; without it the run goes on
WISHES = ("go on", "pause", "stop", "preempt")  # of several, the last of these counts
LOOK_S = 0.1  # a network disk is asked no oftener
REPEAT_S = 2.0  # the same signal comes from the terminal, from srun and from torchrun at once
SIGNALS = {signal.SIGINT: "stop", signal.SIGTERM: "preempt"}
if hasattr(signal, "SIGUSR1"):
    SIGNALS[signal.SIGUSR1] = "preempt"


def ask(run: Run | str | Path, wish: str) -> None:
    """Ask a run to "pause", "go on", "stop" (checkpoint, then end) or "preempt" (the same; it is to be started again).

    It does so after its step. Raises InputError for another word, and for a run that does not run.
    """
    run = run if isinstance(run, Run) else open_run(run)
    if wish not in WISHES:
        raise InputError(f'a run cannot "{wish}": ask for one of {", ".join(WISHES)}')
    if run.state != "running":
        raise InputError(f"{run.folder} is {run.state}: only a running run can {wish}")
    write_whole(run.folder / CONTROL, f"{wish}\n")


def read_wish(folder: Path) -> str:
    """Return what the file in a run folder asks for; a word that is none is left out with a warning."""
    try:
        wish = (folder / CONTROL).read_text().strip()
    except FileNotFoundError:
        return "go on"
    if wish not in WISHES:
        warnings.warn(f'{folder / CONTROL} says "{wish}", not one of {", ".join(WISHES)}', stacklevel=2)
        return "go on"
    return wish


def forget_wish(folder: Path) -> None:
    """Remove what was asked for, once it is done or of no use any more."""
    (folder / CONTROL).unlink(missing_ok=True)


class Wishes:
    """What is wanted of the run in a folder, by its file and by the signals that came inside ``heeded``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._of_file = "go on"
        self._of_signals = "go on"
        self._looked_s = self._signalled_s = float("-inf")

    def read(self, *, has_file: bool = True) -> str:
        """Return the strongest wish; the file, if it counts, is looked at every ``LOOK_S`` at most."""
        if has_file and time.monotonic() - self._looked_s >= LOOK_S:
            self._of_file = read_wish(self.folder)
            self._looked_s = time.monotonic()
        return max(self._of_file, self._of_signals, key=WISHES.index)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Take interrupts and the signals of batch systems as wishes; one that comes again later interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread hears signals
            return
        before: dict[signal.Signals, Any] = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _: object) -> None:
        now_s = time.monotonic()
        if self._of_signals != "go on" and now_s - self._signalled_s > REPEAT_S:
            raise KeyboardInterrupt
        wish = SIGNALS[signal.Signals(number)]
        if self._of_signals == "go on":
            self._signalled_s = now_s
        self._of_signals = max(self._of_signals, wish, key=WISHES.index)
