"""What was found out about video files at some cost, kept in the user's cache directory from run to run.

A note lies in ``$XDG_CACHE_HOME/wamlab/videos`` (``~/.cache/wamlab/videos``), not beside the dataset: datasets
are often shared, read-only or hashed. It counts only for a file of the same path, size and modification time.
The folder may be deleted at any time; where it cannot be written, everything works and is found out anew.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np

VERSION = 1  # of what notes mean; others are ignored
DAMAGE = (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)


def notes_folder() -> Path:
    """Return the folder of the notes; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wamlab" / "videos"


def read_note(path: Path, kind: str, names: tuple[str, ...]) -> dict[str, np.ndarray] | None:
    """Return the named arrays of a video file's note, None where there is none that is sound and up to date."""
    file = _file_of(path, kind)
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as note:
            if not np.array_equal(note["key"], _key(path)):
                return None
            return {name: note[name] for name in names}
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except DAMAGE as error:
        warnings.warn(f"the note {file} on {path} is damaged and made anew: {error}", stacklevel=2)
        return None


def write_note(path: Path, kind: str, **arrays: np.ndarray) -> None:
    """Keep arrays on a video file; readers see the old note or this one, never a part."""
    file = _file_of(path, kind)
    temporary = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, suffix=".part")
        with os.fdopen(descriptor, "wb") as opened:
            np.savez(opened, allow_pickle=False, key=_key(path), **arrays)
        Path(temporary).replace(file)
    except OSError:  # no room, no right to write: a cache is no reason to fail
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _file_of(path: Path, kind: str) -> Path:
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return notes_folder() / f"{name}.{kind}.npz"


def _key(path: Path) -> np.ndarray:
    stat = path.stat()
    return np.array([VERSION, stat.st_size, stat.st_mtime_ns])
