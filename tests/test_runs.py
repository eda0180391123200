"""Run folders searched, compared, asked, deleted, exported, sent; sweeps, notebooks and jobs before they run."""

import ast
import importlib.util
import shutil
import subprocess
import tarfile
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml

from wamlab.cli import main
from wamlab.errors import InputError
from wamlab.lab.comparison import Comparison, write_comparison
from wamlab.lab.control import read_wish
from wamlab.lab.run import Run, create_run
from wamlab.lab.search import find_runs, read_condition
from wamlab.lab.trackers import TRACKERS, figures_of, send
from wamlab.recipes.notebook import Parameter, check_parameters, read_parameters, read_yaml
from wamlab.recipes.sweep import sweep_table
from wamlab.recipes.sweep_file import list_trials, read_sweep


def finished(root: Path, name: str, rate: float, started: datetime, num_steps: int = 3, **more: Any) -> Run:
    """Write a run whose loss falls from its learning rate on."""
    config = {"name": name, "train": {"learning_rate": rate, "optimizer": "adamw", "has_bf16": False}, **more}
    with create_run(root, name, config, fingerprints={"clips": "a" * 40}, started=started) as run:
        for step in range(1, num_steps + 1):
            run.log({"step": step, "loss": rate / step, "samples_per_s": 10.0 * step, "memory_gib": 0.5})
        run.log_evaluation({"step": num_steps, "held_out_loss": rate / 2, "action_error": 0.5})
        run.finish(summary={"loss": rate / num_steps})
    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two finished runs and one that runs."""
    root = tmp_path_factory.mktemp("written")
    finished(root, "slow", 1e-3, datetime(2026, 4, 1))
    finished(root, "fast", 3e-3, datetime(2026, 4, 2), model={"layers": 4})
    config = {"name": "going", "train": {"learning_rate": 1e-2, "optimizer": "muon"}}
    create_run(root, "going", config, started=datetime(2026, 4, 3))
    return root


@pytest.fixture
def runs(written: Path, tmp_path: Path) -> Path:
    """Return a copy of these runs to do anything with."""
    return Path(shutil.copytree(written, tmp_path / "runs"))


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        ("train.learning_rate=1e-3", ["slow"]),
        ("train.learning_rate>=0.003", ["fast", "going"]),
        ("train.learning-rate < 3e-3", ["slow"]),
        ("train.optimizer=muon", ["going"]),
        ("train.optimizer!=muon", ["slow", "fast"]),
        ("train.has_bf16=no", ["slow", "fast"]),
        ("model.layers=4", ["fast"]),
    ],
)
def test_runs_are_found_by_values_of_their_configs(runs: Path, condition: str, names: list[str]) -> None:
    assert [run.config["name"] for run in find_runs(runs, [read_condition(condition)])] == names


def test_conditions_that_say_nothing_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "ls", "--root", str(runs), "--where", "train.learning_rat=1"]) == 2
    assert "no run in" in (said := capsys.readouterr().err) and "train.learning_rate" in said
    with pytest.raises(InputError, match='"fast" is no condition'):
        read_condition("fast")


def test_the_list_stays_and_shows_what_was_searched(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--root", str(runs)]) == 0
    plain = capsys.readouterr().out
    assert main(["runs", "ls", "--root", str(runs)]) == 0
    assert capsys.readouterr().out == plain and plain.count("finished") == 2
    assert main(["runs", "-w", "train.learning_rate>=1e-3", "-w", "model.layers=4", "--root", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "train.learning_rate" in lines[0] and "0.003" in lines[2]


def test_a_comparison_shows_differences_first_then_figures_then_curves(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["runs", "compare", "slow", "fast", "--root", str(runs), "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "train.learning_rate" in said and "train.optimizer" not in said
    assert said.index("train.learning_rate") < said.index("held-out loss")
    text = page.read_text()
    assert text.index("learning_rate") < text.index("held-out loss") < text.index("<svg")
    assert text.count('stroke-width="1.8"') >= 4  # two curves and the lines to their names
    comparison = Comparison(tuple(find_runs(runs)[:2]))
    assert {row["field"] for row in comparison.differences} == {"name", "train.learning_rate", "model.layers"}
    rates = next(row for row in comparison.differences if row["field"] == "train.learning_rate")
    assert [rates[label] for label in comparison.labels] == [1e-3, 3e-3]
    with pytest.raises(InputError, match="at least two"):
        Comparison(comparison.runs[:1])
    assert write_comparison(comparison, page) == page


def test_nothing_is_deleted_unasked_or_while_it_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(runs)]
    assert main(["runs", "rm", "slow", *root]) == 2
    assert "give --yes" in capsys.readouterr().err
    assert main(["runs", "rm", "slow", "going", "--yes", *root]) == 2
    assert "is running: stop it first" in capsys.readouterr().err
    assert len(find_runs(runs)) == 3
    assert main(["runs", "rm", "slow", "--yes", *root]) == 0
    assert [run.config["name"] for run in find_runs(runs)] == ["fast", "going"]


def names_in(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return set(archive.getnames())


def test_an_archive_leaves_out_what_is_heavy_unless_asked(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = find_runs(runs)[0]
    (run.checkpoints / "step_00000003").mkdir()
    (run.checkpoints / "step_00000003" / "model.safetensors").write_bytes(b"0" * 100)
    light, whole = tmp_path / "light.tar.gz", tmp_path / "whole.tar.gz"
    words = ["runs", "export", "slow", "--root", str(runs), "--out"]
    assert main([*words, str(light)]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert main([*words, str(whole), "--whole"]) == 0
    names = [names_in(path) for path in (light, whole)]
    heavy = f"{run.name}/checkpoints/step_00000003/model.safetensors"
    assert heavy not in names[0] and heavy in names[1] and f"{run.name}/metrics.jsonl" in names[0]
    assert main([*words, str(light)]) == 2
    with tarfile.open(light) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert find_runs(tmp_path / "there")[0].summary == run.summary


def test_a_running_run_is_asked_by_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, wish in (("pause", "pause"), ("go-on", "go on"), ("stop", "stop")):
        assert main(["runs", word, "going", "--root", str(runs)]) == 0
        assert read_wish(find_runs(runs)[2].folder) == wish
    assert main(["runs", "stop", "slow", "--root", str(runs)]) == 2
    assert "is finished" in capsys.readouterr().err


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_gets_every_record_offline(
    tracker: str, runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = find_runs(runs)[0]
    if importlib.util.find_spec(tracker) is None:
        with pytest.raises(InputError, match=f"run pip install 'wamlab\\[{tracker}\\]'"):
            send(run, tracker)
        pytest.skip(f"{tracker} is not installed: pip install 'wamlab[{tracker}]'")
    monkeypatch.chdir(tmp_path)
    assert send(run, tracker) == 4
    places = {"tensorboard": "tensorboard/events*", "wandb": "wandb/offline-run-*", "trackio": "../.trackio/*.db"}
    assert list(run.folder.glob(places[tracker]))


def test_figures_are_numbers_by_dotted_names() -> None:
    record = {"step": 3, "loss": 0.5, "split_s": {"data": 0.1, "note": "x"}, "is_last": True, "gap": None}
    assert figures_of(record, "train") == {"train/loss": 0.5, "train/split_s.data": 0.1}


def sweep_of(**changes: Any) -> dict[str, Any]:
    return {"name": "Rates", "recipe": "tiny", "grid": {"train.seed": [0, 1], "train.batch_size": [2, 4]}, **changes}


def test_a_sweep_is_every_combination_under_names_that_stay(tmp_path: Path) -> None:
    trials = list_trials(read_sweep(sweep_of(list=[{"model.layers": 2}, {"model.layers": 4}]), "file"))
    assert len({trial.name for trial in trials}) == 8
    assert trials[0].varied == {"model.layers": 2, "train.seed": 0, "train.batch_size": 2}
    grown = list_trials(read_sweep(sweep_of(grid={"train.seed": [5, 0], "train.batch_size": [2]}), "file"))
    same = list_trials(read_sweep(sweep_of(), "file"))
    assert grown[1].name == same[0].name and grown[0].name not in [trial.name for trial in same]
    (tmp_path / "runs").mkdir()
    assert [row["state"] for row in sweep_table(same, tmp_path / "runs")] == ["waiting"] * 4


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "needs at least name: and recipe:"),
        (sweep_of(gird={}), "gird, which no sweep has"),
        (sweep_of(grid={"train.seed": 3}), "grid.train.seed is 3: give a list"),
        (sweep_of(base={"train.seed": 3}), "train.seed is said twice"),
        (sweep_of(budget={"hours": 3}), "budget has hours"),
        (sweep_of(parallel="two"), "parallel is 'two', not a whole number"),
        (sweep_of(list=[3]), "each entry of list is a mapping"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(document: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_sweep(document, "rates.yaml")


def test_parameters_have_the_kinds_that_the_notebook_says(tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell(
        "import os\nrate: float = 1e-3  # of learning\nsteps: int = 3\nnote: str = ''\nx = 1"
    )
    cell.metadata["tags"] = ["parameters"]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path := tmp_path / "some.ipynb")
    known = read_parameters(path)
    assert known["rate"] == Parameter("rate", "float", "0.001") and [*known] == ["rate", "steps", "note", "x"]
    (tmp_path / "values.yaml").write_text("rate: 1e-4\nsteps: 7\nnote: 1e-4 is small\n")
    found = check_parameters(known, read_yaml(tmp_path / "values.yaml") | {"x": "free"})
    assert found == {"rate": 1e-4, "steps": 7, "note": "1e-4 is small", "x": "free"}
    assert check_parameters(known, {"rate": "2", "note": "3"}) == {"rate": 2.0, "note": "3"}
    for wrong, said in (
        ({"rate": "fast"}, "rate is 'fast', the notebook wants float"),
        ({"steps": 1.5}, "steps is 1.5, the notebook wants int"),
        ({"steps": True}, "steps is True"),
        ({"stepz": 1}, 'no parameter "stepz": did you mean "steps"'),
    ):
        with pytest.raises(InputError, match=said):
            check_parameters(known, wrong)


def test_files_for_many_machines_are_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = ["--jobs", str(tmp_path / "jobs folder"), "--nodes", "4", "--gpus", "8"]
    train = ["--data.root", "it's here", "--train.num-steps", "7", "--runs", str(tmp_path / "my runs")]
    for engine in ("slurm", "skypilot", "ray"):
        assert main(["submit", engine, "tiny", *jobs, *train]) == 0
    slurm, sky, ray = (tmp_path / "jobs folder" / f"tiny{end}" for end in (".sbatch", ".sky.yaml", "_ray.py"))
    subprocess.run(["bash", "-n", slurm], check=True)
    text = slurm.read_text()
    for line in ("#SBATCH --nodes=4", "#SBATCH --gpus-per-node=8", "#SBATCH --signal=B:USR1@300", "#SBATCH --requeue"):
        assert line in text.splitlines()
    assert "--nproc-per-node=8" in text and "my runs" in text and "$$" not in text
    task = yaml.safe_load(sky.read_text())
    assert task["num_nodes"] == 4 and task["resources"] == {"accelerators": "H100:8", "use_spot": True}
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    program = ast.parse(ray.read_text())
    words = next(n.value for n in program.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "WORDS")
    assert ast.literal_eval(words) == ["train", "tiny", "--data.root", "it's here", "--train.num-steps", "7"]
    assert "num_workers=4 * 8, use_gpu=True" in ray.read_text()
    capsys.readouterr()
    assert main(["submit", "pbs", "tiny"]) == 2
    assert "slurm, skypilot, ray" in capsys.readouterr().err
    assert main(["submit", "slurm", "tiny", *jobs, "--processes", "2"]) == 2
    assert "leave out --processes" in capsys.readouterr().err
