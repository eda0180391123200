"""No trick, no pair of tricks and not all of them together change a loss or a gradient in float32.

``WAMLAB_ALL_PAIRS=1 pytest tests/test_trick_pairs.py`` adds the five pairs of compiled blocks with what is done before
the network, and a compiled optimiser and compiled encoders.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="the extra wan is not installed: pip install -e '.[wan]'")
pytest.importorskip("transformers", reason="the extra wan is not installed: pip install -e '.[wan]'")


HAS_ALL = bool(os.environ.get("WAMLAB_ALL_PAIRS"))


def run_law(folder: Path, *words: str) -> dict[str, Any]:
    script = Path(__file__).with_name("trick_pairs_law.py")
    command = [sys.executable, "-W", "ignore", str(script), str(folder), *words]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_pair_of_tricks_changes_a_loss_or_a_gradient(tmp_path: Path) -> None:
    found = run_law(tmp_path)
    assert len(found) == 9 + (36 if HAS_ALL else 31) + 1  # each, each pair, all
    assert max(found.values()) <= 1e-5, {name: value for name, value in found.items() if value > 1e-5}
    assert found["lean network + compiled blocks"] > 0  # something else was computed


@pytest.mark.skipif(not HAS_ALL, reason="compiles for a minute: set WAMLAB_ALL_PAIRS=1")
def test_a_compiled_optimizer_and_compiled_encoders_train_to_the_same_losses(tmp_path: Path) -> None:
    found = run_law(tmp_path, "rest")
    for name in ("optimizer", "encoders"):
        assert found[name] == pytest.approx(found["none"], rel=1e-5), name
        assert found[name] != found["none"], f"{name}: something else was computed"
