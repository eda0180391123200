"""Benchmarks: paired ratios, the command, diagrams."""

import json
import time

import pytest
import torch

from wamlab.cli import main
from wamlab.errors import InputError
from wamlab.lab.chart import Chart
from wamlab.lab.diagrams import mask_png, schedule_chart
from wamlab.recipes.bench import list_benches, run_bench
from wamlab.speed.compare import compare


def spend(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def test_ratios_are_paired_and_warm_up_is_apart() -> None:
    calls = {"slow": 0, "fast": 0}

    def slow() -> None:
        calls["slow"] += 1
        spend(0.02)

    def fast() -> None:
        calls["fast"] += 1
        spend(0.05 if calls["fast"] == 1 else 0.005)  # as if the first call compiled

    found = compare({"slow": slow, "fast": fast}, num_rounds=3)
    assert calls == {"slow": 4, "fast": 4}
    assert found["slow"].speedups == (1.0, 1.0, 1.0)
    assert found["fast"].warmup_s >= 0.05
    row = found["fast"].row()
    assert 2 < row["lowest"] <= row["speed-up, median"] <= row["highest"]
    assert len(compare({"slow": slow}, num_rounds=9, budget_s=0.0)["slow"].seconds) == 2


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert {"network", "sampling"} <= set(capsys.readouterr().out.split())
    assert main(["bench", "netwrk"]) == 2
    assert 'did you mean "network"?' in capsys.readouterr().err


def test_a_bench_prints_its_figures_as_json_last(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    (tmp_path / "toy.py").write_text(
        "def run(*, is_quick):\n    print('table')\n    return {'speedup': 2.0 if is_quick else 3.0}\n"
    )
    monkeypatch.setattr("wamlab.recipes.bench.BENCHES", tmp_path)
    assert main(["bench", "toy", "--quick", "--json"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert "table" in lines
    figures = json.loads(lines[-1])
    assert figures["speedup"] == 2.0
    assert {"bench", "hardware", "commit"} <= figures.keys()
    assert list_benches() == ["toy"]
    assert main(["bench", "toy", str(tmp_path)]) == 2
    assert "takes no dataset" in capsys.readouterr().err
    monkeypatch.setattr("wamlab.recipes.bench.BENCHES", tmp_path / "gone")
    with pytest.raises(InputError, match="run from a checkout"):
        run_bench("toy")


def test_diagrams_draw_what_they_are_given() -> None:
    mask = torch.eye(5, dtype=torch.bool).numpy()
    assert mask_png(mask, {"clean": 3, "noised": 2}).startswith(b"\x89PNG")
    with pytest.raises(InputError, match="does not fit groups of 4 tokens"):
        mask_png(mask, {"clean": 4})
    levels = torch.linspace(0, 1, 50).numpy()
    assert isinstance(schedule_chart(levels, levels, {"2 steps": [1.0, 0.8, 0.0]}), Chart)
