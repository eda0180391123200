"""Sharding: 1, 2 and 4 processes take the same steps, hold their shares only, and go on from each other."""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from wamlab.errors import InputError
from wamlab.speed.ranks import Ranks, read_ranks
from wamlab.speed.shard import ShardConfig

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
