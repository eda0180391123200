"""Damaged run folders, normalisers and ablations: read, left out, or one sentence."""

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import FUZZ, Replaced, answer, damaged, damaged_json, damaged_lines
from hypothesis import given
from hypothesis import strategies as st

from wamlab.data.normalize import Normalizers, normalizers_from_dict
from wamlab.errors import InputError
from wamlab.lab.ablation import ablation_table, factor_table, read_ablation, write_figures
from wamlab.lab.comparison import Comparison, write_comparison
from wamlab.lab.records import plain
from wamlab.lab.report import report_html, summary_table
from wamlab.lab.run import Run, create_run, open_run, read_evaluations, read_metrics
from wamlab.lab.search import list_runs
from wamlab.recipes.config import recipe_from_dict, tiny

STEP = {
    "step": 3, "loss": 1.5, "video_loss": 1.0, "action_loss": 0.5, "gradient_norm": 1.0, "learning_rate": 1e-3,
    "num_samples": 4, "step_s": 0.1, "split_s": {"data": 0.1, "forward": 0.2}, "memory_gib": 1.0, "samples_per_s": 4.0,
}  # fmt: skip
EVALUATION = {"step": 3, "held_out_loss": 1.0, "held_out_loss_by_level": {"0.1": 1.0}, "action_error": 0.2}
NORMALIZERS: dict[str, Any] = {
    "action": {"kind": "Quantiles", "low": [-1.0, 0.0], "high": [1.0, 2.0]},
    "state": {"kind": "Spread", "mean": [0.0, 1.0], "std": [1.0, 2.0]},
    "relative_dims": [0], "max_action_dim": 4, "max_state_dim": 5,
}  # fmt: skip
TURN = {
    "step_s": 0.1, "cpu_s": 0.1, "losses": [1.0, 0.9], "used": {"mfu": 0.1}, "num_samples": 4, "num_processes": 1,
    "memory_gib": 1.0, "warmup_s": 0.1, "split_s": {"forward": 0.1},
}  # fmt: skip
ABLATION = {
    "tricks": ["text once", "compiled blocks"], "failures": {}, "variants": {}, "left_out": {},
    "environment": {"gpus": [], "cpu": {"name": "cpu"}}, "quality": {"all tricks": "equivalent"},
    "turns": {"official baseline": [TURN], "+ text once": [TURN], "all tricks": [TURN], "FSDP2 base": [TURN]},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a finished run with everything that a run folder holds."""
    root = tmp_path_factory.mktemp("runs")
    with create_run(root, "tiny", tiny(), started=datetime(2026, 4, 1)) as made:
        for step in (1, 2, 3):
            made.log(STEP | {"step": step})
        made.log_evaluation(EVALUATION)
        made.finish(summary={"held_out_loss": 1.0, "episodes": [{"seed": 1}]})
    with create_run(tmp_path_factory.mktemp("others"), "other", {"name": "other"}) as other:
        other.log(STEP)
    (made.folder / "normalizers.json").write_text(json.dumps(NORMALIZERS))
    (made.folder / "ablation.json").write_text(json.dumps(ABLATION))
    return open_run(made.folder)


def use(run: Run) -> None:
    """Look at a run in every way that opens no checkpoint."""
    root = run.folder.parent
    answer(lambda: str(list_runs(root)))
    answer(lambda: summary_table(run))
    page = answer(lambda: report_html(run))
    assert isinstance(page, InputError) or "<img src=x" not in page
    answer(lambda: read_metrics(run))
    answer(lambda: read_evaluations(run))
    answer(lambda: run.chart().svg)
    answer(lambda: run.environment)
    answer(lambda: run.summary)
    others = [other for other in root.parent.glob("others*/*") if (other / "status.json").exists()]
    written = answer(lambda: write_comparison(Comparison((run, open_run(others[0]))), root / ".comparison.html"))
    assert isinstance(written, InputError) or "<img src=x" not in written.read_text()


def test_a_whole_run_answers_everything(run: Run) -> None:
    use(run)
    assert run.state == "finished" and len(read_metrics(run)[0]) == 3
    assert recipe_from_dict(run.config) == tiny()


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_run_folders_are_read_or_refused(run: Run, data: st.DataObject) -> None:
    names = ("status.json", "config.json", "environment.json", "summary.json", "metrics.jsonl", "evaluations.jsonl")
    name = data.draw(st.sampled_from(names))
    text = (run.folder / name).read_text()
    if name.endswith("l"):
        damage = data.draw(damaged_lines([json.loads(line) for line in text.splitlines()]))
    else:
        damage = data.draw(damaged_json(json.loads(text)))
    with Replaced(run.folder / name, damage):
        use(run)
        if name == "config.json":
            found = answer(lambda: recipe_from_dict(run.config))
            assert isinstance(found, InputError) or answer(lambda: recipe_from_dict(plain(asdict(found)))) is not None


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_normalizers_are_refused_or_act(data: st.DataObject) -> None:
    values = data.draw(damaged(NORMALIZERS))
    found = answer(lambda: normalizers_from_dict(values)) if isinstance(values, dict) else None
    if isinstance(found, Normalizers):
        actions = np.zeros((1, 3, found.max_action_dim), np.float32)
        moved = answer(lambda: found.actions_to_robot(actions, np.zeros((1, found.num_states), np.float32)))
        assert moved.shape == (1, 3, found.num_actions) and np.isfinite(moved).all()
        assert found.state_to_model(np.zeros((1, found.num_states))).shape == (1, found.max_state_dim)


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_ablations_are_drawn_or_refused(run: Run, data: st.DataObject) -> None:
    with Replaced(run.folder / "ablation.json", data.draw(damaged_json(ABLATION))):
        answer(lambda: str(ablation_table(read_ablation(run.folder))))
        answer(lambda: str(factor_table(read_ablation(run.folder))))


def test_an_ablation_page_shows_hostile_names_as_text(tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)>"
    turns = {bad if name == "+ text once" else name: turn for name, turn in ABLATION["turns"].items()}
    document = ABLATION | {"turns": turns, "environment": {"gpus": [{"name": bad}], "cpu": {"name": bad}}}
    (tmp_path / "ablation.json").write_text(json.dumps(document))
    assert "<img src=x" not in write_figures(tmp_path).read_text()
