"""Answer an experiment's question anew: its benchmark, its decision rule, its verdict.

    python experiments/run.py 2026-12-03_recompute [--figures FILE] [--out FILE]

A folder with an ``experiment.yaml`` names the question, the hypothesis and the decision rule (written before the
measurement), the benchmark that measures and its parameters. The verdict goes to ``summary.json`` beside it. FILE of
``--figures`` is what ``wamlab bench NAME --json`` printed before: that is judged instead of a new run.
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from wamlab.errors import InputError
from wamlab.lab.records import write_json
from wamlab.recipes.bench import run_bench

HOME = Path(__file__).parent
FIELDS = {"question", "hypothesis", "bench", "parameters", "rule"}
SIGNS = {">=": operator.ge, "<=": operator.le}


def read_experiment(name: str) -> dict[str, Any]:
    """Read what a folder asks; raises InputError for one that lacks something."""
    path = HOME / name / "experiment.yaml"
    if not path.is_file():
        raise InputError(f"there is no {path}: give one of {', '.join(list_experiments())}")
    asked = yaml.safe_load(path.read_text())
    if not isinstance(asked, dict) or asked.keys() != FIELDS:
        raise InputError(f"{path} must say {', '.join(sorted(FIELDS))} and nothing else")
    return asked


def read_figures(path: Path) -> dict[str, Any]:
    """Return what a benchmark's last line of JSON says; raises InputError where there is none."""
    try:
        return json.loads([line for line in path.read_text().splitlines() if line.startswith("{")][-1])
    except (OSError, IndexError, ValueError) as error:
        raise InputError(f"{path} holds no line that wamlab bench NAME --json prints ({error})") from error


def list_experiments() -> list[str]:
    return sorted(path.parent.name for path in HOME.glob("*/experiment.yaml"))


def judge(rule: Mapping[str, str], figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return of each figure in a rule such as ``{"gain": ">= 0.1"}`` its value, the bar and whether it is met.

    A name with slashes looks into figures of figures. Raises InputError for a figure that was not measured.
    """
    found = {}
    for name, bar in rule.items():
        sign, _, limit = bar.partition(" ")
        value: Any = figures
        for part in name.split("/"):
            if not isinstance(value, Mapping) or part not in value:
                raise InputError(f"the rule asks for {name}, which was not measured")
            value = value[part]
        found[name] = {"value": value, "bar": bar, "is_met": bool(SIGNS[sign](value, float(limit)))}
    return found


def main(words: list[str]) -> int:
    """Run or judge, write the summary; exit status 1 where the hypothesis fell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    try:
        asked = read_experiment(given.experiment)
        if given.figures is None:
            figures = run_bench(asked["bench"], is_quick=asked["parameters"]["is_quick"])
        else:
            figures = read_figures(given.figures)
            if figures.get("bench") != asked["bench"]:
                raise InputError(f"{given.figures} is of the benchmark {figures.get('bench')}, not {asked['bench']}")
        verdict = judge(asked["rule"], figures)
    except InputError as error:
        print(f"experiment: {error}", file=sys.stderr)
        return 2
    is_met = all(one["is_met"] for one in verdict.values())
    out = given.out or HOME / given.experiment / "summary.json"
    write_json(out, {"question": asked["question"], "holds": is_met, "verdict": verdict, "figures": figures})
    for name, one in verdict.items():
        print(f"{'met   ' if one['is_met'] else 'missed'} {name}: {one['value']:.4g} (bar {one['bar']})")
    print(f"the hypothesis {'holds' if is_met else 'falls'}: {out}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
