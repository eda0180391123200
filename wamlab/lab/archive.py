"""Run folders leave: removed, or packed into one file for another machine."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wamlab.errors import InputError, advice_for
from wamlab.lab.lock import release_lock, take_lock
from wamlab.lab.run import Run

HEAVY_FOLDERS = ("checkpoints",)
HEAVY_MIB = 20.0  # a larger file of another folder stays out too
REMOVED = ".removed"  # suffix of a hidden folder that is being deleted


def check_removable(run: Run) -> None:
    """Refuse a link, and a run that runs or may on another machine; a damaged status stands in nobody's way."""
    if run.folder.is_symlink():
        raise InputError(f"{run.folder} is a link to {run.folder.resolve()}: delete that run, or the link by hand")
    try:
        is_running = run.state == "running"
    except InputError:
        is_running = False  # its lock says whether somebody writes it
    if is_running:
        raise InputError(f"{run.folder} is running: stop it first (wamlab runs stop {run.name})")


def remove_run(run: Run) -> None:
    """Delete a run's folder, whole or not at all in the eyes of others; InputError for one that is being written.

    It is hidden first, so that an interrupt leaves no half of a run; the next removal clears what was left hidden.
    """
    check_removable(run)
    lock, has_lock = run.folder / "lock", False
    try:
        with suppress_full_disk():
            take_lock(lock)  # so that nobody goes on with it meanwhile
            has_lock = True
        hidden = run.folder.with_name(f".{run.name}{REMOVED}")
        shutil.rmtree(hidden, ignore_errors=True)
        run.folder.rename(hidden)
    except OSError as error:
        if has_lock:
            with suppress(OSError):
                release_lock(lock)
        raise InputError(f"{run.folder} cannot be deleted ({error.strerror}): {advice_for(error)}") from error
    for left in run.folder.parent.glob(f".*{REMOVED}"):
        shutil.rmtree(left, ignore_errors=left != hidden)


@contextmanager
def suppress_full_disk() -> Iterator[None]:
    """Go on where there is no room: what follows makes some."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def export_run(run: Run, path: Path, *, is_whole: bool = False) -> list[str]:
    """Pack a run's folder into a new ``.tar.gz``; return what stayed out: checkpoints and large files, unless whole.

    What is no file of the folder, such as a link, stays out always. Raises InputError for a file that exists, for one
    inside the run, and for one that cannot be written.
    """
    if path.exists() or not path.name:
        raise InputError(f"{path} exists: give another name with --out")
    folder = run.folder.resolve()  # which may be a link
    if path.resolve().is_relative_to(folder):
        raise InputError(f"{path} lies inside the run: give another place with --out")
    left_out: list[str] = []

    def pick(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        inner = Path(member.name).relative_to(run.name)
        is_heavy = member.isfile() and (member.size > HEAVY_MIB * 2**20 or inner.parts[0] in HEAVY_FOLDERS)
        if (is_heavy and not is_whole) or not (member.isfile() or member.isdir()):  # a pipe, a socket
            left_out.append(str(inner))
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return None if inner.name == "lock" else member

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with tarfile.open(partial, "w:gz", dereference=True) as archive:  # a file of two names is packed twice
            for place in [folder, *sorted(folder.rglob("*"))]:
                inner = place.relative_to(folder)
                if place.is_symlink():
                    left_out.append(str(inner))
                elif place.exists():  # a run that runs lets old checkpoints go
                    archive.add(place, Path(run.name, inner), recursive=False, filter=pick)
        if path.exists():  # by now
            raise InputError(f"{path} exists: give another name with --out")
        partial.replace(path)
    except OSError as error:
        wrong = f"{error.strerror or error}: {error.filename}" if error.filename else str(error.strerror or error)
        raise InputError(f"{path} cannot be written ({wrong}): {advice_for(error)}") from error
    finally:
        partial.unlink(missing_ok=True)
    return left_out
