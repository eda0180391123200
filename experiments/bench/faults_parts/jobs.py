"""The long jobs of the fault matrix: how each is started and resumed, how far it is, what it must end with."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_STEPS = 24
TINY = [
    "--data.root", "recorded", "--robot.view-height-px", "32", "--robot.view-width-px", "32", "--model.layers", "1",
    "--model.dim", "48", "--model.ffn-dim", "96", "--train.batch-size", "2", "--data.cache-gib", "0", "--device", "cpu",
]  # fmt: skip
TRAIN = [
    *TINY, "--evaluation.every", "100", "--evaluation.num-clips", "2", "--evaluation.noise-levels", "0.5",
    "--checkpoint-every", "5", "--train.num-steps", str(NUM_STEPS), "--sampler.num-steps", "1",
]  # fmt: skip
RL = [
    "rl", "rl_tabletop_grpo", "--start", "tiny", "--is-exact", "--num-groups", "2", "--play.num-members", "2",
    "--play.num-slots", "2", "--train.num-steps", "3", "--checkpoint-every", "1", "--evaluation.num-episodes", "2",
]  # fmt: skip
SWEEP = {
    "name": "rates", "recipe": "tiny", "grid": {"train.learning_rate": [1e-3, 2e-3]},
    "base": {word[2:].replace("-", "_"): _value for word, _value in zip(TRAIN[::2], TRAIN[1::2], strict=True)},
}  # fmt: skip


def command(words: list[str]) -> list[str]:
    """Return the command line of the real program."""
    return [sys.executable, "-W", "ignore", "-m", "wamlab.cli", *words]


@dataclass(frozen=True)
class Job:
    """One long job in a working folder."""

    name: str
    words: Callable[[Path], list[str]]  # by what lies in the folder: to begin or to go on, as documented
    progress: Callable[[Path], int]
    result: Callable[[Path], Any]  # None before the end; equal for equal work
    needs_start: bool = False  # a finished run to start from


def _lines(home: Path, runs: str = "runs") -> int:
    return sum(path.read_bytes().count(b"\n") for path in home.glob(f"{runs}/*/metrics.jsonl"))


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def story_of(run: Path) -> list[Any] | None:
    """Return a finished run's steps, losses, norms and the hashes of its last weights; None of another."""
    if json.loads((run / "status.json").read_text())["state"] != "finished":
        return None
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [[r["step"], r["loss"], r["gradient_norm"], r.get("num_skipped", 0)] for r in records]
    last = max(run.glob("checkpoints/step_*"))
    return [*told, *(hash_of(path) for path in sorted(last.glob("*.safetensors")))]


def _runs(home: Path, pattern: str) -> list[Any] | None:
    found = [story_of(path.parent) for path in sorted(home.glob(f"runs/{pattern}/status.json"))]
    return None if not found or None in found else found


def _train_words(home: Path) -> list[str]:
    return ["train", "tiny", *TRAIN, *(["--resume"] if any(home.glob("runs/*/status.json")) else [])]


def _rl_words(home: Path) -> list[str]:
    return [*RL, *(["--resume"] if any(home.glob("runs/*-rl-*/status.json")) else [])]


def _sweep_words(home: Path) -> list[str]:
    (home / "sweep.yaml").write_text(json.dumps(SWEEP))
    return ["sweep", "sweep.yaml"]


def _features(home: Path) -> Any:
    found = {}
    for entry in home.glob("features/*/*/*.json"):
        if entry.name == "about.json" or not entry.with_suffix(".bin").exists():
            continue
        told, data = json.loads(entry.read_text()), entry.with_suffix(".bin").read_bytes()
        size = len(data) // len(told["keys"])
        for number, key in enumerate(told["keys"]):
            found[f"{entry.parent.name} {key}"] = hashlib.sha256(data[number * size : (number + 1) * size]).hexdigest()
    return found or None


def _losses(home: Path) -> Any:
    path = home / "ablation" / "ablation.json"
    turns = json.loads(path.read_text())["turns"] if path.exists() else {}
    return {name: [turn["losses"] for turn in own] for name, own in turns.items()} if turns else None


def _converted(home: Path) -> Any:
    root = home / "converted"
    return {str(p.relative_to(root)): hash_of(p) for p in root.rglob("*") if p.is_file()} if root.exists() else None


def _tuned(home: Path) -> Any:
    path = home / "out.txt"
    said = [line for line in path.read_text().splitlines() if line.startswith("{")] if path.exists() else []
    return json.loads(said[-1])["choice"] if said else None


ENCODE = ["--features.shard-mib", "0.02", "--features.num-variants", "4"]
ABLATE = [*TINY, "--folder", "ablation", "--tricks", "asynchronous loading", "--rounds", "1", "--steps", "1"]
JOBS = {
    job.name: job
    for job in (
        Job("train", _train_words, _lines, lambda home: _runs(home, "*-tiny-*")),
        Job("convert", lambda _: ["data", "convert", "recorded", "converted", "--version", "v2.1"],
            lambda home: len(list(home.glob(".converted*/**/*"))), _converted),
        Job("encode", lambda _: ["encode", "tiny", *TINY, *ENCODE],
            lambda home: len(list(home.glob("features/*/*/*.bin"))), _features),
        Job("ablate", lambda _: ["ablate", "tiny", *ABLATE, "--no-leave-one-out"],
            lambda home: len(list(home.glob("ablation/*"))), _losses),
        Job("sweep", _sweep_words, _lines, lambda home: _runs(home, "*-rates-*")),
        Job("rl", _rl_words, lambda home: len(list(home.glob("runs/*/rollout/segments/*.safetensors"))),
            lambda home: _runs(home, "*-rl-*"), needs_start=True),
        Job("tune", lambda _: ["tune", "tiny", "--budget", "0.2GiB", "--devices", "8xH100", "--no-cached", "--json"],
            lambda home: 1, _tuned),
    )
}  # fmt: skip


def make_recorded(home: Path) -> None:
    """Record the dataset of all jobs."""
    words = ["data", "make", "recorded", "--families", "reach", "--episodes", "8", "--size-px", "32", "32"]
    subprocess.run(command(words), cwd=home, check=True, capture_output=True)
