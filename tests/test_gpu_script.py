"""The script that a GPU is checked with runs, here at a tiny size, and says what fails without stopping."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("gpu") / "run.sh"


def run_script(*args: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "OMP_NUM_THREADS": "1"}
    return subprocess.run([SCRIPT, *args], capture_output=True, text=True, env=environment)


def test_every_section_runs(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = run_script("--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    sections = figures["sections"]
    assert set(sections) == {"laws", "5b", "14b", "encoders"}
    assert all(case["is_kept"] for case in sections["laws"].values())
    assert {"micro-batch 1, eager", "micro-batch 1, compiled, recompute"} == set(sections["5b"])
    for case in sections["5b"].values():
        assert 0 < case["mfu"] < 1
        assert case["layers"] == "4 of 4"
    assert "samples/s" in done.stdout and "kept" in done.stdout


def test_what_fails_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Without CUDA every section fails, each with the reason."""
    out = tmp_path / "figures.json"
    done = run_script("--out", str(out), "--section", "laws", "--section", "encoders")
    if done.returncode:  # no CUDA here
        sections = json.loads(out.read_text())["sections"]
        assert [next(iter(section.values()))["failed"] for section in sections.values()] == [
            "torch sees no CUDA device here"
        ] * 2
        assert "not as it should be: encoders" in done.stderr


def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    done = run_script(python=str(bare))
    assert done.returncode == 2
    assert "No module named" in done.stderr and "set PYTHON" in done.stderr
