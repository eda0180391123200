"""Start a training run from a notebook cell: processes of their own, watched through the run folder.

The kernel imports no torch and holds no device; the run's processes read a config and write files. They end, after a
checkpoint, when the process that launched them has ended, unless they are let go on purpose.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.control import ask
from wamlab.lab.lifeline import TIED_TO, tie
from wamlab.lab.rank_logs import LOGS, exit_codes_of, last_lines, log_of, read_ends
from wamlab.lab.records import Record, write_json
from wamlab.lab.run import Run, find_run, open_run

POLL_S = 0.1
LAUNCHES = ".launches"  # below the folder of the runs: what launched programs said before there was a run
NUM_LINES = 30  # of a log, shown with an error


class LaunchError(RuntimeError):
    """A launched run did not end well; says which process failed first, how, and where its files are."""


class Launched:
    """A run that other processes train; made by ``launch`` or, of a run that goes on somewhere, by ``attach``."""

    def __init__(self, folder: Path | None, process: subprocess.Popen[bytes] | None, run: Run | None = None) -> None:
        self.folder = folder  # with output.log, what the program said before the run began; None if attached
        self.process = process
        self._run = run

    @property
    def run(self) -> Run | None:
        """The run folder, open for reading; None until the program has made it."""
        if self._run is None and self.folder is not None and (note := self.folder / "run").exists():
            self._run = open_run(note.read_text())
        return self._run

    @property
    def state(self) -> str:
        """ "starting", "paused", what the run says of itself, or "failed" for a program that ended without a run."""
        has_ended = self.process is not None and self.process.poll() is not None
        if self.run is None:
            return "failed" if has_ended else "starting"
        status = self.run.status
        if status["state"] == "running":
            return "lost" if has_ended else "paused" if status.get("is_paused") else "running"
        return status["state"]

    @property
    def is_running(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        return self.state in ("running", "paused")

    @property
    def exit_code(self) -> int | None:
        """Exit status of the launched program: 75 after a pre-emption, 130 after a stop; None while it runs."""
        return None if self.process is None else self.process.poll()

    @property
    def exit_codes(self) -> dict[int, int]:
        """Exit status of each process of the run that has ended, by rank; minus the signal for one that was killed."""
        return exit_codes_of(self.run.folder if self.run else None, self.output)

    @property
    def output(self) -> str:
        """What the launched program said outside the run's logs."""
        path = self.folder / "output.log" if self.folder else None
        return path.read_text(errors="replace") if path is not None and path.exists() else ""

    @property
    def logs(self) -> dict[str, Path]:
        """The logs there are: ``"program"`` and ``"rank 0"`` and on."""
        found = {"program": self.folder / "output.log"} if self.folder else {}
        if self.run is not None:
            paths = sorted((self.run.folder / LOGS).glob("rank_*.log"))
            found |= {f"rank {int(path.stem.removeprefix('rank_'))}": path for path in paths}
        return found

    @property
    def error(self) -> str:
        """Why the run did not end well: the process that failed first, its traceback or the end of its log."""
        if self.state not in ("failed", "lost"):
            return ""
        # The others end because of it: by torchrun's SIGTERM, or as they cannot reach it any more.
        deaths = {rank: -code for rank, code in self.exit_codes.items() if code < 0 and -code != signal.SIGTERM}
        killed = [f"process {rank} was ended by signal {number}" for rank, number in deaths.items()]
        ends = [end for end in read_ends(self.run.folder) if end["error"]] if self.run else []
        if ends and self.run:
            rank, why = ends[0]["rank"], ends[0]["error"]
            shown = ends[0]["traceback"] or last_lines(log_of(self.run.folder, rank), NUM_LINES)
            how = f"process {rank} failed {'then' if killed else 'first'}: {why}"
            return "\n".join([*killed, how, shown, str(self.run.folder)])
        place = self.run.folder if self.run else self.folder
        said = self.output.strip().splitlines()[-NUM_LINES:]
        return "\n".join([*killed, *said, f"exit status {self.exit_code}", str(place)])

    def pause(self) -> None:
        """Let the run wait after its step, until ``go_on``; its processes keep their memory."""
        ask(self._running(), "pause")

    def go_on(self) -> None:
        """End a pause."""
        ask(self._running(), "go on")

    def stop(self, timeout_s: int | float | None = 600.0) -> None:
        """End the run after its step with a checkpoint, and wait for that; ``resume=True`` of ``launch`` goes on.

        A program that has no run yet is interrupted. Raises TimeoutError if it takes longer.
        """
        self.ask_to_stop()
        self._wait(timeout_s)

    def ask_to_stop(self) -> None:
        """Do as ``stop`` does without waiting."""
        if self.is_running and self.run is not None:
            with suppress(InputError):  # it ended just now
                ask(self.run, "stop")
        elif self.is_running and self.process is not None:
            self.process.terminate()

    def wait(self, timeout_s: int | float | None = None) -> Record | None:
        """Wait for the end and return the run's summary, None after a stop; Ctrl-C stops the run, with a checkpoint.

        Raises LaunchError if the run did not end well and TimeoutError if it takes longer than ``timeout_s``.
        """
        try:
            self._wait(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            raise
        if self.state in ("failed", "lost"):
            raise LaunchError(self.error)
        return self.run.summary if self.run else None

    def wait_for_run(self, timeout_s: int | float = 300.0) -> Run:
        """Wait for the run folder; raise LaunchError if the program ends before that, TimeoutError if it hangs."""
        end_s = time.monotonic() + timeout_s
        while self.run is None:
            if not self.is_running:
                raise LaunchError(self.error)
            if time.monotonic() > end_s:
                raise TimeoutError(f"no run began within {timeout_s} s; see {self.folder}")
            time.sleep(POLL_S)
        return self.run

    def watch(self, **options: Any) -> Any:
        """Show the run live in this notebook cell, once it has begun."""
        from wamlab.lab.watch import watch  # needs a notebook

        return watch(self.wait_for_run(), **options)

    def __repr__(self) -> str:
        place = self.run.folder if self.run else self.folder
        text = f"Launched({str(place)!r}, {self.state})"
        return f"{text}\n{self.error}" if self.error else text

    def _repr_html_(self) -> str:
        place = self.run.folder if self.run else self.folder
        text = f"<p><b>{escape(str(place))}</b>: {self.state}"
        if codes := self.exit_codes:
            text += " · exit codes " + ", ".join(f"{rank}: {code}" for rank, code in codes.items())
        return text + "</p>" + (f"<pre>{escape(self.error)}</pre>" if self.error else "")

    def _running(self) -> Run:
        if self.run is None:
            raise InputError("the run has not begun: call wait_for_run() first")
        return self.run

    def _wait(self, timeout_s: int | float | None) -> None:
        end_s = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while self.is_running:
            if time.monotonic() > end_s:
                raise TimeoutError(f"{self!r} still runs after {timeout_s} s")
            time.sleep(POLL_S)


def launch(
    recipe: Any,
    changes: Mapping[str, Any] | None = None,
    *,
    num_processes: int = 1,
    num_restarts: int = 0,
    runs: str | Path = "runs",
    resume: bool = False,
    is_tied: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Launched:
    """Start ``wamlab train`` in processes of its own and return at once with what watches it.

    ``recipe`` is a recipe's name, the path of a run's ``config.json``, or a whole recipe as an object; ``changes`` are
    fields of it by dotted name. Two or more processes are torchrun's; ``num_restarts`` times they begin again from the
    newest checkpoint after one was lost. ``is_tied=False`` lets the run go on when this process ends: ``attach`` finds
    it again. Raises InputError for an option that no command line can say.
    """
    runs = Path(runs)
    if num_processes < 1 or num_restarts < 0:
        raise InputError(f"{num_processes} processes and {num_restarts} restarts: give at least 1 and 0")
    if not runs.parent.is_dir():
        raise InputError(f"{runs.parent} does not exist: make it, or give another place for the runs")
    folder = runs / LAUNCHES / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    folder.mkdir(parents=True)
    if not isinstance(recipe, str | Path):
        write_json(folder / "config.json", recipe)
        recipe = folder / "config.json"
    words = [
        str(recipe),
        *option_words(changes or {}),
        "--runs",
        str(runs),
        "--quiet",
        "--announce",
        str(folder / "run"),
    ]
    words += ["--processes", str(num_processes), "--restarts", str(num_restarts), *(["--resume"] if resume else [])]
    surrounding = {name: value for name, value in os.environ.items() if name != TIED_TO}
    surrounding |= (tie() if is_tied else {}) | dict(environment or {})
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            [program(), "train", *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=surrounding, start_new_session=True,
        )  # fmt: skip
    return Launched(folder, process)


def attach(run: Run | str | Path, root: str | Path = "runs") -> Launched:
    """Take up a run that goes on in other processes: a folder, or a part of its name below ``root``."""
    if isinstance(run, str) and not Path(run).is_dir():
        run = find_run(root, run)
    return Launched(None, None, run if isinstance(run, Run) else open_run(run))


def program() -> str:
    """Return the path of this environment's ``wamlab``, which PATH may lack."""
    beside = Path(sys.executable).with_name("wamlab")
    found = str(beside) if beside.exists() else shutil.which("wamlab")
    if found is None:
        raise InputError(f"there is no program wamlab beside {sys.executable}: pip install wamlab there")
    return found


def option_words(changes: Mapping[str, Any]) -> list[str]:
    """Return the words that say fields of a recipe on a command line: ``{"train.num_steps": 5}``, nested or dotted."""
    words: list[str] = []
    for name, value in changes.items():
        path = name.replace("_", "-")
        if isinstance(value, Mapping):
            words += option_words({f"{name}.{inner}": item for inner, item in value.items()})
        elif isinstance(value, bool):
            head, dot, last = path.rpartition(".")
            words.append(f"--{path}" if value else f"--{head}{dot}no-{last}")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [f"--{path}", *map(str, value)]
        elif value is None or isinstance(value, str | int | float | os.PathLike):
            words += [f"--{path}", str(value)]
        else:
            raise InputError(
                f"{name} is a {type(value).__name__}: give a number, a text or a list, or change the recipe"
            )
    return words
