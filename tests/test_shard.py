"""Sharding: 1, 2 and 4 processes take the same steps, hold their shares only, and go on from each other."""

import json
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from wamlab.cli import main
from wamlab.errors import InputError
from wamlab.lab.run import find_run, read_metrics
from wamlab.speed.config import ShardConfig
from wamlab.speed.ranks import Ranks, read_ranks

LAW = Path(__file__).with_name("sharded_law.py")
BF16 = {"bf16 weights"}  # weights rounded to 8 bits: the curves differ by their rounding


def run_law(task: str, num_processes: int, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    done = subprocess.run([*command, str(LAW), task, str(folder)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"{task}_{num_processes}.json").read_text())


@pytest.fixture(scope="module")
def laws(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("laws")
    return {num: run_law("laws", num, folder) for num in (1, 2, 4)}


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_processes_take_the_steps_of_one(laws: dict[int, dict[str, Any]], num_processes: int) -> None:
    for name, case in laws[num_processes].items():
        tolerance = 2e-2 if name in BF16 else 1e-5
        for (loss, norm), (wanted_loss, wanted_norm) in zip(case["found"], case["wanted"], strict=True):
            assert loss == pytest.approx(wanted_loss, rel=tolerance), name
            assert norm == pytest.approx(wanted_norm, rel=tolerance), name
        # Steps of Adam are as long for a gradient of rounding errors as for any other.
        assert case["weights"] < 3e-2 if name in BF16 else case["weights"] < 2e-3, name


def test_processes_clip_alike(laws: dict[int, dict[str, Any]]) -> None:
    norms = {num: [norm for _, norm in laws[num]["every block freed"]["found"]] for num in laws}
    assert norms[1] == pytest.approx(norms[2], rel=1e-5) and norms[1] == pytest.approx(norms[4], rel=1e-5)
    assert min(norms[1]) > 0.1  # so that clipping did something


def test_each_process_holds_its_share(laws: dict[int, dict[str, Any]]) -> None:
    one, two, four = (laws[num]["blocks kept"]["bytes"] for num in (1, 2, 4))
    assert two <= 0.51 * one and four <= 0.26 * one
    assert laws[4]["two copies"]["bytes"] <= 0.51 * one


def test_checkpoints_hold_frozen_weights_but_those_beside_adapters(laws: dict[int, dict[str, Any]]) -> None:
    for num_processes, found in laws.items():
        assert found["partly frozen"]["reloaded"] == 0, num_processes
        assert found["adapters"]["reloaded"] == 0, num_processes


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_a_terminated_command_leaves_no_process_behind(tmp_path: Path) -> None:
    code = "import os, sys, time; open(f'{sys.argv[1]}{os.getpid()}', 'w').close(); time.sleep(600)"
    (tmp_path / "sleeper.py").write_text(code)
    start = (
        "import os, pathlib; from wamlab.recipes.training import run_agent; "
        "from wamlab.speed.ranks import torchrun_command; "
        f"command = torchrun_command(2, 'sleeper', [{str(tmp_path / 'began-')!r}]); "
        f"run_agent(command, dict(os.environ), pathlib.Path({str(tmp_path / 'note')!r}))"
    )
    command = subprocess.Popen([sys.executable, "-c", start], cwd=tmp_path, stderr=subprocess.DEVNULL)
    while len(list(tmp_path.glob("began-*"))) < 2:
        assert command.poll() is None
        time.sleep(0.1)
    command.terminate()
    assert command.wait(timeout=60) != 0
    workers = [path.name.removeprefix("began-") for path in tmp_path.glob("began-*")]
    assert not [pid for pid in workers if Path("/proc", pid).exists()]


def test_any_number_of_processes_goes_on_where_another_stopped(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run_law("resume", 1, tmp_path / "whole")
    second = run_law("resume", 1, tmp_path / "whole")
    third = run_law("resume", 1, tmp_path / "whole")
    (tmp_path / "split").mkdir()
    parts = [run_law(*how, tmp_path / "split") for how in (("resume", 2), ("alone", 1), ("resume", 2))]
    assert [part["first"] for part in parts] == [0, 2, 4]
    for found, wanted in zip(parts, (whole, second, third), strict=True):
        assert list(chain(*found["found"])) == pytest.approx(list(chain(*wanted["found"])), rel=1e-5)
    left = sorted(path.name for path in (tmp_path / "split" / "checkpoints").iterdir())
    assert left == ["step_00000004", "step_00000006"]  # the newest two, nothing unfinished


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r'shard\.units is "layers": give one of blocks, whole'):
        ShardConfig(units="layers")
    assert read_ranks() == Ranks()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(InputError, match="RANK=2 of WORLD_SIZE=2"):
        read_ranks()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(InputError, match="start the run with torchrun"):
        read_ranks()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_command_trains_in_two_processes_and_goes_on_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "make", "recorded", "--families", "reach", "--episodes", "6", "--size-px", "32", "32"]) == 0
    words = [
        "train", "tiny", "--data.root", "recorded", "--robot.view-height-px", "32", "--robot.view-width-px", "32",
        "--train.learning-rate", "1e-4", "--train.final-rate-fraction", "1",
        "--model.layers", "2", "--model.dim", "48", "--model.ffn-dim", "96",
        "--evaluation.every", "2", "--evaluation.num-clips", "2", "--checkpoint-every", "2", "--speed.recompute", "all",
    ]  # fmt: skip
    alone = [*words, "--runs", "alone", "--train.batch-size", "4"]
    assert main([*alone, "--train.num-steps", "4"]) == 0
    shared = [*words, "--runs", "shared"]
    both = [*shared, "--train.batch-size", "2", "--train.num-steps", "2", "--processes", "2"]
    done = subprocess.run([sys.executable, "-m", "wamlab.cli", *both], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    rest = ["--train.num-steps", "4", "--resume"]
    assert main([*shared, "--train.batch-size", "2", *rest]) == 2
    assert "took 4 samples a step, 1 processes with train.batch_size 2 take 2" in capsys.readouterr().err
    assert main([*shared, "--train.batch-size", "4", *rest]) == 0
    found, wanted = (
        [[r["loss"], r["gradient_norm"], r["num_samples"]] for r in read_metrics(find_run(tmp_path / folder))[0]]
        for folder in ("shared", "alone")
    )
    assert len(found) == 4
    assert list(chain(*found)) == pytest.approx(list(chain(*wanted)), rel=1e-4)
