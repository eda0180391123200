"""The runs below a folder as a table, all of them or those whose config says what is asked for."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.folders import run_folders
from wamlab.lab.records import Record, read_last
from wamlab.lab.report import flattened
from wamlab.lab.run import Run
from wamlab.lab.table import Table

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "=": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
CONDITION = re.compile(r"\s*([\w.\- ]+?)\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*")
WORDS = {"true": True, "yes": True, "false": False, "no": False, "none": None, "null": None}


@dataclass(frozen=True)
class Condition:
    """A value that a field of a run's config must have, or be above or below."""

    name: str  # dotted, as ``train.learning_rate``
    sign: str  # one of OPERATORS
    value: Any

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.value}"

    def fits(self, config: Record) -> bool:
        """Say whether a config, flattened, has such a value; one without the field has not."""
        if self.name not in config:
            return False
        found = config[self.name]
        if self.sign in ("=", "!="):
            is_same = found == self.value or (is_number(found, self.value) and math.isclose(found, self.value))
            is_same = is_same or (isinstance(found, str) and found == str(self.value))
            return is_same == (self.sign == "=")
        return is_number(found, self.value) and OPERATORS[self.sign](found, self.value)


def is_number(*values: Any) -> bool:
    """Say whether all values are numbers; yes and no are none."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def read_condition(text: str) -> Condition:
    """Read ``train.learning_rate=1e-3``; also ``!= < <= > >=``. Raises InputError for what says none of these."""
    found = CONDITION.fullmatch(text)
    if found is None:
        raise InputError(f'"{text}" is no condition: write one such as train.learning_rate=1e-3 or model.layers>=4')
    name, sign, value = found.groups()
    return Condition(name.replace("-", "_"), sign, value_of(value))


def value_of(text: str) -> Any:
    """Return the number, truth value or nothing that a text says, else the text."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def find_runs(root: str | Path, where: Sequence[Condition] = ()) -> list[Run]:
    """Return the runs whose configs meet all conditions, oldest first; damaged ones meet none.

    Raises InputError, with the nearest names, for a field that no run has.
    """
    runs = [Run(folder) for folder in run_folders(Path(root))]
    if not where:
        return runs
    configs = [_config_of(run) for run in runs]
    known = {name for config in configs for name in config}
    for condition in where:
        if runs and condition.name not in known:
            near = difflib.get_close_matches(condition.name, known, n=3, cutoff=0.4)
            raise InputError(f"no run in {root} has a field {condition.name}: {', '.join(near) or 'see config.json'}")
    return [run for run, config in zip(runs, configs, strict=True) if all(c.fits(config) for c in where)]


def list_runs(root: str | Path, where: Sequence[Condition] = ()) -> Table:
    """Return one row a run, oldest first: name, state, step, losses, error of its newest evaluation.

    Fields that conditions name are shown too.
    """
    return Table([_row(run, [condition.name for condition in where]) for run in find_runs(root, where)])


def _config_of(run: Run) -> Record:
    try:
        return flattened(run.config)
    except InputError:
        return {}


def _row(run: Run, names: Sequence[str]) -> Record:
    """Describe a run in one row; a damaged folder says so and hides no other."""
    try:
        status = run.status
        last = read_last(run.folder / "metrics.jsonl") or {}
        evaluation = read_last(run.folder / "evaluations.jsonl") or {}
        state = "paused" if status["state"] == "running" and status.get("is_paused") else status["state"]
    except (InputError, KeyError, TypeError, OSError):
        return {"run": run.name, "state": "damaged"}
    config = _config_of(run) if names else {}
    row = {"run": run.name, "state": state} | {name: config.get(name) for name in names}
    row |= {"step": last.get("step"), "loss": last.get("loss")}
    shown = {"held-out loss": "held_out_loss", "action error": "action_error", "video PSNR dB": "video_psnr_db"}
    return row | {title: evaluation.get(name) for title, name in shown.items()}
