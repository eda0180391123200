"""What ``status.json`` of a run folder says, looked at before anything is believed of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.lock import is_gone
from wamlab.lab.records import Record, read_json

STATES = ("running", "finished", "failed", "stopped")  # that are written; "lost" is found out


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31  # as os.kill takes it


NEEDED: dict[str, Callable[[Any], bool]] = {"state": STATES.__contains__, "started": _is_time, "heartbeat": _is_time}
OF_WRITER: dict[str, Callable[[Any], bool]] = {"pid": _is_count, "host": _is_text}  # of a run that runs
OPTIONAL: dict[str, Callable[[Any], bool]] = {"ended": _is_time, "error": _is_text, "num_resumes": _is_count}


def read_status(folder: Path) -> Record:
    """Return a run's status; a running run whose process is dead on this host reads ``lost``.

    Raises InputError naming the field that says nothing a run would write.
    """
    path = folder / "status.json"
    status = read_json(path)
    checks = NEEDED | (OF_WRITER if status.get("state") == "running" else {})
    odd = [name for name, is_sound in checks.items() if not is_sound(status.get(name))]
    odd += [name for name, is_sound in OPTIONAL.items() if status.get(name) is not None and not is_sound(status[name])]
    if odd:
        told = str(status[odd[0]])[:40] if odd[0] in status else "missing"
        raise InputError(f"{path} is damaged, its {odd[0]} is {told}: restore it from a copy")
    status = dict.fromkeys(OPTIONAL) | status
    if status["state"] == "running" and is_gone(status):
        status |= {"state": "lost", "error": f"its process {status['pid']} ended without a word"}
    return status
