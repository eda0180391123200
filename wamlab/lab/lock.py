"""One writer per run folder: a file that names it, made with O_EXCL so that it works on shared disks too."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from wamlab.errors import InputError


def is_gone(owner: dict[str, Any]) -> bool:
    """Say whether the process that ``pid``, ``host`` and ``born`` name is certainly dead.

    A process of another host is dead if it was of this job before the job was started again, else never certainly.
    ``born`` tells a process from a later one that was given the same number.
    """
    job = this_job()
    if job and owner.get("job") == job["job"] and owner.get("generation", []) < job["generation"]:
        return True
    if owner.get("host") != socket.gethostname() or os.name != "posix":
        return False
    pid = owner["pid"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it lives and belongs to another user
    return owner.get("born") != birth_of(pid) or is_zombie(pid)


def birth_of(pid: int) -> str | None:
    """Return when a process started, in kernel ticks since boot; None where the system does not tell."""
    fields = _stat_fields(pid)
    return fields[19] if fields else None


def is_zombie(pid: int) -> bool:
    """Say whether a process has ended and only waits for its parent to notice."""
    fields = _stat_fields(pid)
    return bool(fields) and fields[0] == "Z"


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command name, which may hold spaces (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def this_process() -> dict[str, Any]:
    """Name this process for other processes and hosts."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "born": birth_of(os.getpid()), **this_job()}


def this_job() -> dict[str, Any]:
    """Name the job of Slurm or torchrun that this process is of, and how often it was started again; empty without one.

    Either ends all processes of a job before it starts the job again.
    """
    ids = [os.environ.get(name) for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")]
    if not any(ids):
        return {}
    counts = [os.environ.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
    return {"job": " ".join(filter(None, ids)), "generation": [int(count) for count in counts if count.isdigit()]}


def take_lock(path: Path) -> None:
    """Make the lock file, taking over one whose owner is dead; ``InputError`` when its owner may live."""
    try:
        _create(path)
    except FileExistsError:
        seen = path.read_bytes()
        owner = _owner(seen, path)
        if not is_gone(owner):
            raise InputError(_refusal(path, owner)) from None
        # Another process may be taking over at the same time. Moving the file away succeeds for one of us
        # only; if what was moved is not what was read, the other one was faster, and gets its lock back.
        stale = path.with_name(f"{path.name}.{os.getpid()}.stale")
        try:
            path.rename(stale)
            if stale.read_bytes() != seen:
                os.link(stale, path)
                raise FileExistsError
            _create(path)
        except (FileNotFoundError, FileExistsError):
            raise InputError(f"{path.parent} was just taken by another process: stop one of the two") from None
        finally:
            stale.unlink(missing_ok=True)


def release_lock(path: Path) -> None:
    """Remove the lock of this process."""
    path.unlink(missing_ok=True)


def _refusal(path: Path, owner: dict[str, Any]) -> str:
    if owner == this_process():
        return f"{path.parent} is still open in this very process: call finish('stopped') on that run first"
    writer = f"process {owner['pid']} on {owner['host']}"
    return f"{path.parent} is being written by {writer}: stop that one, or delete {path} if it is gone"


def _create(path: Path) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(this_process(), file)
    except BaseException:  # a full disk, an interrupt: no lock that names nobody
        path.unlink(missing_ok=True)
        raise


def _owner(data: bytes, path: Path) -> dict[str, Any]:
    try:
        owner = json.loads(data)
        return owner | {"pid": int(owner["pid"]), "host": owner["host"], "born": owner["born"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} names no process: delete it if nothing writes to {path.parent}") from None
