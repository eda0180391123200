"""Experiments: each finished one says what it asked, and its verdict follows from its figures by its own rule."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from wamlab.errors import InputError
from wamlab.recipes.bench import list_benches

SCRIPT = Path(__file__).parents[1] / "experiments" / "run.py"
spec = importlib.util.spec_from_file_location("experiments_run", SCRIPT)
assert spec is not None and spec.loader is not None
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)


@pytest.mark.parametrize("name", run.list_experiments())
def test_a_verdict_follows_from_the_committed_figures(name: str) -> None:
    asked = run.read_experiment(name)
    assert asked["bench"] in list_benches()
    summary = json.loads((SCRIPT.parent / name / "summary.json").read_text())
    assert summary["question"] == asked["question"]
    assert summary["verdict"] == run.judge(asked["rule"], summary["figures"])
    assert summary["holds"] == all(one["is_met"] for one in summary["verdict"].values())
    assert (SCRIPT.parent / "README.md").read_text().count(name) >= 1, "the diary has its line"


def test_a_bar_that_is_missed_fells_the_hypothesis(tmp_path: Path) -> None:
    name = "2026-12-03_recompute"
    figures = json.loads((SCRIPT.parent / name / "summary.json").read_text())["figures"]
    (tmp_path / "printed").write_text("a table\n" + json.dumps(figures | {"search_s": 9.0}) + "\n")
    words = [sys.executable, SCRIPT, name, "--figures", tmp_path / "printed", "--out", tmp_path / "summary.json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "missed search_s: 9 (bar <= 5)" in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["holds"] is False


def test_what_cannot_be_judged_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="asks for gain, which was not measured"):
        run.judge({"gain": ">= 1"}, {})
    with pytest.raises(InputError, match=r"give one of .*2026-12-03_recompute"):
        run.read_experiment("none")
    (tmp_path / "printed").write_text("no figures\n")
    with pytest.raises(InputError, match="holds no line"):
        run.read_figures(tmp_path / "printed")
