"""The real lerobot reads what is written here: rows, tasks, windows, statistics, and the very frames."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from barcode import barcode_frames, read_barcodes

from wamlab.data.lerobot import open_dataset
from wamlab.data.write import write_dataset
from wamlab.types import Episode

INSTALL = (
    'python3.12 -m venv V && V/bin/pip install "lerobot[dataset]==0.6.1"; export WAMLAB_LEROBOT_PYTHON=V/bin/python'
)
SCRIPTS = Path(__file__).parent / "interop"
LENGTHS = (20, 35, 12)


def episode(first: int, length: int) -> Episode:
    rng = np.random.default_rng(first)
    numbers = np.arange(first, first + length)
    return Episode(
        frames={"top": barcode_frames(numbers), "wrist": barcode_frames(numbers + 2000)},
        state=rng.normal(size=(length, 7)).astype(np.float32),
        action=rng.normal(size=(length, 3)).astype(np.float32),
        instruction=f"task of {first}",
        fps=10.0,
        signals={
            "next.reward": rng.normal(size=length).astype(np.float32),
            "next.done": np.arange(length) == length - 1,
        },
    )


EPISODES = [episode(100 * number, length) for number, length in enumerate(LENGTHS)]
NUMBERS = np.concatenate([100 * n + np.arange(length) for n, length in enumerate(LENGTHS)])


def run_lerobot(script: str, source: Path, target: Path) -> str:
    """Run a script of tests/interop with the interpreter that has lerobot, offline; return what it prints."""
    python = os.environ.get("WAMLAB_LEROBOT_PYTHON")
    if not python:
        pytest.skip(f"lerobot needs an environment of its own: {INSTALL}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(target.parent / "cache")}
    command = [python, str(SCRIPTS / script), str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """Return a written dataset, what lerobot reports of it, and the frames it decodes."""
    folder = tmp_path_factory.mktemp("interop")
    root = write_dataset(EPISODES, folder / "set", robot_type="tabletop")
    output = run_lerobot("read_with_lerobot.py", root, folder / "frames.npz")
    with np.load(folder / "frames.npz") as frames:
        return root, json.loads(output.splitlines()[-1]), dict(frames)


def test_lerobot_counts_the_same(seen: tuple[Path, dict[str, Any], dict[str, np.ndarray]]) -> None:
    _, report, _ = seen
    assert report["len"] == sum(LENGTHS) and report["num_episodes"] == 3
    assert (report["fps"], report["robot_type"]) == (10, "tabletop")
    assert report["cameras"] == ["observation.images.top", "observation.images.wrist"]
    assert report["episode_index"] == np.repeat(np.arange(3), LENGTHS).tolist()
    assert report["tasks"] == [e.instruction for e in EPISODES for _ in range(len(e.state))]
    assert report["timestamp"] == pytest.approx(np.concatenate([np.arange(n) / 10 for n in LENGTHS]))


def test_lerobot_reads_equal_rows(seen: tuple[Path, dict[str, Any], dict[str, np.ndarray]]) -> None:
    vectors = {name: np.array(rows, np.float32) for name, rows in seen[1]["vectors"].items()}
    assert np.array_equal(vectors["observation.state"], np.concatenate([e.state for e in EPISODES]))
    assert np.array_equal(vectors["action"], np.concatenate([e.action for e in EPISODES]))
    rewards = np.concatenate([e.signals["next.reward"] for e in EPISODES])
    assert np.array_equal(vectors["next.reward"][:, 0], rewards)


def test_lerobot_decodes_the_very_frames(seen: tuple[Path, dict[str, Any], dict[str, np.ndarray]]) -> None:
    root, _, frames = seen
    dataset = open_dataset(root)
    assert np.array_equal(read_barcodes(frames["observation.images.top"]), NUMBERS)
    assert np.array_equal(read_barcodes(frames["observation.images.wrist"]), NUMBERS + 2000)
    for camera, theirs in frames.items():
        ours = np.concatenate([dataset.frames(n, camera, np.arange(t)) for n, t in enumerate(LENGTHS)])
        assert np.abs(ours.astype(int) - theirs).max() <= 2  # FFmpeg versions may round colours apart


def test_lerobot_takes_the_same_statistics(seen: tuple[Path, dict[str, Any], dict[str, np.ndarray]]) -> None:
    root, report, _ = seen
    for column, stats in report["stats"].items():
        for name, values in open_dataset(root).stats(column).items():
            assert np.array(stats[name]).shape == values.shape, (column, name)
            assert np.array(stats[name]).ravel() == pytest.approx(values.ravel(), abs=1e-6)


def test_lerobot_cuts_windows_and_pads_them(seen: tuple[Path, dict[str, Any], dict[str, np.ndarray]]) -> None:
    _, report, frames = seen
    actions = np.concatenate([e.action for e in EPISODES])
    last = sum(LENGTHS) - 1
    for row, window in report["windows"].items():
        row = int(row)
        shown = np.clip([row - 1, row, row + 1], 0, last)
        means = frames["observation.images.top"][shown].mean(axis=(1, 2, 3)) / 255
        assert window["means"] == pytest.approx(means, abs=1e-3)
        assert window["frame_is_pad"] == [row == 0, False, row == last]
        assert np.array(window["action"]) == pytest.approx(actions[np.clip([row, row + 1], 0, last)])
        assert window["action_is_pad"] == [False, row == last]


def test_what_lerobot_records_is_read_exactly(tmp_path: Path) -> None:
    """lerobot's own default codec (AV1), several episodes in one file."""
    lengths = (15, 25)
    numbers = np.concatenate([np.arange(15), 100 + np.arange(25)])
    action = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    source = tmp_path / "recorded.npz"
    frames = barcode_frames(numbers, height=64)
    np.savez(source, frames=frames, action=action, episode=np.repeat([0, 1], lengths))
    run_lerobot("write_with_lerobot.py", source, tmp_path / "set")
    dataset = open_dataset(tmp_path / "set")
    assert dataset.lengths.tolist() == list(lengths) and dataset.fps == 10
    rows = np.array([24, 0, 7])
    assert read_barcodes(dataset.frames(1, "observation.images.top", rows)).tolist() == (100 + rows).tolist()
    assert np.array_equal(np.concatenate([dataset.rows(n, "action") for n in (0, 1)]), action)
    assert dataset.instructions(1) == ["task of 1"] * 25
    assert dataset.stats("action")["q01"].shape == (3,)
