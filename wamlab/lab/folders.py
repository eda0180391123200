"""Names of runs, and the run folders under a root."""

from __future__ import annotations

import difflib
import re
from datetime import datetime, timedelta
from pathlib import Path

from wamlab.errors import InputError


def check_name(name: str, what: str) -> None:
    """Refuse names that would leave their folder or hide in it."""
    if not name or name != name.strip() or name.startswith(".") or re.search(r"[/\\\0]|\.\.", name):
        raise InputError(f"{what} name {name!r} is no plain file name: use letters, digits, - and _")


def slug_of(name: str) -> str:
    """Turn a run name into the part of a folder name: lower case words joined by hyphens."""
    slug = re.sub(r"[\W_]+", "-", name.lower()).strip("-")
    if not 0 < len(slug) <= 80:
        raise InputError(f"run name {name!r} gives the folder name {slug!r}: use 1 to 80 letters or digits")
    return slug


def run_folders(root: Path) -> list[Path]:
    """Return the run folders of a root, oldest first."""
    if not root.is_dir():
        raise InputError(f"{root} is no folder: give the one in which runs are, with --root or as root")
    return sorted(
        (status.parent for status in root.glob("[!.]*/status.json")),
        key=lambda folder: (folder.name[:10], folder.name[-6:], folder.name),
    )


def runs_of(root: Path, slug: str) -> list[Path]:
    """Return the run folders of one name, oldest first; none where there is no root."""
    pattern = re.compile(rf"\d{{4}}-\d\d-\d\d-{re.escape(slug)}-\d{{6}}")
    return [folder for folder in (run_folders(root) if root.is_dir() else []) if pattern.fullmatch(folder.name)]


def after_all(root: Path, slug: str) -> datetime:
    """Return now, or a second after the newest run of a name: a clock that was set back must not hide a new run."""
    now, known = datetime.now(), runs_of(root, slug)
    if not known:
        return now
    try:
        last = datetime.strptime(known[-1].name[:10] + known[-1].name[-6:], "%Y-%m-%d%H%M%S")
    except ValueError:
        return now  # named by hand: no time
    return last + timedelta(seconds=1) if last >= now.replace(microsecond=0) else now


def nearest(text: str, folders: list[Path]) -> str:
    """Say which runs have names like ``text``, or which are the newest."""
    names = [folder.name for folder in folders]
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.2) or names[-3:]
    return f"there are {', '.join(near)}" if near else "there are none"
