"""Threads or a helper process: what decides, what is written down, and that training is the same."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_recipes import small

from wamlab.data.apart import ApartLoader, measure_slowdown
from wamlab.data.loader import ClipLoader
from wamlab.data.write import write_dataset
from wamlab.lab.run import read_metrics
from wamlab.recipes import loading
from wamlab.recipes.build import Workbench
from wamlab.recipes.fit import fit, start_run
from wamlab.sim.experts import play_episodes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(play_episodes(("reach",), 8, seed=0, size=32), tmp_path_factory.mktemp("data") / "reach")


def roomy(monkeypatch: pytest.MonkeyPatch, slowdown: float) -> None:
    """Give a short run all reasons to measure, and a figure to find."""
    monkeypatch.setattr(loading, "MIN_STEPS", 1)
    monkeypatch.setattr(loading, "num_cores", lambda: 4)
    monkeypatch.setattr(loading, "measure_slowdown", lambda start: (start(), slowdown))


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("slowdown", "kind"), [(4.0, ApartLoader), (1.1, ClipLoader)])
def test_what_was_measured_decides_is_written_down_and_changes_no_number(root, slowdown, kind, monkeypatch, tmp_path):
    def story(runs: Path) -> tuple[list[float], list[dict[str, Any]]]:
        bench = Workbench(small(root))
        with start_run(bench, runs) as run:
            for _ in fit(bench, run):
                pass
        lines = (run.folder / "loader.jsonl").read_text().splitlines()
        return [record["loss"] for record in read_metrics(run)[0]], [json.loads(line) for line in lines]

    losses, (choice,) = story(tmp_path / "short")
    assert not choice["is_apart"]
    assert choice["why"] == "6 steps are fewer than the 200 that pay for the start of a helper"
    roomy(monkeypatch, slowdown)
    others, (choice,) = story(tmp_path / "measured")
    assert choice["is_apart"] == (kind is ApartLoader)
    assert choice["slowdown"] == slowdown
    assert f"take {slowdown:.2f} times as long" in choice["why"]
    assert others == losses


def test_a_measurement_is_short_and_a_given_choice_needs_none(root, monkeypatch):
    roomy(monkeypatch, 9.0)
    heard: list[loading.LoaderChoice] = []
    given = replace(small(root), data=replace(small(root).data, is_apart=False))
    Workbench(given).clips(tell=heard.append).close()
    monkeypatch.setattr(loading, "measure_slowdown", measure_slowdown)
    monkeypatch.setattr(loading, "MAX_SLOWDOWN", float("inf"))
    stream = Workbench(small(root)).clips(tell=heard.append)
    assert len(next(stream)) == 4
    stream.close()
    assert [choice.why[:22] for choice in heard] == ["data.is_apart is False", "small operations take "]
    assert heard[1].slowdown is not None
    assert heard[1].measured_s < 2


def test_where_a_helper_cannot_be_or_cannot_pay_threads_stay(root, monkeypatch):
    recipe = small(root)
    roomy(monkeypatch, 9.0)
    assert loading.reason_for_threads(recipe, 6) == ""
    assert "num_threads is 0" in loading.reason_for_threads(
        replace(recipe, data=replace(recipe.data, num_threads=0)), 6
    )
    monkeypatch.setattr(loading, "room_for_batches", lambda: 2**16)
    assert "shared memory has no room" in loading.reason_for_threads(recipe, 6)
    monkeypatch.setattr(loading, "num_cores", lambda: 1)
    assert loading.reason_for_threads(recipe, 6) == "1 core has no room for a helper"


def test_a_script_that_would_run_again_is_noticed(tmp_path, monkeypatch):
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert loading.has_guarded_main()  # a notebook
    script = tmp_path / "job.py"
    main.__file__ = str(script)
    script.write_text("train()\n")
    assert not loading.has_guarded_main()
    script.write_text('if __name__ == "__main__":\n    train()\n')
    assert loading.has_guarded_main()
    script.unlink()
    assert not loading.has_guarded_main()
