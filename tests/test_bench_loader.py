"""The loader's bench on a dataset of one's own, as a command."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import numbered_episode

from wamlab.cli import main
from wamlab.data.write import write_dataset

KEYS = {
    "speedup_vs_lerobot_float32", "speedup_vs_lerobot_uint8", "speedup_vs_rlinf", "speedup_vs_rlinf_pool",
    "cpu_vs_bare_torchcodec", "warm_store_speedup", "index_speedup_vs_torchcodec",
    "wait_fraction", "wait_fraction_at_1_1",
}  # fmt: skip
OF_DECORD = {"speedup_vs_dreamzero", "speedup_vs_dreamzero_pool"}


@pytest.mark.skipif(sys.platform != "linux", reason="CPU times of processes are read as Linux tells them")
def test_ones_own_dataset_is_measured(tmp_path: Path) -> None:
    root = write_dataset((numbered_episode(100 * number, 26) for number in range(2)), tmp_path / "mine")
    command = [str(Path(sys.executable).with_name("wamlab")), "bench", "loader", str(root), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"WAMLAB_SMOKE": "1"})
    assert done.returncode == 0, done.stderr
    assert "other frames than the bare decoder's" not in done.stdout
    figures = json.loads(done.stdout.splitlines()[-1])
    wanted = KEYS | (OF_DECORD if importlib.util.find_spec("decord") else set())
    assert wanted <= figures.keys()
    assert all(figures[key] > 0 for key in wanted - {"wait_fraction", "wait_fraction_at_1_1"})
    assert 0 <= figures["wait_fraction"] < 1


def test_a_wrong_dataset_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loader", str(tmp_path / "gone"), "--quick"]) == 2
    assert capsys.readouterr().err == f"wamlab: there is no dataset folder {tmp_path / 'gone'}\n"
    short = write_dataset([numbered_episode(0, 5)], tmp_path / "short")
    assert main(["bench", "loader", str(short), "--quick"]) == 2
    assert "a window needs 9 rows, the longest episode has 5" in capsys.readouterr().err
