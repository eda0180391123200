"""What survives which fault: every long job, killed, starved, stalled or misled at a random moment, then resumed.

    wamlab bench faults [--quick] [--json]

Each cell starts the real ``wamlab`` in a process of its own, in a folder that is a small disk of its own, does the
fault when as much lies there as was drawn, goes on by the documented command and compares with a run that nothing
disturbed: losses, weights, features, datasets, turns and choices, bit for bit. ``survived_fraction`` counts the cells
that ran; a job that ended before its fault came counts for nothing and is named. Losses that are no numbers, kernels
and lost workers have tests of their own (``tests/test_step_rule.py``, ``test_faults.py``, ``test_launch.py``,
``test_process_workers.py``).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faults_parts.injections import FAULTS, NEEDS_DISK, NOT_FOR, SHIM, Cell, wait
from faults_parts.jobs import JOBS, TRAIN, Job, command, make_recorded

from wamlab.lab.table import Table

QUICK = [("SIGKILL", "convert"), ("full disk", "convert"), ("SIGKILL", "train"), ("full disk", "train")]
QUICK_S = 40.0  # cells begun later than this are left out
DISK_MIB = 96
NUM_RESUMES = 4


def run(*, is_quick: bool) -> dict[str, Any]:
    """Try the cells, print faults x jobs, return the share that survived.

    ``WAMLAB_FAULTS`` names jobs to take alone, with commas, and ``WAMLAB_FAULTS_SEED`` draws other moments.
    """
    start_s = time.monotonic()
    seed = os.environ.get("WAMLAB_FAULTS_SEED", "0")
    jobs = os.environ.get("WAMLAB_FAULTS", "").split(",")
    cells = QUICK if is_quick else [(fault, job) for job in JOBS for fault in FAULTS if jobs == [""] or job in jobs]
    found: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory(prefix="wamlab-faults-") as folder:
        base = Path(folder)
        make_recorded(base)
        shim = build_shim(base)
        wanted: dict[str, Any] = {}
        for fault, name in cells:
            job = JOBS[name]
            if is_quick and time.monotonic() - start_s > QUICK_S:
                found[fault, name] = "left out: the time is up"
            elif why := NOT_FOR.get((fault, name)):
                found[fault, name] = f"none: {why}"
            else:
                if name not in wanted:
                    wanted[name] = undisturbed(job, base)
                found[fault, name] = try_cell(
                    job, fault, base, wanted[name], shim, random.Random(f"{seed} {fault} {name}")
                )
            print(f"{fault} x {name}: {found[fault, name]}", flush=True)
    rows = [
        {"fault": fault} | {name: found.get((fault, name), "").partition(":")[0] for name in JOBS}
        for fault in FAULTS
        if any(cell[0] == fault for cell in found)
    ]
    print(Table(rows))
    told = [said.partition(":")[0] for said in found.values()]
    num_survived, num_lost = told.count("survived"), told.count("lost")
    return {
        "survived_fraction": num_survived / (num_survived + num_lost) if num_survived + num_lost else None,
        "num_survived": num_survived,
        "num_lost": num_lost,
        "num_left_out": len(told) - num_survived - num_lost,
        "minutes": (time.monotonic() - start_s) / 60,
    }


def build_shim(base: Path) -> Path | None:
    """Compile what shifts clocks and slows writes; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, target = Path(__file__).parent / "faults_parts" / "shim.c", base / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(target), str(source), "-ldl"], check=True)
    return target


def undisturbed(job: Job, base: Path) -> Any:
    """Do a job without any fault; return what it ends with, and how much of it showed on the way."""
    home = base / f"whole-{job.name}"
    home.mkdir()
    most = 1
    prepare(job, home, base)
    process = start(job, home, {})
    while process.poll() is None:
        most = max(most, job.progress(home))
        time.sleep(0.02)
    result = job.result(home)
    if result is None:
        raise RuntimeError(f"{job.name} does not end without a fault: {(home / 'out.txt').read_text()[-2000:]}")
    return result, most


def prepare(job: Job, home: Path, base: Path) -> None:
    """Give a job its dataset, and a run to start from if it needs one."""
    shutil.copytree(base / "recorded", home / "recorded")
    if job.needs_start:
        if not (base / "start").exists():
            words = ["train", "tiny", *TRAIN, "--runs", str(base / "start")]
            subprocess.run(command(words), cwd=base, check=True, capture_output=True)
        shutil.copytree(base / "start", home / "runs")


def start(job: Job, home: Path, more: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a job, or go on with it, as documented."""
    words = command(job.words(home))
    with (home / "out.txt").open("ab") as out:
        told = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), **more}
        return subprocess.Popen(words, cwd=home, env=told, stdout=out, stderr=out, start_new_session=True)


@contextmanager
def small_disk(home: Path) -> Iterator[bool]:
    """Mount a small disk on a folder for a while, where this user may; say whether it is there."""
    home.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(home)]
    has_disk = shutil.which("mount") is not None and subprocess.run(words, capture_output=True).returncode == 0
    try:
        yield has_disk
    finally:
        if has_disk:
            subprocess.run(["umount", "-l", str(home)], check=True)
        shutil.rmtree(home, ignore_errors=True)


def try_cell(job: Job, fault: str, base: Path, wanted: Any, shim: Path | None, draw: random.Random) -> str:
    """Do a fault to a job and resume it; return "survived", "lost: how" or why there is nothing to say."""
    result, most = wanted
    more = SHIM.get(fault, {})
    if more and shim is None:
        return "none: there is no compiler"
    home = base / "cell"
    if shim is not None and more:
        more = {**more, "LD_PRELOAD": str(shim)}
        more = {name: str(home / value) if name == "SHIM_CLOCK" else value for name, value in more.items()}
    with small_disk(home) as has_disk:
        if fault in NEEDS_DISK and not has_disk:
            return "none: a disk of its own needs root"
        prepare(job, home, base)
        process = start(job, home, more)
        at = draw.randint(1, max(1, most * 3 // 4))
        try:
            while job.progress(home) < at and process.poll() is None:
                time.sleep(0.01)
            if job.name == "tune":
                time.sleep(draw.uniform(3.0, 10.0))
            if process.poll() is not None:
                return "none: it ended before the fault"
            FAULTS[fault](Cell(process, home, lambda: start(job, home, more), has_disk))
            first_status = process.returncode
            for _ in range(NUM_RESUMES):
                is_whole = job.result(home) == result
                if is_whole:
                    break
                again = start(job, home, more)
                wait(again)
            if job.result(home) != result:
                return f"lost: after status {first_status} {(home / 'out.txt').read_text()[-600:]}"
            return "survived"
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
