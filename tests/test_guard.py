"""The guards of ratios, import time and public names, and that each notices one planted regression."""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import public_api
import pytest

from wamlab.cli import main
from wamlab.errors import InputError
from wamlab.recipes.bench_guard import judge, keep_ratios, read_baseline
from wamlab.rl.length_models import LENGTH_MODELS, draw_lengths
from wamlab.rl.rules import RULES
from wamlab.rl.service import SERVICES
from wamlab.rl.simulate import simulate

ROOT = Path(__file__).resolve().parents[1]
BENCHES = ROOT / "experiments/bench"
IMPORT_LIMIT_S = 0.15  # of CPU time beyond that of a bare interpreter
HEAVY = ("torch", "pyarrow", "av", "transformers", "diffusers", "plotly")


def import_s(module: str, folder: Path, *, num_rounds: int = 5) -> float:
    """Return the CPU seconds that importing a module below a folder takes beyond a bare start; medians of rounds."""

    def spent_s(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(spent_s(f"import {module}"), spent_s("pass")) for _ in range(num_rounds)]
    return statistics.median(own - bare for own, bare in pairs)


def heavy_parts(module: str, folder: Path) -> list[str]:
    """Return which heavy packages importing a module brings in."""
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=folder, capture_output=True)
    return done.stdout.decode().split()


def test_importing_the_package_is_quick_and_brings_in_nothing_heavy() -> None:
    assert import_s("wamlab", ROOT) <= IMPORT_LIMIT_S
    assert heavy_parts("wamlab, wamlab.errors", ROOT) == []


def test_watching_runs_brings_in_no_torch() -> None:
    modules = [
        f"wamlab.lab.{path.stem}" for path in sorted((ROOT / "wamlab/lab").glob("*.py")) if path.stem != "__init__"
    ]
    assert "torch" not in heavy_parts(", ".join(modules), ROOT)


def test_a_planted_slow_import_is_noticed(tmp_path: Path) -> None:
    package = tmp_path / "wamlab"
    package.mkdir()
    shutil.copy(ROOT / "wamlab/__init__.py", package / "__init__.py")
    assert import_s("wamlab", tmp_path, num_rounds=3) <= IMPORT_LIMIT_S
    slow = (
        "import time\nend_s = time.process_time() + 0.4\nwhile time.process_time() < end_s:\n    pass\nimport pyarrow\n"
    )
    with (package / "__init__.py").open("a") as file:
        file.write(slow)
    assert import_s("wamlab", tmp_path, num_rounds=3) > IMPORT_LIMIT_S
    assert heavy_parts("wamlab", tmp_path) == ["pyarrow"]


def test_public_names_change_with_a_line_in_the_changelog_only() -> None:
    changed = public_api.differences(ROOT)
    assert not changed, f"{public_api.ADVICE}: {changed[:10]} ({len(changed)})"


def test_a_planted_change_of_a_signature_is_noticed_until_the_changelog_says_it(tmp_path: Path) -> None:
    (tmp_path / "wamlab").mkdir()
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "wamlab/errors.py", tmp_path / "wamlab/errors.py")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    assert public_api.write(tmp_path) == "" and public_api.differences(tmp_path) == []
    source = tmp_path / "wamlab/errors.py"
    source.write_text(source.read_text().replace("def advice_for(error: OSError)", "def advice_for(fault: OSError)"))
    assert public_api.differences(tmp_path) == [
        "+ wamlab.errors.advice_for(fault: OSError)", "- wamlab.errors.advice_for(error: OSError)",
    ]  # fmt: skip
    assert "CHANGELOG.md did not" in public_api.write(tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n- advice_for: its argument is called fault\n")
    assert public_api.write(tmp_path) == "" and public_api.differences(tmp_path) == []


def figures_of(**ratios: float) -> dict[str, Any]:
    return {"ratios": ratios, "benches": {}}


def test_a_band_is_as_wide_as_repeats_differ_and_never_nothing() -> None:
    repeats = [figures_of(noisy=value, steady=2.0) for value in (1.0, 1.2, 1.1)]
    kept = keep_ratios(repeats, {"noisy": "higher", "steady": "lower"})
    assert kept["noisy"].value == 1.1 and kept["noisy"].band == pytest.approx(0.4)
    assert kept["steady"].band == pytest.approx(0.1)
    assert not any(one.is_worse for one in judge(figures_of(noisy=0.75, steady=2.05), kept))
    assert [one.name for one in judge(figures_of(noisy=0.6, steady=1.0), kept) if one.is_worse] == ["noisy"]
    assert [one.name for one in judge(figures_of(noisy=2.0, steady=2.2), kept) if one.is_worse] == ["steady"]
    assert [one.name for one in judge(figures_of(noisy=2.0), kept) if one.is_worse] == ["steady"]  # missing
    with pytest.raises(InputError, match="at least 3"):
        keep_ratios(repeats[:2], {"noisy": "higher"})
    with pytest.raises(InputError, match="lack the ratio other"):
        keep_ratios(repeats, {"other": "higher"})


def test_a_planted_worse_ratio_ends_the_comparison_with_status_1(tmp_path: Path, capsys) -> None:
    kept = read_baseline(BENCHES / "baseline.json")
    (tmp_path / "same.json").write_text(json.dumps(figures_of(**{name: one.value for name, one in kept.items()})))
    assert main(["bench", "compare", str(tmp_path / "same.json")]) == 0
    for name, one in kept.items():
        sign = -1 if one.better == "higher" else 1
        worse = {other: ratio.value for other, ratio in kept.items()} | {name: one.value + sign * 1.2 * one.band}
        (tmp_path / "worse.json").write_text(json.dumps(figures_of(**worse)))
        capsys.readouterr()
        assert main(["bench", "compare", str(tmp_path / "worse.json")]) == 1
        assert f"worse than their bands: {name}\n" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"ratios": 3}', '{"ratios": {"a": "b"}}', "[" * 50_000])
def test_files_that_are_no_figures_or_no_baseline_are_refused(tmp_path: Path, text: str, capsys) -> None:
    (tmp_path / "odd.json").write_text(text)
    (tmp_path / "fine.json").write_text(json.dumps(figures_of(a=1.0)))
    assert main(["bench", "compare", str(tmp_path / "odd.json")]) == 2
    assert main(["bench", "compare", str(tmp_path / "fine.json"), "--against", str(tmp_path / "odd.json")]) == 2
    assert all(line.startswith("wamlab: ") for line in capsys.readouterr().err.strip().splitlines())


@lru_cache
def simulated_s(model: str, rule: str, seed: int) -> float:
    """Return how long an iteration of the quick bench takes in simulated time."""
    lengths = draw_lengths(LENGTH_MODELS[model], 24, 8, seed=seed)
    return simulate(lengths, RULES[rule], SERVICES["balanced"], num_workers=8, seed=seed).makespan_s


def simulated_ratios(fast: str) -> dict[str, float]:
    """Return by how much a rule plays faster than two others, on the length model where that is least."""
    return {
        f"rollouts.throughput_vs_{slow}": min(
            statistics.median(simulated_s(model, slow, seed) / simulated_s(model, fast, seed) for seed in range(2))
            for model in LENGTH_MODELS
        )
        for slow in ("padded", "static")
    }


def test_ratios_that_no_machine_changes_are_as_kept_and_a_planted_slower_rule_is_noticed() -> None:
    kept = read_baseline(BENCHES / "baseline.json")
    ratios = simulated_ratios("context")
    kept = {name: kept[name] for name in ratios}
    assert not [asdict(one) for one in judge({"ratios": ratios}, kept) if one.is_worse]
    assert all(one.is_worse for one in judge({"ratios": simulated_ratios("padded")}, kept))
