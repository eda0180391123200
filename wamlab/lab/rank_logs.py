"""What each process of a run says and how it ended: files in ``logs/`` of the run folder, one or two a process.

``rank_00001.log`` is what it printed, C libraries included; ``rank_00001.end.json`` its exit status and traceback.
"""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wamlab.lab.records import read_json, write_json

LOGS = "logs"
FAILURE = re.compile(r"^\s+rank\s*:\s*(\d+).*\n\s+exitcode\s*:\s*(-?\d+)", re.MULTILINE)  # torch 2.13's summary


def log_of(folder: Path, rank: int) -> Path:
    """Return the file that a process's output is in."""
    return folder / LOGS / f"rank_{rank:05d}.log"


def send_output(folder: Path, rank: int) -> None:
    """Append all that this process prints from now on to its log, also what C libraries and crashes print."""
    path = log_of(folder, rank)
    path.parent.mkdir(exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda **_: None)(line_buffering=True)
    faulthandler.enable(2)


@contextmanager
def end_noted(folder: Path, rank: int) -> Iterator[None]:
    """Write down how the body of a ``with`` statement ended, with the traceback of an error; what it raised goes on."""
    path = log_of(folder, rank).with_suffix(".end.json")
    path.unlink(missing_ok=True)  # of before a restart
    try:
        yield
    except BaseException as error:
        is_wanted = isinstance(error, KeyboardInterrupt | GeneratorExit)
        _note(path, rank, f"{type(error).__name__}: {error}", "" if is_wanted else traceback.format_exc())
        raise
    _note(path, rank, "", "")


def _note(path: Path, rank: int, error: str, trace: str) -> None:
    path.parent.mkdir(exist_ok=True)
    told = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "time_s": time.time()}
    write_json(path, told | {"error": error, "traceback": trace})


def read_ends(folder: Path) -> list[dict[str, Any]]:
    """Return how processes of a run ended, those with an error first and in the order of time: the first is the cause.

    A process that was killed says nothing.
    """
    ends = [read_json(path) for path in (folder / LOGS).glob("rank_*.end.json")]
    return sorted(ends, key=lambda end: (not end["traceback"], end["time_s"]))


def exit_codes_of(folder: Path | None, output: str) -> dict[int, int]:
    """Return exit statuses by rank; ``output`` is what torchrun printed, ``folder`` the run's, if it has one."""
    codes = {int(rank): int(code) for rank, code in FAILURE.findall(output)}
    for end in read_ends(folder) if folder else []:
        codes.setdefault(end["rank"], 1 if end["traceback"] else 0)
    return dict(sorted(codes.items()))


def last_lines(path: Path, num_lines: int) -> str:
    """Return the last lines of a log; nothing if it is not there."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").strip().splitlines()[-num_lines:])
