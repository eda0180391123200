"""What a run ran on: versions, machine, command line and source, without a single environment variable."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wamlab.lab.records import write_json, write_whole

IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # a name and a password
KNOWN = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[abps]-|AKIA)[\w-]{12,}")  # tokens of well-known services
SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
# Files that tend to hold secrets stay out of a saved diff.
SECRET_FILES = [
    f":(exclude,glob,icase)**/*{word}*" for word in (".env", ".pem", "key", "secret", "credential", "token")
]
MAX_DIFF_BYTES = 2_000_000


def describe_environment() -> dict[str, Any]:
    """Return the versions, machine, command line and git commits of this process, fit for JSON."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu": {"name": _cpu_name(), "num_cores": os.cpu_count()},
        "gpus": _gpus(),
        "working_directory": str(Path.cwd()),
        "command_line": without_secrets(sys.argv),
        "git": {str(folder): _git_state(folder) for folder in source_folders()},
        "packages": dict(sorted((d.name, d.version) for d in importlib.metadata.distributions() if d.name)),
    }


def write_environment(folder: Path, fingerprints: Mapping[str, str]) -> None:
    """Write ``environment.json``, and ``uncommitted.diff`` where the source differs from its commit."""
    write_json(folder / "environment.json", describe_environment() | {"fingerprints": dict(fingerprints)})
    diff = uncommitted_changes()
    if diff:
        write_whole(folder / "uncommitted.diff", diff)


def source_folders() -> list[Path]:
    """Return the git work trees that matter: around the working directory, and around wamlab itself."""
    tops = [_git(place, "rev-parse", "--show-toplevel") for place in (Path.cwd(), Path(__file__).parent)]
    return [Path(top.strip()) for top in dict.fromkeys(tops) if top]


def uncommitted_changes() -> str:
    """Return the diff of each source folder to its commit, without files whose names promise secrets."""
    diffs = [_git(folder, "diff", "HEAD", "--", ".", *SECRET_FILES) or "" for folder in source_folders()]
    text = "".join(diffs)
    if len(text.encode()) > MAX_DIFF_BYTES:
        return f"The diff has {len(text.encode()):,} bytes, too many to keep: commit before you run.\n"
    return text


def without_secrets(arguments: list[str]) -> list[str]:
    """Hide the values of arguments whose names sound like secrets: ``--token=x``, ``--token x``, ``KEY=x``.

    Hidden too are passwords in addresses and what looks like a token of a well-known service.
    """
    shown: list[str] = []
    is_value_of_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_value_of_secret and not argument.startswith("-"):
            shown.append("***")
            is_value_of_secret = False
            continue
        is_secret = bool(SECRET.search(name)) and (argument.startswith("-") or bool(equals))
        shown.append(f"{name}=***" if is_secret and equals else KNOWN.sub("***", IN_ADDRESS.sub("***", argument)))
        is_value_of_secret = is_secret and not equals
    return shown


def _git_state(folder: Path) -> dict[str, Any]:
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain")
    return {"commit": commit.strip() if commit else None, "is_dirty": bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    return _output_of(["git", "-C", str(folder), *arguments])


def _gpus() -> list[dict[str, str]]:
    query = "name,memory.total,driver_version"
    text = _output_of(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    keys = ("name", "memory", "driver")
    return [dict(zip(keys, line.split(", "), strict=False)) for line in (text or "").splitlines()]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1) if found else platform.processor() or platform.machine()


def _output_of(command: list[str]) -> str | None:
    """Return what a program prints; None where it is not installed, fails (no repository) or hangs."""
    if not shutil.which(command[0]):
        return None
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
