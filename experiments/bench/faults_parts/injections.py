"""The faults of the matrix, done to a real process that works in a folder of its own.

Each is called when the job has come to its random moment. It returns when the fault is over; what it broke outside the
process (a full disk, a missing file) is whole again by then, as a person would have made it before resuming.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WAIT_S = 180.0


@dataclass
class Cell:
    """A job that runs: its process, its folder (a small disk of its own where that can be), how to start another."""

    process: subprocess.Popen[bytes]
    home: Path
    start: Callable[[], subprocess.Popen[bytes]]
    has_disk: bool
    notes: list[str] = field(default_factory=list)


def wait(process: subprocess.Popen[bytes], limit_s: float = WAIT_S) -> None:
    """Wait for the end of a process; one that hangs is killed and counts as lost by what it leaves."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _signalled(number: signal.Signals) -> Callable[[Cell], None]:
    def inject(cell: Cell) -> None:
        cell.process.send_signal(number)
        wait(cell.process)

    return inject


def out_of_memory(cell: Cell) -> None:
    """Let the address space grow no more: what allocates next fails."""
    size = int((Path("/proc") / str(cell.process.pid) / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(cell.process.pid, resource.RLIMIT_AS, (size, size))
    wait(cell.process)


def full_disk(cell: Cell) -> None:
    """Fill the disk up to the last byte, wait for the end, free it."""
    filler = cell.home / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
    wait(cell.process)
    filler.unlink()


def read_only(cell: Cell) -> None:
    """Mount the disk to be read only, wait for the end, make it writable again."""
    for _ in range(200):  # refused while a file is open for writing
        if subprocess.run(["mount", "-o", "remount,ro", str(cell.home)], capture_output=True).returncode == 0:
            break
        time.sleep(0.02)
    wait(cell.process)
    subprocess.run(["mount", "-o", "remount,rw", str(cell.home)], check=True)


def stalled(cell: Cell) -> None:
    """Stop the process where it is, for as long as a disk that hangs may take."""
    cell.process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    cell.process.send_signal(signal.SIGCONT)
    wait(cell.process)


def vanished_files(cell: Cell) -> None:
    """Take the videos of the dataset away, wait for the end, put them back."""
    (cell.home / "recorded" / "videos").rename(cell.home / "away")
    wait(cell.process)
    (cell.home / "away").rename(cell.home / "recorded" / "videos")


def clock_jump(cell: Cell) -> None:
    """Set the clock back by more than a year, then kill: the job goes on in what is the past."""
    (cell.home / "clock").write_text(str(-400 * 86400))
    time.sleep(0.3)
    cell.process.kill()
    wait(cell.process)


def second_process(cell: Cell) -> None:
    """Start the same job once more beside the one that runs."""
    second = cell.start()
    wait(second)
    wait(cell.process)


def slow_disk(cell: Cell) -> None:
    """Kill a job all of whose writes take 5 ms longer: most likely inside one."""
    cell.process.kill()
    wait(cell.process)


FAULTS: dict[str, Callable[[Cell], None]] = {
    "SIGKILL": _signalled(signal.SIGKILL),
    "SIGTERM": _signalled(signal.SIGTERM),
    "Ctrl-C": _signalled(signal.SIGINT),
    "out of memory": out_of_memory,
    "full disk": full_disk,
    "read-only disk": read_only,
    "stalled": stalled,
    "slow disk": slow_disk,
    "vanished files": vanished_files,
    "clock set back": clock_jump,
    "two processes": second_process,
}
NEEDS_DISK = ("full disk", "read-only disk")
SHIM = {"slow disk": {"SHIM_WRITE_US": "5000"}, "clock set back": {"SHIM_CLOCK": "clock"}}
NOT_FOR = {  # what a fault cannot do to a job
    ("vanished files", "rl"): "reads no dataset",
    ("vanished files", "tune"): "reads no dataset",
    ("full disk", "tune"): "writes nothing but its answer",
    ("read-only disk", "tune"): "writes nothing but its answer",
}
