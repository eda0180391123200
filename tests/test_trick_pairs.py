"""No trick, no pair of tricks and not all of them together change a loss or a gradient in float32.

``WAMLAB_ALL_PAIRS=1 pytest tests/test_trick_pairs.py`` adds the five pairs of compiled blocks with what is done before
the network.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="the extra wan is not installed: pip install -e '.[wan]'")
pytest.importorskip("transformers", reason="the extra wan is not installed: pip install -e '.[wan]'")


def test_no_pair_of_tricks_changes_a_loss_or_a_gradient(tmp_path: Path) -> None:
    script = Path(__file__).with_name("trick_pairs_law.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, tmp_path], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    num_pairs = 36 if os.environ.get("WAMLAB_ALL_PAIRS") else 31
    assert len(found) == 9 + num_pairs + 1  # each, each pair, all
    assert max(found.values()) <= 1e-5, {name: value for name, value in found.items() if value > 1e-5}
    assert found["lean network + compiled blocks"] > 0  # something else was computed
