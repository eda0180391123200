"""A long run split over restarts by random kills, against one that nothing disturbs.

Hypothesis: after any number of kills the loss curve, gradient norms and weights are those of the undisturbed run, bit
for bit, and resident memory, open files and threads of the undisturbed process stay where they were.
Decision rule: any step that differs, any step missing or doubled, any weight that differs is a fault of the product;
memory is flat if the median of the last quarter lies within 5 % of that of the second, files and threads within 2.

    python experiments/2026-12-03_soak/soak.py --minutes 240 --home /tmp/soak

Both runs are `wamlab train` in processes of their own with one thread each, at once. After the time both are stopped;
the one that came less far is resumed up to where the other one is. The result is ``summary.json`` beside this file, or
where ``--summary`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from wamlab.lab.environment import describe_environment
from wamlab.lab.records import read_lines, write_json

LOOK_S = 0.5
SAMPLE_S = 5.0
MEAN_LIFE_S = 90.0
KILLS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
ALMOST_ENDLESS = 10**7  # steps; the rate is constant, so their number changes nothing
OPTIONS = [
    "--robot.view-height-px", "32", "--robot.view-width-px", "32", "--model.layers", "3", "--model.dim", "96",
    "--model.ffn-dim", "192", "--evaluation.every", "500", "--evaluation.num-clips", "4", "--checkpoint-every", "40",
    "--train.batch-size", "8", "--train.warmup-fraction", "0", "--train.final-rate-fraction", "1",
    "--train.learning-rate", "1e-3", "--device", "cpu",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def main() -> int:
    """Run the soak; return 0 where nothing was lost."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--minutes", type=float, default=240.0)
    words.add_argument("--home", type=Path, required=True)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--summary", type=Path, default=Path(__file__).with_name("summary.json"))
    told = words.parse_args()
    told.home.mkdir(parents=True)
    data = ["data", "make", "recorded", "--families", "reach", "--episodes", "40", "--size-px", "32", "32"]
    subprocess.run(_command(data), cwd=told.home, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    figures = soak(told.home, told.minutes, random.Random(told.seed))
    write_json(told.summary, figures)
    print(json.dumps(figures, indent=2))
    return 0 if figures["survived"] else 1


def soak(home: Path, minutes: float, draw: random.Random) -> dict[str, Any]:
    """Train both runs for so long, disturb one of them, then compare."""
    start_s = time.monotonic()
    end_s = start_s + 60 * minutes
    whole, split = home / "whole", home / "split"
    undisturbed, disturbed = _train(home, whole), _train(home, split)
    samples: list[dict[str, float]] = []
    kills: list[str] = []
    sampled_s, kill_s = start_s, time.monotonic() + draw.expovariate(1 / MEAN_LIFE_S)
    while time.monotonic() < end_s:
        time.sleep(LOOK_S)
        if undisturbed.poll() is not None:
            raise RuntimeError(f"the undisturbed run ended: see {home / 'whole.log'}")
        if time.monotonic() - sampled_s >= SAMPLE_S:
            sampled_s = time.monotonic()
            samples.append(_used(undisturbed.pid) | {"at_s": sampled_s - start_s})
        if disturbed.poll() is not None or time.monotonic() >= kill_s:
            if disturbed.poll() is None:
                kills.append(_disturb(disturbed, draw))
            if disturbed.poll() is not None:
                disturbed = _train(home, split)
            kill_s = time.monotonic() + draw.expovariate(1 / MEAN_LIFE_S)
    for process in (undisturbed, disturbed):
        process.send_signal(signal.SIGTERM)
    for process in (undisturbed, disturbed):
        process.wait()
    num_steps = len(_story(whole))
    disturbed_steps = len(_story(split))
    if disturbed_steps > num_steps:
        raise RuntimeError("the disturbed run came further than the other one")
    last = _train(home, split, num_steps)
    if last.wait():
        raise RuntimeError(f"the disturbed run could not be ended: see {home / 'split.log'}")
    return {
        "minutes": (time.monotonic() - start_s) / 60,
        "num_steps": num_steps,
        "disturbed_steps_in_time": disturbed_steps,
        "kills": {name: kills.count(name) for name in sorted(set(kills))},
        "num_kills": len(kills),
        "num_resumes": json.loads(next(split.glob("*/status.json")).read_text())["num_resumes"],
        **_compare(whole, split, num_steps),
        "used": _flatness(samples),
        "environment": describe_environment()["cpu"],
        "torch": torch.__version__,
    }


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "wamlab.cli", *words]


def _train(home: Path, runs: Path, num_steps: int = ALMOST_ENDLESS) -> subprocess.Popen[bytes]:
    words = ["train", "tiny", "--data.root", "recorded", *OPTIONS, "--train.num-steps", str(num_steps)]
    words += ["--runs", runs.name, *(["--resume"] if any(runs.glob("*/status.json")) else [])]
    with (home / f"{runs.name}.log").open("ab") as log:
        return subprocess.Popen(_command(words), cwd=home, env=ENVIRONMENT, stdout=log, stderr=log)


def _disturb(process: subprocess.Popen[bytes], draw: random.Random) -> str:
    """Send a signal at the moment that has come; wait for the end, or let a stopped process go on."""
    number = draw.choice(KILLS)
    process.send_signal(number)
    if number == signal.SIGSTOP:
        time.sleep(draw.uniform(0.5, 5.0))
        process.send_signal(signal.SIGCONT)
    else:
        process.wait()
    return number.name


def _used(pid: int) -> dict[str, float]:
    """Return resident MiB, open files and threads of a process."""
    place = Path(f"/proc/{pid}")
    told = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
    return {
        "rss_mib": int(told["VmRSS"].split()[0]) / 1024,
        "files": len(list((place / "fd").iterdir())),
        "threads": int(told["Threads"]),
    }


def _flatness(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians of the second and the last quarter, and whether they are alike."""
    quarter = max(1, len(samples) // 4)
    found: dict[str, Any] = {"num_samples": len(samples)}
    for name in ("rss_mib", "files", "threads"):
        early = statistics.median(s[name] for s in samples[quarter : 2 * quarter] or samples)
        late = statistics.median(s[name] for s in samples[-quarter:])
        is_flat = late <= 1.05 * early if name == "rss_mib" else late <= early + 2
        found[name] = {
            "second_quarter": early, "last_quarter": late, "most": max(s[name] for s in samples), "is_flat": is_flat,
        }  # fmt: skip
    return found


def _story(runs: Path) -> list[dict[str, Any]]:
    return read_lines(next(runs.glob("*/metrics.jsonl")), is_strict=True)[0]


def _compare(whole: Path, split: Path, num_steps: int) -> dict[str, Any]:
    both = [_story(runs) for runs in (whole, split)]
    steps = [[record["step"] for record in story] for story in both]
    bits = [[(record["loss"], record["gradient_norm"]) for record in story] for story in both]
    name = f"step_{num_steps:08d}"
    weights = [
        {
            f"{file}:{key}": tensor
            for file in ("model", "ema")
            for key, tensor in load_file(next(runs.glob(f"*/checkpoints/{name}")) / f"{file}.safetensors").items()
        }
        for runs in (whole, split)
    ]
    differing = sum(a != b for a, b in zip(*bits, strict=False))
    figures = {
        "steps_without_gap": all(own == list(range(1, num_steps + 1)) for own in steps),
        "steps_that_differ": differing + abs(len(bits[0]) - len(bits[1])),
        "weights_that_differ": sum(not torch.equal(weights[0][key], weights[1][key]) for key in weights[0]),
        "loss_first": statistics.mean(loss for loss, _ in bits[0][:50]),
        "loss_last": statistics.mean(loss for loss, _ in bits[0][-50:]),
    }
    survived = figures["steps_without_gap"] and not figures["steps_that_differ"] + figures["weights_that_differ"]
    return figures | {"survived": survived}


if __name__ == "__main__":
    sys.exit(main())
