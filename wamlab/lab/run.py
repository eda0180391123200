"""The run folder: what a run was given, what it did, and who is writing it.

::

    runs/2026-04-01-tiny-093000/
        config.json  environment.json  uncommitted.diff  status.json  lock  control
        metrics.jsonl  evaluations.jsonl  summary.json  report.html
        checkpoints/  pictures/  history/  logs/

Everything that watches, compares or reports a run reads these files; the arrow is one way.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from wamlab.errors import InputError, Stopped
from wamlab.lab.card import run_chart
from wamlab.lab.environment import write_environment
from wamlab.lab.folders import after_all, check_name, nearest, run_folders, runs_of, slug_of
from wamlab.lab.lock import release_lock, take_lock, this_process
from wamlab.lab.records import (
    Record,
    append_line,
    drop_unfinished_line,
    forget_after,
    plain,
    read_json,
    read_lines,
    write_json,
    write_whole,
)
from wamlab.lab.status import read_status

State = Literal["running", "finished", "failed", "stopped", "lost"]
LINE_FILES = ("metrics.jsonl", "evaluations.jsonl")
HEARTBEAT_S = 5.0
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Run:
    """One run folder; the one that ``create_run`` returns may write, the one that ``open_run`` returns reads.

    As a context manager it marks the run finished, stopped (an interrupt) or failed (with the error's text).
    """

    def __init__(self, folder: Path, *, is_writer: bool = False) -> None:
        self.folder = folder
        self.is_writer = is_writer
        self._heartbeat_s = -HEARTBEAT_S

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def pictures(self) -> Path:
        return self.folder / "pictures"

    @property
    def config(self) -> Record:
        return read_json(self.folder / "config.json")

    @property
    def environment(self) -> Record:
        """What ``environment.json`` says; of what the run does not say there is nothing."""
        path = self.folder / "environment.json"
        found = {"git": {}, "packages": {}, "fingerprints": {}} | read_json(path)
        for name in ("git", "packages", "fingerprints"):
            if not isinstance(found[name], Mapping):
                raise InputError(f"{path} is damaged, its {name} is {str(found[name])[:40]}: restore it from a copy")
        return found

    @property
    def status(self) -> Record:
        """What ``status.json`` says; a running run whose process is dead on this host reads ``lost``."""
        return read_status(self.folder)

    @property
    def state(self) -> State:
        return self.status["state"]

    @property
    def summary(self) -> Record | None:
        """What ``finish`` was given; None before that."""
        path = self.folder / "summary.json"
        return read_json(path) if path.exists() else None

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one step's record to ``metrics.jsonl``; it must hold the ``step``."""
        self._append("metrics.jsonl", record)

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        """Append one evaluation to ``evaluations.jsonl``; it must hold the ``step``."""
        self._append("evaluations.jsonl", record)

    def save_picture(self, name: str, png: bytes) -> Path:
        """Write a PNG into ``pictures/`` and return its path; ``name`` is a plain file name."""
        self._check_writer()
        if not png.startswith(PNG_SIGNATURE):
            raise InputError(f"picture {name!r} is not a PNG: give the bytes of one, as strip_png returns them")
        check_name(name, "picture")
        path = self.pictures / (name if name.endswith(".png") else f"{name}.png")
        write_whole(path, png)
        return path

    def truncate_metrics(self, step: int) -> None:
        """Forget records and evaluations after ``step``, which the run is about to do again.

        The forgotten ones are kept in ``history/``.
        """
        self._check_writer()
        for name in LINE_FILES:
            forget_after(self.folder / name, step, self.folder / "history" / f"{_stamp()}-{name}")

    def mark(self, **facts: Any) -> None:
        """Write facts of the moment into ``status.json``, such as ``is_paused``."""
        self._check_writer()
        self._set_status(**facts)

    def finish(self, state: State = "finished", summary: Mapping[str, Any] | None = None, error: str = "") -> None:
        """Write ``summary.json``, set the final state and let others write the folder."""
        self._check_writer()
        if state not in ("finished", "failed", "stopped"):
            raise InputError(f"a run cannot end {state!r}: give finished, failed or stopped")
        if summary is not None:
            write_json(self.folder / "summary.json", summary)
        self._set_status(state=state, ended=_now(), error=error or None)
        self.is_writer = False
        release_lock(self.folder / "lock")

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_writer:
            return  # the body called finish
        if error is None:
            self.finish()
        else:
            is_interrupt = isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
            self.mark(is_preempted=isinstance(error, Stopped) and error.is_preempted, is_paused=False)
            first_line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self.finish("stopped" if is_interrupt else "failed", error=first_line)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.state})"

    def chart(self) -> Any:
        """Return the card that stands for the run: state, key figures and curves."""
        return run_chart(self.name, self.status, self.config, read_metrics(self)[0], read_evaluations(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.chart()._repr_mimebundle_()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        self._check_writer()
        if type(record.get("step")) is not int:
            raise InputError(f"a record for {name} has no whole number as 'step': give one")
        append_line(self.folder / name, record)
        if time.monotonic() - self._heartbeat_s > HEARTBEAT_S:
            self._set_status()
            self._heartbeat_s = time.monotonic()

    def _set_status(self, **changes: Any) -> None:
        path = self.folder / "status.json"
        write_json(path, read_json(path) | {"heartbeat": _now()} | changes)

    def _check_writer(self) -> None:
        if not self.is_writer:
            raise InputError(f"{self.folder} is open for reading: create_run(..., is_resumed=True) writes on")


def create_run(
    root: str | Path,
    name: str,
    config: Any,
    *,
    fingerprints: Mapping[str, str] | None = None,
    is_resumed: bool = False,
    started: datetime | None = None,
) -> Run:
    """Make ``root/DATE-NAME-TIME`` for writing, or go on with the newest run of that name.

    ``config`` is a mapping or dataclass; ``fingerprints`` says what data and weights went in. A resumed run
    may be given by its whole folder name. Raises ``InputError`` for a folder that exists, that another
    process writes, or that cannot be written; then nothing is left behind.
    """
    check_name(name, "run")
    root = Path(root)
    document = plain({"config": config, "fingerprints": dict(fingerprints or {})}, "the run")
    if is_resumed:
        return _resume(root, name, document)
    slug = slug_of(name)
    folder = root / f"{started or after_all(root, slug):%Y-%m-%d-{slug}-%H%M%S}"
    if folder.exists():
        raise InputError(f"{folder} exists: give another name, or is_resumed=True to go on with it")
    partial = root / f".{folder.name}.partial"
    try:
        root.mkdir(exist_ok=True)
        partial.mkdir()
    except FileNotFoundError:
        raise InputError(f"{root.parent} does not exist: make it, or give another place for the runs") from None
    except OSError as error:
        raise InputError(f"{root} cannot hold a run folder ({error.strerror}): give another place") from error
    try:
        _fill(partial, document)
        take_lock(partial / "lock")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Run(folder, is_writer=True)


def _fill(folder: Path, document: Record) -> None:
    for inner in ("checkpoints", "pictures", "history"):
        (folder / inner).mkdir()
    for name in LINE_FILES:
        (folder / name).touch()
    write_json(folder / "config.json", document["config"])
    write_environment(folder, document["fingerprints"])
    status = {"state": "running", **this_process(), "started": _now(), "heartbeat": _now()}
    write_json(folder / "status.json", status | {"ended": None, "error": None, "num_resumes": 0})


def newest_run(root: str | Path, name: str) -> Run:
    """Open the newest run that ``create_run(root, name, ...)`` made, or the one whose whole folder name is given."""
    known = run_folders(Path(root))
    named = runs_of(Path(root), slug_of(name))
    found = [folder for folder in known if folder.name == name or folder in named]
    if not found:
        raise InputError(f"no run named {name!r} in {root} to go on with: {nearest(name, known)}")
    return Run(found[-1])


def _resume(root: Path, name: str, document: Record) -> Run:
    folder = newest_run(root, name).folder
    take_lock(folder / "lock")
    try:
        num_resumes = (read_status(folder).get("num_resumes") or 0) + 1  # what is damaged shows before all changes
        for file_name in LINE_FILES:
            read_lines(folder / file_name, is_strict=True)
        for file_name in LINE_FILES:
            drop_unfinished_line(folder / file_name)
        for file_name in ("config.json", "environment.json", "uncommitted.diff", "summary.json"):
            if (folder / file_name).exists():
                shutil.copy2(folder / file_name, folder / "history" / f"{_stamp()}-{file_name}")
        for file_name in ("uncommitted.diff", "summary.json"):  # the others are overwritten
            (folder / file_name).unlink(missing_ok=True)
        write_json(folder / "config.json", document["config"])
        write_environment(folder, document["fingerprints"])
        run = Run(folder, is_writer=True)
        writer = {"job": None, "generation": None} | this_process()
        run._set_status(
            state="running", **writer, ended=None, error=None, is_preempted=False, is_paused=False,
            num_resumes=num_resumes,
        )  # fmt: skip
    except BaseException:
        release_lock(folder / "lock")
        raise
    return run


def open_run(path: str | Path) -> Run:
    """Open a run folder for reading."""
    folder = Path(path)
    try:
        is_run = (folder / "status.json").is_file()
    except (OSError, ValueError) as error:  # a name too long, a zero byte
        raise InputError(f"{str(path)[:80]!r} names no folder ({error}): give a run folder") from error
    if not is_run:
        raise InputError(f"{folder} is not a run folder: give one that holds config.json and status.json")
    return Run(folder)


def find_run(root: str | Path, text: str = "") -> Run:
    """Open the one run whose name is ``text``, starts with it or holds it; without text, the newest."""
    folders = run_folders(Path(root))
    if not folders:
        raise InputError(f"{root} holds no runs: give the folder in which runs are, with --root or as root")
    for fits in (str.__eq__, str.startswith, str.__contains__):
        found = [folder for folder in folders if fits(folder.name, text)]
        if not text:
            found = folders[-1:]
        if len(found) > 1:
            names = ", ".join(folder.name for folder in found[-5:])
            raise InputError(f"{len(found)} runs in {root} fit {text!r}: give more of one name, e.g. {names}")
        if found:
            return Run(found[0])
    raise InputError(f"no run in {root} fits {text!r}: {nearest(text, folders)}")


def read_metrics(run: Run | str | Path, since: int = 0) -> tuple[list[Record], int]:
    """Read the step records written after byte ``since``; return them and the byte to go on from."""
    return read_lines(_folder_of(run) / "metrics.jsonl", since)


def read_evaluations(run: Run | str | Path) -> list[Record]:
    """Read all evaluations written so far."""
    return read_lines(_folder_of(run) / "evaluations.jsonl")[0]


def _folder_of(run: Run | str | Path) -> Path:
    return run.folder if isinstance(run, Run) else open_run(run).folder


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _stamp() -> str:
    return f"{datetime.now():%Y%m%d-%H%M%S-%f}"
