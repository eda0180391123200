"""What a sweep's file says: a recipe, changes common to all, a grid, a list, and how much may be spent.

::

    name: rates
    recipe: tiny                       # a name, or the config.json of a run
    base: {train.num_steps: 200}
    grid:                              # every combination
      train.learning_rate: [1e-3, 3e-3]
      train.seed: [0, 1]
    list:                              # each with every combination of the grid
      - {model.layers: 2}
      - {model.layers: 4, model.dim: 96}
    processes: 1                       # of each run
    restarts: 0
    parallel: 2                        # runs at a time
    budget: {runs: 8, minutes: 60}     # of one call; what is left is done by the next
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from wamlab.errors import InputError, check_range
from wamlab.lab.folders import slug_of
from wamlab.lab.records import plain

MAX_TRIALS = 10_000


@dataclass(frozen=True)
class Budget:
    """What one call of a sweep may spend."""

    runs: float = math.inf  # to start or to go on with
    minutes: float = math.inf  # after these the runs stop with checkpoints

    def __post_init__(self) -> None:
        check_range("budget", self, 0, math.inf, "runs", "minutes")


@dataclass(frozen=True)
class Sweep:
    """A sweep as its file says it."""

    name: str
    recipe: str
    base: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    list: tuple[Mapping[str, Any], ...] = ()
    processes: int = 1
    restarts: int = 0
    parallel: int = 1
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        slug_of(self.name)
        check_range("sweep", self, 1, 1024, "processes", "parallel")
        check_range("sweep", self, 0, 1024, "restarts")
        if both := sorted({*self.base} & {*self.grid} | {*self.grid} & {name for item in self.list for name in item}):
            raise InputError(f"{', '.join(both)} is said twice, in grid and elsewhere: say it once")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep; its name tells its changes apart from all others."""

    name: str
    changes: Mapping[str, Any]  # of the recipe, by dotted name
    varied: Mapping[str, Any]  # those that differ between trials


def read_sweep(document: Any, where: str) -> Sweep:
    """Return the sweep that a YAML document says; InputError naming what is odd in it."""
    known = {f.name for f in fields(Sweep)}
    if not isinstance(document, dict) or not {"name", "recipe"} <= document.keys():
        raise InputError(f"{where} needs at least name: and recipe:")
    if odd := sorted(map(str, document.keys() - known)):
        raise InputError(f"{where} has {', '.join(odd)}, which no sweep has: it has {', '.join(sorted(known))}")
    values = dict(document)
    for name in ("name", "recipe"):
        if not isinstance(values[name], str) or not values[name]:
            raise InputError(f"{where}: {name} is {values[name]!r}, not a word")
    for name, kind in (("base", dict), ("grid", dict), ("list", list), ("budget", dict)):
        if name in values and not isinstance(values[name], kind):
            raise InputError(f"{where}: {name} is no {'mapping' if kind is dict else 'list'}")
    if not all(isinstance(item, dict) for item in values.get("list", [])):
        raise InputError(f"{where}: each entry of list is a mapping of fields, such as {{model.layers: 2}}")
    for name, tried in values.get("grid", {}).items():
        if not isinstance(tried, list) or not tried:
            raise InputError(f"{where}: grid.{name} is {tried!r}: give a list of values to try")
    entries = [values.get("base", {}), values.get("grid", {}), *values.get("list", [])]
    if odd := [name for entry in entries for name in entry if not isinstance(name, str)]:
        raise InputError(f"{where} varies {odd[0]!r}: name fields of the recipe, such as train.seed")
    for name in ("processes", "restarts", "parallel"):
        if name in values and type(values[name]) is not int:
            raise InputError(f"{where}: {name} is {values[name]!r}, not a whole number")
    budget = values.pop("budget", {})
    if odd := sorted(budget.keys() - asdict(Budget()).keys()):
        raise InputError(f"{where}: budget has {', '.join(odd)}: it has runs and minutes")
    if odd := [name for name, v in budget.items() if type(v) not in (int, float) or 1e300 < abs(v) < math.inf]:
        raise InputError(f"{where}: budget.{odd[0]} is {str(budget[odd[0]])[:40]!r}, not a number")
    values["list"] = tuple(values.get("list", ()))
    return Sweep(**values, budget=Budget(**{name: float(value) for name, value in budget.items()}))


def list_trials(sweep: Sweep) -> list[Trial]:
    """Return the trials in the order of the file: of each entry of the list all combinations of the grid."""
    names, values = [*sweep.grid], [*sweep.grid.values()]
    num_trials = math.prod(map(len, values)) * max(1, len(sweep.list))
    if num_trials > MAX_TRIALS:
        raise InputError(f"{sweep.name} has {num_trials:,} trials, above {MAX_TRIALS:,}: make it smaller")
    trials: dict[str, Trial] = {}
    for entry in sweep.list or ({},):
        for chosen in itertools.product(*values):
            varied = {**entry, **dict(zip(names, chosen, strict=True))}
            changes = {**sweep.base, **varied}
            told = json.dumps(plain([sweep.recipe, sweep.processes, changes]), sort_keys=True)
            name = f"{slug_of(sweep.name)}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"
            trials.setdefault(name, Trial(name, changes, varied))
    return [*trials.values()]
