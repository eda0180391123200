"""Run folders leave: removed, or packed into one file for another machine."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

from wamlab.errors import InputError
from wamlab.lab.run import Run

HEAVY_FOLDERS = ("checkpoints",)
HEAVY_MIB = 20.0  # a larger file of another folder stays out too


def remove_run(run: Run) -> None:
    """Delete a run's folder; InputError for one that runs, or may on another machine."""
    if run.state == "running":
        raise InputError(f"{run.folder} is running: stop it first (wamlab runs stop {run.name})")
    shutil.rmtree(run.folder)


def export_run(run: Run, path: Path, *, is_whole: bool = False) -> list[str]:
    """Pack a run's folder into a new ``.tar.gz``; return what stayed out: checkpoints and large files, unless whole.

    Raises InputError for a file that exists, and for one inside the run.
    """
    if path.exists():
        raise InputError(f"{path} exists: give another name with --out")
    if path.resolve().is_relative_to(run.folder.resolve()):
        raise InputError(f"{path} lies inside the run: give another place with --out")
    left_out: list[str] = []

    def pick(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        inner = Path(member.name).relative_to(run.name)
        is_heavy = member.isfile() and (member.size > HEAVY_MIB * 2**20 or inner.parts[0] in HEAVY_FOLDERS)
        if is_heavy and not is_whole:
            left_out.append(str(inner))
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return None if inner.name == "lock" else member

    partial = path.with_name(f".{path.name}.partial")
    try:
        with tarfile.open(partial, "w:gz") as archive:
            archive.add(run.folder, arcname=run.name, filter=pick)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return left_out
