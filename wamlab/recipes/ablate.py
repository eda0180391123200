"""The effect of each trick: the same steps from the official baseline to all tricks, one by one, and without each.

Every turn is a fresh process that reads the same samples in the same order with the same seeds; turns of all variants
alternate. The whole result is ``ablation.json`` in the ablation's folder, which ``lab/ablation.py`` draws.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.errors import InputError
from wamlab.lab.ablation import FSDP2, FULL, OFFICIAL, RESULT
from wamlab.lab.environment import describe_environment
from wamlab.lab.lifeline import tie
from wamlab.lab.lock import release_lock, take_lock
from wamlab.lab.records import plain, read_json, write_json
from wamlab.recipes.config import Recipe
from wamlab.recipes.tricks import TRICKS, Trick, fsdp2_base, official_baseline, with_tricks
from wamlab.score.parity import compare_means
from wamlab.speed.ranks import torchrun_command

LOSS_MARGIN = 0.01  # of log losses, within which variants train alike
LOCK = "lock"  # in the folder: two that take turns there at once would time each other
TURN = "wamlab.recipes.ablate_turn"


@dataclass(frozen=True)
class AblationConfig:
    """How long and how often each variant trains."""

    num_steps: int = 4  # measured, after the warm-up
    num_rounds: int = 3  # turns of each variant, in alternation
    num_processes: int = 1
    has_leave_one_out: bool = True
    num_warmup: int = 2  # steps before: the first compiles, the second fills what is read ahead

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_warmup", "num_rounds", "num_processes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: give at least 1")


def list_variants(recipe: Recipe, tricks: Sequence[Trick], config: AblationConfig) -> dict[str, Recipe]:
    """Return the recipes to compare by name: both baselines, tricks added one by one, all, all but each."""
    found = {OFFICIAL: official_baseline(recipe, tricks), FSDP2: fsdp2_base(recipe, tricks)}
    for number, trick in enumerate(tricks[:-1], 1):
        found[f"+ {trick.name}"] = with_tricks(recipe, tricks[:number], tricks)
    found[FULL] = with_tricks(recipe, tricks, tricks)
    if config.has_leave_one_out:
        for trick in tricks[:-1]:  # without the last they are those before it
            others = [other for other in tricks if other is not trick]
            found[f"all but {trick.name}"] = with_tricks(recipe, others, tricks)
    num_steps = config.num_warmup + config.num_steps
    return {name: replace(r, train=replace(r.train, num_steps=num_steps)) for name, r in found.items()}


def ablate(
    variants: Mapping[str, Recipe],
    folder: Path,
    config: AblationConfig,
    *,
    tricks: Sequence[Trick] = TRICKS,
    left_out: Mapping[str, str] | None = None,
) -> Generator[tuple[str, dict[str, Any]], None, dict[str, Any]]:
    """Take all turns, yielding (variant, turn) as each ends; write and return the whole result.

    A folder that holds finished turns is gone on with. A turn that fails is noted with its last line, and its variant
    is not tried again by this call. Raises InputError where the folder is of other variants, or in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    take_lock(folder / LOCK)
    try:
        return (yield from _ablate(variants, folder, config, tricks, left_out or {}))
    finally:
        release_lock(folder / LOCK)


def _ablate(
    variants: Mapping[str, Recipe],
    folder: Path,
    config: AblationConfig,
    tricks: Sequence[Trick],
    left_out: Mapping[str, str],
) -> Generator[tuple[str, dict[str, Any]], None, dict[str, Any]]:
    described = {name: plain(asdict(recipe)) for name, recipe in variants.items()}
    result: dict[str, Any] = {
        "config": asdict(config),
        "tricks": [trick.name for trick in tricks],
        "left_out": dict(left_out),
        "environment": describe_environment(),
        "turns": {name: [] for name in variants},
        "failures": {},
        "variants": described,
    }
    if (folder / RESULT).exists():
        before = read_json(folder / RESULT)
        alike = ("num_processes", "num_warmup")
        if before["variants"] != described or any(before["config"].get(n) != result["config"][n] for n in alike):
            raise InputError(f"{folder} holds an ablation of other variants: give another folder")
        result["turns"] = before["turns"]  # what failed may have been killed: it is tried again
    for number in range(config.num_rounds):
        for name, recipe in variants.items():
            if len(result["turns"][name]) > number or name in result["failures"]:
                continue
            try:
                turn = run_turn(recipe, folder, config)
            except RuntimeError as error:
                warnings.warn(f"{name}: {error}", stacklevel=2)
                result["failures"][name] = str(error)
            else:
                result["turns"][name].append(turn)
                result["quality"] = judge_losses(result["turns"])
                yield name, turn
            write_json(folder / RESULT, result)
    return result


def judge_losses(turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Return a verdict on each variant's losses against the official baseline's, step by step, within ``LOSS_MARGIN``.

    Steps share samples and noise, so this speaks of the steps taken; `wamlab parity` judges what was learnt.
    """
    if not turns.get(OFFICIAL):
        return {}
    base = np.log(np.array(turns[OFFICIAL][0]["losses"], float))  # nothing, as a file says what is no number, is nan
    found: dict[str, str] = {}
    for name, own in turns.items():
        losses = np.array(own[0]["losses"], float) if own else np.zeros(0)
        if own and np.isfinite(losses).all():
            logs = np.log(losses)
            found[name] = compare_means(base, logs, margin=LOSS_MARGIN, metric="log loss", units="steps").verdict
        elif own:
            found[name] = "different"
    return found


def run_turn(
    recipe: Recipe,
    folder: Path,
    settings: AblationConfig | None = None,
    *,
    module: str = TURN,
    python: str = sys.executable,
) -> dict[str, Any]:
    """Train a few steps in a process of its own, or several; return what it says. Raises RuntimeError if it fails.

    ``module`` takes the turn; another one is how a bench asks a peer.
    """
    settings = settings or AblationConfig()
    num_processes = settings.num_processes
    config, found = folder / "turn.json", folder / "turn_result.json"
    write_json(config, asdict(recipe))
    found.unlink(missing_ok=True)
    words = [str(config), str(found), str(settings.num_warmup)]
    command = [python, "-m", module, *words]
    if num_processes > 1:
        command = torchrun_command(num_processes, module, words, python=python)
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes))}
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent.resolve() / "compiled")}
    log = folder / "turn.log"
    with log.open("w") as stream:
        environment = threads | cache | os.environ | tie()  # no turn goes on beside those of the next call
        done = subprocess.run(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode or not found.exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        # torchrun's own last word names no cause
        errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
        said = (errors or lines or ["it said nothing"])[-1][:300]
        raise RuntimeError(f"stopped with status {done.returncode}: {said}")
    turn = read_json(found)
    config.unlink()
    found.unlink()
    return turn


def prepare_features(recipe: Recipe, tricks: Sequence[Trick], *, say: Callable[[str], Any] = print) -> float:
    """Fill the feature store that the variants with stored features read; return seconds a window that was missing."""
    from wamlab.recipes.build import Workbench
    from wamlab.recipes.encode import encode_features

    if "stored features" not in {trick.name for trick in tricks}:
        return 0.0
    bench = Workbench(replace(recipe, features=replace(recipe.features, mode="cached-if-present")))
    num_before, start_s = len(bench.store.windows), time.perf_counter()
    say(f"features for the variants that read them: {encode_features(bench)}")
    num_new = len(Workbench(bench.recipe).store.windows) - num_before
    return (time.perf_counter() - start_s) / num_new if num_new > 0 else 0.0
