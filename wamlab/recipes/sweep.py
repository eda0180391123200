"""`wamlab sweep`: a grid or list of variants of a recipe, each a run folder like any other.

What has finished is skipped, what was stopped or lost is gone on with from its checkpoint: the folder of the runs is
all that is remembered.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from wamlab.errors import InputError
from wamlab.lab.launch import LAUNCHES, Launched, launch
from wamlab.lab.lock import release_lock, take_lock
from wamlab.lab.run import Run, newest_run, read_evaluations
from wamlab.lab.table import Table
from wamlab.recipes.notebook import read_yaml
from wamlab.recipes.sweep_file import Sweep, Trial, list_trials, read_sweep

POLL_S = 0.2
SHOWN = ("held_out_loss", "action_error", "video_psnr_db")


def sweep_command(file: Positional[Path], runs: Path = Path("runs"), dry: bool = False) -> int:
    """Train every variant that a sweep's file names; what has finished is skipped, what was stopped goes on.

    Args:
        file: YAML with name, recipe, base, grid, list, processes, parallel and budget
        runs: folder of the runs
        dry: print what is to do and train nothing
    """
    if not file.is_file():
        raise InputError(f"{file} is no file: give the YAML of a sweep")
    sweep = read_sweep(read_yaml(file), str(file))
    trials = list_trials(sweep)
    check_fields(sweep, str(file))
    if not dry:
        run_sweep(sweep, trials, runs)
    print(sweep_table(trials, runs))
    states = [_state_of(trial, runs) for trial in trials]
    left = sum(state not in ("finished", "failed") for state in states)
    if left and not dry:
        print(f"{left} of {len(trials)} are left: the same command goes on")
    return 1 if "failed" in states and not dry else 0


def check_fields(sweep: Sweep, where: str) -> None:
    """Refuse a recipe that is not there, and fields that begin like none of it, before anything is trained."""
    from wamlab.recipes.order import named_recipe  # imports torch

    known = [f.name for f in fields(named_recipe(sweep.recipe)) if f.name != "name"]
    for name in dict.fromkeys([*sweep.base, *sweep.grid, *(name for entry in sweep.list for name in entry)]):
        if name.partition(".")[0].replace("-", "_") not in known:
            raise InputError(f"{where}: the recipe has no field {name} to vary: it has {', '.join(known)}")


def run_sweep(sweep: Sweep, trials: Sequence[Trial], runs: Path, *, say: Callable[[str], Any] = print) -> None:
    """Train the trials that have not finished, several at a time, within the budget; failures end none but their own.

    An interrupt, or the end of the minutes, stops those that run, each with a checkpoint.
    """
    waiting = [trial for trial in trials if _state_of(trial, runs) not in ("finished", "running")]
    say(f"{sweep.name}: {len(trials)} runs, {len(trials) - len(waiting)} of them finished or running elsewhere")
    waiting = waiting[: int(min(sweep.budget.runs, len(waiting)))]
    end_s = time.monotonic() + 60 * sweep.budget.minutes
    is_over, places, active = False, [*range(sweep.parallel)], dict[int, tuple[Trial, Launched]]()
    try:
        while (waiting and time.monotonic() < end_s) or active:
            while waiting and len(active) < sweep.parallel and time.monotonic() < end_s:
                place, trial = next(p for p in places if p not in active), waiting.pop(0)
                if not _claim(trial, runs):
                    say(f"{trial.name}: another sweep has it")
                    continue
                active[place] = trial, _launch(sweep, trial, runs, place)
                say(f"{trial.name}: begun, {_words(trial)}")
            for place, (trial, launched) in [*active.items()]:
                if not launched.is_running:
                    del active[place]
                    release_lock(_claim_of(trial, runs))
                    reason = f"\n{launched.error}" if launched.error else ""
                    say(f"{trial.name}: {launched.state}{reason}")
            if active and time.monotonic() >= end_s and not is_over:
                is_over = True
                say("the time is up: the runs stop")
                for _, launched in active.values():
                    launched.ask_to_stop()
            time.sleep(POLL_S)
    finally:
        for _, launched in active.values():
            launched.ask_to_stop()
        for trial, launched in active.values():
            launched.stop()
            release_lock(_claim_of(trial, runs))


def sweep_table(trials: Sequence[Trial], runs: Path) -> Table:
    """Return a row a trial: what was varied, its state, and what its newest evaluation says."""
    rows = []
    for trial in trials:
        run = _run_of(trial, runs)
        last: Mapping[str, Any] = (read_evaluations(run) or [{}])[-1] if run else {}
        told = {name: trial.varied.get(name) for name in dict.fromkeys(n for t in trials for n in t.varied)}
        summary = (run.summary if run else None) or {}
        rows.append(
            {"run": run.name if run else trial.name, **told, "state": _state_of(trial, runs), "step": last.get("step")}
            | {name.replace("_", " "): last.get(name) for name in SHOWN}
            | {"samples/s": summary.get("samples/s")}
        )
    return Table(rows)


def _launch(sweep: Sweep, trial: Trial, runs: Path, place: int) -> Launched:
    run = _run_of(trial, runs)
    return launch(
        sweep.recipe,
        {**trial.changes, "name": trial.name},
        num_processes=sweep.processes,
        num_restarts=sweep.restarts,
        runs=runs,
        resume=run is not None and any(run.checkpoints.glob("step_*/state.json")),
        environment=_share_of_machine(sweep, place),
    )


def _claim_of(trial: Trial, runs: Path) -> Path:
    return runs / LAUNCHES / f"{trial.name}.lock"


def _claim(trial: Trial, runs: Path) -> bool:
    """Take a trial for this sweep, unless one elsewhere has it or had it: two may have begun with the same list."""
    claim = _claim_of(trial, runs)
    claim.parent.mkdir(parents=True, exist_ok=True)
    try:
        take_lock(claim)
    except InputError:
        return False
    if _state_of(trial, runs) not in ("finished", "running"):
        return True
    release_lock(claim)
    return False


def _share_of_machine(sweep: Sweep, place: int) -> dict[str, str]:
    """Return the environment that gives a place its own devices, or its share of the cores."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = told.split(",") if told else _list_devices()
    if len(devices) >= sweep.parallel * sweep.processes:
        own = devices[place * sweep.processes : (place + 1) * sweep.processes]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    num_threads = max(1, (os.cpu_count() or 1) // (sweep.parallel * sweep.processes))
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(num_threads)}


def _list_devices() -> list[str]:
    """Return the numbers of the CUDA devices here, without torch."""
    if not shutil.which("nvidia-smi"):
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
    )
    return done.stdout.split() if done.returncode == 0 else []


def _run_of(trial: Trial, runs: Path) -> Run | None:
    try:
        return newest_run(runs, trial.name)
    except InputError:
        return None  # not begun


def _state_of(trial: Trial, runs: Path) -> str:
    run = _run_of(trial, runs)
    return "waiting" if run is None else run.state


def _words(trial: Trial) -> str:
    return ", ".join(f"{name} {value}" for name, value in trial.varied.items()) or "the recipe as it is"
