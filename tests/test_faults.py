"""Faults done to real runs: what is lost (nothing), what is said, and that going on gives the undisturbed numbers.

`wamlab bench faults` does the whole matrix; here are the cells that once lost something, and what it leaves to tests.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from wamlab.cli import main
from wamlab.errors import InputError
from wamlab.lab.lock import release_lock, take_lock
from wamlab.lab.records import append_line, read_lines
from wamlab.lab.run import Run, create_run, find_run, newest_run, read_metrics
from wamlab.recipes.sweep import _claim, run_sweep
from wamlab.recipes.sweep_file import list_trials, read_sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and signals of Linux")
NUM_STEPS = 12
OPTIONS = [
    "--robot.view-height-px", "32", "--robot.view-width-px", "32", "--model.layers", "1", "--model.dim", "48",
    "--model.ffn-dim", "96", "--evaluation.every", "100", "--evaluation.num-clips", "2", "--evaluation.noise-levels",
    "0.5", "--checkpoint-every", "5", "--train.num-steps", str(NUM_STEPS), "--train.batch-size", "2",
    "--sampler.num-steps", "1", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small dataset."""
    root = tmp_path_factory.mktemp("home") / "recorded"
    words = ["data", "make", str(root), "--families", "reach", "--episodes", "6", "--size-px", "32", "32"]
    assert main(words) == 0
    return root


def train(recorded: Path, runs: Path, *more: str) -> list[str]:
    return ["train", "tiny", "--data.root", str(recorded), *OPTIONS, "--runs", str(runs), *more]


@pytest.fixture(scope="module")
def whole(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run that nothing disturbed."""
    runs = tmp_path_factory.mktemp("whole")
    assert main(train(recorded, runs)) == 0
    return find_run(runs)


def told(run: Run) -> list[Any]:
    """Return a run's losses and its last weights."""
    weights = load_file(run.checkpoints / f"step_{NUM_STEPS:08d}" / "model.safetensors")
    records = [(r["step"], repr(r["loss"]), repr(r["gradient_norm"])) for r in read_metrics(run)[0]]
    return [*records, *((name, tensor.numpy().tobytes()) for name, tensor in sorted(weights.items()))]


def started(words: list[str], until: Callable[[], Any]) -> subprocess.Popen:
    """Start the real program and wait until something is so, or it has ended."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "wamlab.cli", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    end_s = time.monotonic() + 120
    while not until() and process.poll() is None:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    return process


def test_killed_before_its_first_checkpoint_a_run_begins_again(recorded: Path, whole: Run, tmp_path: Path) -> None:
    process = started(train(recorded, tmp_path), lambda: any(tmp_path.glob("[!.]*/status.json")))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run = find_run(tmp_path)
    assert run.state == "lost" and not list(run.checkpoints.glob("step_*"))
    assert main(train(recorded, tmp_path, "--resume")) == 0
    assert len(list(tmp_path.glob("*/status.json"))) == 1 and told(run) == told(whole)


def test_killed_after_its_last_checkpoint_a_run_is_ended_by_going_on(
    recorded: Path, whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(Path(shutil.copytree(whole.folder, tmp_path / whole.name)))
    (run.folder / "summary.json").unlink()
    status = json.loads((run.folder / "status.json").read_text())
    (run.folder / "status.json").write_text(json.dumps(status | {"state": "stopped"}))
    assert main(train(recorded, tmp_path, "--resume")) == 0
    assert run.state == "finished" and run.summary == whole.summary and told(run) == told(whole)
    assert main(train(recorded, tmp_path, "--resume")) == 2  # now it is done
    assert f"has {NUM_STEPS} steps" in capsys.readouterr().err


def test_a_file_that_may_not_grow_ends_the_run_with_whole_lines_and_it_goes_on(
    recorded: Path, whole: Run, tmp_path: Path
) -> None:
    """The limit lies in the middle of a line of the metrics: the system takes a part of it."""
    words = train(recorded, tmp_path, "--checkpoint-every", "100", "--train.batch-size", "2")
    process = started(words, lambda: num_bytes(tmp_path) > 900)
    limit = num_bytes(tmp_path) + 700
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    _, said = process.communicate()
    run = find_run(tmp_path)
    lines = (run.folder / "metrics.jsonl").read_bytes()
    assert process.returncode == 2 and "cannot be written" in said
    assert lines.endswith(b"\n") and 1 <= lines.count(b"\n") <= NUM_STEPS
    assert main(train(recorded, tmp_path, "--checkpoint-every", "100", "--resume")) == 0
    assert told(run) == told(whole)


def num_bytes(runs: Path) -> int:
    return sum(path.stat().st_size for path in runs.glob("[!.]*/metrics.jsonl"))


def test_a_line_that_was_written_in_part_is_taken_back(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from wamlab.errors import InputError
from wamlab.lab.records import append_line
path = Path(sys.argv[1])
append_line(path, {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, resource.RLIM_INFINITY))
try:
    append_line(path, {"step": 2})
except InputError as error:
    assert "raise it" in str(error), error
else:
    sys.exit("nothing was said")
"""
    path = tmp_path / "metrics.jsonl"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    append_line(path, {"step": 3})
    assert [record["step"] for record in read_lines(path, is_strict=True)[0]] == [1, 3]


@pytest.fixture
def overflowing(recorded: Path, tmp_path: Path) -> Path:
    """Return a dataset with some actions that no float32 loss can hold; its statistics are those from before."""
    root = Path(shutil.copytree(recorded, tmp_path / "overflowing"))
    path = next((root / "data").rglob("*.parquet"))
    table = pq.read_table(path)
    values = table["action"].to_pylist()
    for row in range(40, len(values), 20):
        values[row][0] = 1e30
    column = pa.array(values, table.schema.field("action").type)
    pq.write_table(table.set_column(table.schema.get_field_index("action"), "action", column), path)
    return root


@pytest.mark.filterwarnings("ignore:step .* is left out")
def test_a_loss_that_is_no_number_names_its_windows_and_is_left_out_on_wish(
    overflowing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--train.num-steps", "30", "--checkpoint-every", "1", "--robot.normalization", "mean_std"]
    assert main(train(overflowing, tmp_path / "a", *words)) == 2
    said = capsys.readouterr().err
    run = find_run(tmp_path / "a")
    step = len(read_metrics(run)[0]) + 1
    assert f"step {step}: the loss is " in said and "episode " in said and "--train.on-nan skip" in said
    assert run.state == "failed"
    skip = [*words, "--train.on-nan", "skip", "--train.max-skipped", "100"]
    with pytest.warns(UserWarning, match=f"step {step} is left out: the loss is "):
        assert main(train(overflowing, tmp_path / "a", *skip, "--resume")) == 0
    with pytest.warns(UserWarning, match=f"step {step} is left out"):
        assert main(train(overflowing, tmp_path / "b", *skip)) == 0
    stories = [read_metrics(find_run(tmp_path / name))[0] for name in "ab"]
    both = [[(r["step"], r["loss"], r["gradient_norm"], r["num_skipped"]) for r in story] for story in stories]
    assert both[0] == both[1] and len(both[0]) == 30
    assert both[0][step - 1][1] is None and both[0][step - 1][3] == 1
    weights = [load_file(find_run(tmp_path / n).checkpoints / "step_00000030" / "model.safetensors") for n in "ab"]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert all(tensor.isfinite().all() for tensor in weights[0].values())


def test_a_clock_that_was_set_back_hides_no_new_run(tmp_path: Path) -> None:
    ahead = datetime.now() + timedelta(days=400)
    create_run(tmp_path, "timed", {}, started=ahead).finish()
    new = create_run(tmp_path, "timed", {"is": "new"})
    new.finish()
    assert newest_run(tmp_path, "timed").config == {"is": "new"}
    (tmp_path / "2999-99-99-timed-999999").mkdir()  # named by hand
    (tmp_path / "2999-99-99-timed-999999" / "status.json").write_text("{}")
    create_run(tmp_path, "timed", {}).finish()


def test_a_trial_that_another_sweep_has_begun_is_left_to_it(tmp_path: Path) -> None:
    sweep = read_sweep({"name": "shared", "recipe": "tiny", "base": {"data.root": str(tmp_path / "none")}}, "file")
    (trial,) = list_trials(sweep)
    claim = tmp_path / ".launches" / f"{trial.name}.lock"
    claim.parent.mkdir()
    said: list[str] = []
    take_lock(claim)
    run_sweep(sweep, [trial], tmp_path, say=said.append)
    assert said[-1] == f"{trial.name}: another sweep has it" and not list(tmp_path.glob("*/status.json"))
    release_lock(claim)
    create_run(tmp_path, trial.name, {}).finish()  # by the other one, after this one made its list
    assert not _claim(trial, tmp_path) and not claim.exists()
    assert _claim(list_trials(replace(sweep, base={"train.seed": 1}))[0], tmp_path)


def test_two_ablations_in_one_folder_time_no_turn_of_each_other(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.joinpath("ablation").mkdir()
    take_lock(tmp_path / "ablation" / "lock")
    words = ["ablate", "tiny", "--data.root", str(recorded), "--folder", str(tmp_path / "ablation"), "--rounds", "1"]
    assert main([*words, "--tricks", "asynchronous loading"]) == 2
    assert "still open in this very process" in capsys.readouterr().err
    with pytest.raises(InputError):
        take_lock(tmp_path / "ablation" / "lock")
