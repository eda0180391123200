"""Randomly damaged files: exact frames or one InputError, never a wrong frame, a hang or a crash.

``WAMLAB_DAMAGED_FILES=500``, or ``WAMLAB_FUZZ``, and ``pytest tests/test_fuzz_decode.py -s`` tries more and prints
the counts.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from encoded import SYNTHETIC, encode

NUM_FILES = int(os.environ.get("WAMLAB_DAMAGED_FILES") or os.environ.get("WAMLAB_FUZZ") or 40)
AT_ONCE = 50  # files a process examines
LIMIT_S = 10  # of CPU time a file on average, ten times what is needed where many share a core
# Larger than the barcode needs: most of the damage shall hit pictures, not the header.
SOURCES = {
    **{name: {"size": (96, 160), "movflags": "faststart", **options} for name, options in SYNTHETIC.items()},
    "header_last.mp4": {},
    "no_b_frames.mp4": {"bf": 0, "x264_params": "bframes=0", "size": (64, 96)},
    "vp9.webm": {"codec": "libvpx-vp9", "deadline": "realtime", "cpu_used": 8, "bf": 0},
}


def examine(folder: Path, start: int, stop: int) -> Counter:
    """Damage and examine files in a process of its own; AssertionError names the file it hung or died at."""
    command = [sys.executable, str(Path(__file__).with_name("damage.py")), str(folder), str(start), str(stop)]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    log = folder / "log.jsonl"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, env=environment)
        try:
            _, complaint = process.communicate(timeout=30 + LIMIT_S * (stop - start))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise AssertionError(f"hung at {log.read_text().splitlines()[-1:]}") from None
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert process.returncode == 0, f"{lines[-1:]}: exit {process.returncode}, {complaint.decode()[-2000:]}"
    for case, found in zip(lines[::2], lines[1::2], strict=True):
        if found.get("wrong"):
            print("wrong frames:", case, found)
    return sum((Counter(found) for found in lines[1::2]), Counter())


@pytest.mark.timeout(60 + 20 * NUM_FILES)
def test_damaged_files_give_exact_frames_or_one_error(tmp_path: Path) -> None:
    for name, options in SOURCES.items():
        encode(tmp_path / f"source_{name}", **options)
    found = Counter()
    for start in range(0, NUM_FILES, AT_ONCE):
        found += examine(tmp_path, start, min(NUM_FILES, start + AT_ONCE))
    print(dict(found))
    assert found["files"] == NUM_FILES
    assert found["wrong"] == 0
    assert found["exact"] > 50 * NUM_FILES / 5  # at least, else nothing was tried
    assert found["refused"] > 0 and found["files_refused"] > 0
