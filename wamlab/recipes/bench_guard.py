"""Ratios of benchmarks against kept ones: which got worse by more than they vary from one measurement to the next.

A file of figures has ``ratios`` (``bench.figure`` -> number), ``benches`` and what it was measured on; a baseline has
for each ratio its value, which direction is better, and a noise band.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from wamlab.errors import InputError
from wamlab.lab.table import Table

LEAST_BAND = 0.05  # of the value: few repeats on a quiet machine vary less than the next machine does
SPREADS = 2.0  # times the distance of the highest from the lowest repeat; three repeats are 1.7 deviations apart


@dataclass(frozen=True)
class KeptRatio:
    """A ratio as it was: the median of repeats, and how far it may be from that by chance."""

    value: float
    better: str  # "higher" or "lower"
    band: float  # in the ratio's own unit
    repeats: tuple[float, ...] = ()

    def loss_of(self, value: float) -> float:
        """Return by how much another value is worse, in bands; above 1 it is a regression."""
        worse = self.value - value if self.better == "higher" else value - self.value
        return worse / self.band


@dataclass(frozen=True)
class Judged:
    """A ratio beside the kept one."""

    name: str
    kept: KeptRatio
    value: float | None  # None where the benchmark did not give it

    @property
    def is_worse(self) -> bool:
        """Say whether it is worse by more than its band, or missing."""
        return self.value is None or self.kept.loss_of(self.value) > 1

    def row(self) -> dict[str, Any]:
        """Return a line for a table."""
        verdict = "missing" if self.value is None else "WORSE" if self.is_worse else "as before"
        if self.value is not None and self.kept.loss_of(self.value) < -1:
            verdict = "better"
        return {
            "ratio": self.name, "kept": self.kept.value, "band": self.kept.band, "now": self.value,
            "better is": self.kept.better, "verdict": verdict,
        }  # fmt: skip


def keep_ratios(repeats: Sequence[Mapping[str, Any]], directions: Mapping[str, str]) -> dict[str, KeptRatio]:
    """Return a baseline from the figures of at least three measurements: medians and the bands they show.

    Raises InputError for fewer, and for a ratio of ``directions`` that a measurement lacks.
    """
    if len(repeats) < 3:
        raise InputError(f"a baseline needs at least 3 measurements to know how much ratios vary, got {len(repeats)}")
    kept = {}
    for name, better in directions.items():
        values = [_ratios(figures).get(name) for figures in repeats]
        found = [value for value in values if value is not None]
        if len(found) < len(values):
            raise InputError(f"{len(values) - len(found)} of the measurements lack the ratio {name}: measure again")
        middle = statistics.median(found)
        band = max(LEAST_BAND * abs(middle), SPREADS * (max(found) - min(found)))
        kept[name] = KeptRatio(middle, better, band or 1e-9, tuple(found))
    return kept


def judge(figures: Mapping[str, Any], kept: Mapping[str, KeptRatio]) -> list[Judged]:
    """Return every kept ratio beside its new value.

    Raises InputError where the figures have none of the kept ratios.
    """
    ratios = _ratios(figures)
    judged = [Judged(name, ratio, ratios.get(name)) for name, ratio in kept.items()]
    if all(one.value is None for one in judged):
        raise InputError("the figures have none of the kept ratios: compare what `wamlab bench all` wrote")
    return judged


def compare_figures(path: Path, baseline: Path) -> list[Judged]:
    """Print every ratio of a measurement beside the kept one; return those that are worse by more than their bands."""
    judged = judge(read_figures(path), read_baseline(baseline))
    print(Table([one.row() for one in judged]))
    worse = [one for one in judged if one.is_worse]
    print(f"worse than their bands: {', '.join(one.name for one in worse) or 'none'}")
    return worse


def read_figures(path: Path) -> dict[str, Any]:
    """Read a file that ``wamlab bench all`` wrote.

    Raises InputError for one that is none.
    """
    document = _read(path)
    _ratios(document, f" in {path}")
    return document


def read_baseline(path: Path) -> dict[str, KeptRatio]:
    """Read a baseline.

    Raises InputError for one that is none.
    """
    entries = _read(path).get("ratios")
    if not isinstance(entries, dict):
        raise InputError(f"{path} is no baseline of ratios: `python experiments/bench/all.py --keep` writes one")
    kept = {}
    for name, entry in entries.items():
        values = entry if isinstance(entry, dict) else {}
        value, band, better = values.get("value"), values.get("band"), values.get("better")
        repeats = values.get("repeats", [])
        is_list = isinstance(repeats, list) and all(map(_is_number, repeats))
        if not (_is_number(value) and _is_number(band) and band > 0 and better in ("higher", "lower") and is_list):
            raise InputError(f"{name} in {path} needs a value, a band above 0 and better = higher or lower")
        kept[name] = KeptRatio(float(value), better, float(band), tuple(map(float, repeats)))
    return kept


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: give what `wamlab bench all` wrote") from error
    if not isinstance(document, dict):
        raise InputError(f"{path} is not an object of figures: give what `wamlab bench all` wrote")
    return document


def _ratios(figures: Mapping[str, Any], place: str = "") -> dict[str, float]:
    ratios = figures.get("ratios")
    if not isinstance(ratios, dict) or not all(map(_is_number, ratios.values())):
        raise InputError(f"there are no ratios{place}: give what `wamlab bench all` wrote")
    return {name: float(value) for name, value in ratios.items()}


def _is_number(value: object) -> TypeGuard[int | float]:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)
    )
