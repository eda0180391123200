"""Runs in processes of their own: from a notebook, by a batch system, after a kill, without whoever started them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from wamlab.cli import main
from wamlab.errors import InputError, Stopped
from wamlab.lab.control import Wishes, ask
from wamlab.lab.launch import Launched, LaunchError, attach, launch, option_words
from wamlab.lab.lock import take_lock
from wamlab.lab.run import Run, create_run, find_run, read_metrics
from wamlab.recipes.notebook import read_yaml
from wamlab.recipes.sweep_file import list_trials, read_sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
FAKE_SLURM = Path(__file__).with_name("fake_slurm")
NUM_STEPS = 10
CHANGES = {
    "robot.view_height_px": 32, "robot.view_width_px": 32, "model.layers": 2, "model.dim": 48, "model.ffn_dim": 96,
    "evaluation.every": 100, "evaluation.num_clips": 2, "evaluation.noise_levels": [0.5], "checkpoint_every": 5,
    "train.num_steps": NUM_STEPS, "train.batch_size": 2, "sampler.num_steps": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small dataset."""
    folder = tmp_path_factory.mktemp("home")
    words = ["data", "make", str(folder / "recorded"), "--families", "reach", "--episodes", "6"]
    assert main([*words, "--size-px", "32", "32"]) == 0
    return folder


def changes(home: Path, **others: Any) -> dict[str, Any]:
    return {"data.root": home / "recorded", **CHANGES, **others}


def until(is_so: Callable[[], Any], process: subprocess.Popen | None = None, timeout_s: float = 120.0) -> Any:
    """Wait until something is so and return it; fail if the process ends before."""
    end_s = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < end_s, "it never came to that"
        assert process is None or process.poll() is None, "the process ended before"
        time.sleep(0.02)
    return found


def num_steps_in(runs: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in runs.glob("*/metrics.jsonl"))


def processes_of(folder: Path, **environment: str) -> list[int]:
    """Return the processes whose command names a folder and whose environment has these values."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words, told = (place / "cmdline").read_bytes(), (place / "environ").read_bytes().split(b"\0")
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(folder).encode() in words and all(f"{k}={v}".encode() in told for k, v in environment.items()):
            found += [int(place.name)] if state != "Z" else []
    return found


def story(run: Run) -> list[tuple[float, float]]:
    records, _ = read_metrics(run)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [(record["loss"], record["gradient_norm"]) for record in records]


NOTEBOOK = """
from wamlab.lab.launch import launch
job = launch("tiny", {changes}, num_processes=2, num_restarts=1, runs=runs)
summary = job.wait(timeout_s=200)
print(job)
---
assert job.state == "finished" and summary["steps"] == {num_steps}
"""


def notebook_in(folder: Path, home: Path) -> Path:
    """Write a notebook that launches two processes."""
    told = {name: str(value) if isinstance(value, Path) else value for name, value in changes(home).items()}
    cells = [nbformat.v4.new_code_cell('runs: str = "runs"')]
    cells[0].metadata["tags"] = ["parameters"]
    code = NOTEBOOK.format(changes=told, num_steps=NUM_STEPS)
    cells += [nbformat.v4.new_code_cell(cell.strip()) for cell in code.split("---")]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "two.ipynb")
    return folder / "two.ipynb"


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a Slurm job whose srun and scontrol work on this machine."""
    told = {"FAKE_SLURM_LOG": str(tmp_path / "slurm.log"), "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "localhost"}
    return {**os.environ, "PATH": f"{FAKE_SLURM}:{os.environ['PATH']}", **told}


def submit(told: dict[str, Any], runs: Path, *more: str) -> None:
    words = ["submit", "slurm", "tiny", *option_words(told), "--runs", str(runs), "--gpus", "0", *more]
    assert main(words) == 0


def test_a_notebook_that_loses_a_worker_trains_the_bits_of_an_undisturbed_batch_job(
    home: Path, tmp_path: Path, slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes each: two nodes of a job script; papermill, launch and a kill -9 at a random step."""
    monkeypatch.chdir(tmp_path)
    submit(changes(home), tmp_path / "batch", "--nodes", "2")
    job = subprocess.run(["bash", "jobs/tiny.sbatch"], env=slurm | {"SLURM_JOB_NODELIST": "localhost,127.0.0.1"})
    assert job.returncode == 0 and not Path(slurm["FAKE_SLURM_LOG"]).exists()
    batch = find_run(tmp_path / "batch")
    assert batch.status["num_resumes"] == 0 and len(story(batch)) == NUM_STEPS
    assert [path.name for path in (batch.folder / "logs").glob("*.log")] == ["rank_00001.log"]

    words = ["run", str(notebook_in(tmp_path, home)), "-p", "runs", str(tmp_path / "two"), "--runs", "executed"]
    executing = subprocess.Popen([sys.executable, "-m", "wamlab.cli", *words], stderr=subprocess.DEVNULL)
    (victim,) = until(lambda: processes_of(tmp_path / "two", RANK="1", TORCHELASTIC_RESTART_COUNT="0"), executing)
    chosen = random.randrange(1, NUM_STEPS - 3)  # before the first checkpoint or after it
    until(lambda: num_steps_in(tmp_path / "two") >= chosen, executing)
    os.kill(victim, signal.SIGKILL)
    assert executing.wait(timeout=200) == 0
    lost = find_run(tmp_path / "two")
    assert lost.status["num_resumes"] == 1, f"the worker killed at step {chosen} was not missed"
    assert story(lost) == story(batch)
    executed = find_run(tmp_path / "executed")
    assert executed.state == "finished" and executed.config["parameters"] == {"runs": str(tmp_path / "two")}
    assert "Launched(" in (executed.folder / "notebook.html").read_text()


def test_a_job_taken_off_its_machine_is_queued_again_and_goes_on(
    home: Path, tmp_path: Path, slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    num_steps, told = 30, changes(home, **{"train.num_steps": 30, "checkpoint_every": 100})
    submit(told, tmp_path / "batch")
    job = subprocess.Popen(["bash", "jobs/tiny.sbatch"], env=slurm)
    until(lambda: num_steps_in(tmp_path / "batch") >= 1, job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=120) == 75
    assert Path(slurm["FAKE_SLURM_LOG"]).read_text() == "requeue 4242\n"
    run = find_run(tmp_path / "batch")
    assert run.state == "stopped" and run.status["is_preempted"] and 1 <= len(story(run)) < num_steps
    train = ["train", "tiny", *option_words(told), "--runs"]
    with monkeypatch.context() as again:  # what torchrun tells its process when Slurm starts the job again
        for name, value in {"SLURM_JOB_ID": "4242", "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "4242"}.items():
            again.setenv(name, value)
        assert main([*train, "batch"]) == 0
    assert main([*train, "alone"]) == 0
    assert run.state == "finished" and run.status["num_resumes"] == 1
    assert story(run) == story(find_run("alone")) and len(story(run)) == num_steps


SWEEP = """
name: rates
recipe: tiny
base: {base}
grid: {{train.learning_rate: [1e-3, 2e-3, 4e-3]}}
budget: {{runs: 1}}
"""


def test_a_killed_sweep_leaves_no_process_and_goes_on(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it launched notices, writes a checkpoint and ends; the same command then does the rest of that run."""
    runs, file = tmp_path / "runs", tmp_path / "rates.yaml"
    told = {n: str(v) if isinstance(v, Path) else v for n, v in changes(home, **{"train.num_steps": 30}).items()}
    file.write_text(SWEEP.format(base=json.dumps(told)))
    trials = list_trials(read_sweep(read_yaml(file), "rates.yaml"))
    create_run(runs, trials[0].name, {}).finish()
    sweep = subprocess.Popen([sys.executable, "-m", "wamlab.cli", "sweep", str(file), "--runs", str(runs)])
    until(lambda: num_steps_in(runs) >= 1, sweep)
    run = find_run(runs, trials[1].name)
    job = attach(run)
    job.pause()
    until(lambda: job.state == "paused")
    num_before = num_steps_in(runs)
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    until(lambda: not processes_of(runs), timeout_s=60)
    assert run.state == "stopped" and num_steps_in(runs) == num_before < 30
    assert (run.checkpoints / f"step_{num_before:08d}" / "state.json").exists()
    capsys.readouterr()
    assert main(["sweep", str(file), "--runs", str(runs)]) == 0
    said = capsys.readouterr().out
    assert "3 runs, 1 of them finished" in said and "1 of 3 are left" in said
    assert run.state == "finished" and run.status["num_resumes"] == 1 and len(story(run)) == 30
    assert run.config["train"]["learning_rate"] == 2e-3


def test_a_program_that_fails_shows_why(home: Path, tmp_path: Path) -> None:
    job = launch("tiny", changes(home, **{"data.root": tmp_path / "nothing"}), runs=tmp_path / "runs")
    with pytest.raises(LaunchError, match="nothing"):
        job.wait(timeout_s=60)
    assert job.state == "failed" and job.exit_code == 2 and job.run is None
    assert "nothing" in job._repr_html_() and "nothing" in repr(job)
    with pytest.raises(LaunchError, match="nothing"):
        job.wait_for_run()


def test_the_process_that_failed_first_is_shown(tmp_path: Path) -> None:
    from wamlab.lab.rank_logs import end_noted

    run = create_run(tmp_path, "two", {})
    for rank, error in ((1, ValueError("the <cause>")), (0, RuntimeError("connection closed"))):
        with pytest.raises(type(error)), end_noted(run.folder, rank):
            raise error
    run.finish("failed", error="RuntimeError: connection closed")
    job = attach(run)
    assert job.error.startswith("process 1 failed first: ValueError: the <cause>") and "Traceback" in job.error
    assert job.exit_codes == {0: 1, 1: 1}
    assert "the &lt;cause&gt;" in job._repr_html_()
    summary = "Failures:\n[1]:\n  rank      : {} (local_rank: 1)\n  exitcode  : {} (pid: 4) \n  error_file: <N/A>\n"
    (tmp_path / "output.log").write_text(summary.format(2, -9) + summary.format(3, -15))
    job = Launched(tmp_path, None, run)  # one that was killed could say nothing
    assert job.exit_codes == {0: 1, 1: 1, 2: -9, 3: -15}
    assert job.error.startswith("process 2 was ended by signal 9\nprocess 1 failed then: ValueError")


def test_wishes_reach_a_running_run_only(tmp_path: Path) -> None:
    run = create_run(tmp_path, "asked", {})
    wishes = Wishes(run.folder)
    assert wishes.read() == "go on"
    with pytest.raises(InputError, match='cannot "rest": ask for one of'):
        ask(run, "rest")
    ask(run, "pause")
    until(lambda: wishes.read() == "pause", timeout_s=5)
    with wishes.heeded():
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: wishes.read() == "preempt", timeout_s=5)
    with pytest.raises(Stopped), run:
        raise Stopped("taken off its machine after step 3", is_preempted=True)
    assert run.state == "stopped" and run.status["is_preempted"]
    with pytest.raises(InputError, match="only a running run can pause"):
        ask(run, "pause")


def test_a_job_that_is_started_again_takes_over_what_it_wrote_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock"
    owner = {"pid": 1, "host": "a machine that is gone", "born": "1", "job": "77", "generation": [0, 0]}
    lock.write_text(json.dumps(owner))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with pytest.raises(InputError, match="is being written by process 1 on a machine that is gone"):
        take_lock(lock)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    take_lock(lock)
    assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_fields_become_words_of_a_command_line() -> None:
    fields = {"train": {"num_steps": 3, "has_bf16": False}, "data.roots": ["a", "b"], "start": None, "speed.x": True}
    assert option_words(fields) == [
        "--train.num-steps", "3", "--train.no-has-bf16", "--data.roots", "a", "b", "--start", "None", "--speed.x",
    ]  # fmt: skip
    with pytest.raises(InputError, match="model is a object"):
        option_words({"model": object()})
    with pytest.raises(InputError, match="0 processes and 0 restarts"):
        launch("tiny", num_processes=0)
