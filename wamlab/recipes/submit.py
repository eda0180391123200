"""`wamlab submit`: write what trains a recipe on many machines: a Slurm script, a SkyPilot task or a Ray Train program.

The files are short and meant to be read and changed; each starts the same `wamlab train` on every machine, with the
run folder on a disk that all of them see and the first process as the only one that writes the records.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import tyro

from wamlab.errors import InputError, check_range
from wamlab.lab.folders import slug_of
from wamlab.lab.records import write_whole
from wamlab.recipes.order import TrainOrder, read_order
from wamlab.recipes.submit_templates import RAY, SKYPILOT, SLURM

TEXTS = {  # option -> what it may say, an example
    "accelerator": (r"[\w.+-]+", "H100 or A100-80GB"),
    "time": (r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}|UNLIMITED", "24:00:00 or 2-12:00"),
    "partition": (r"[\w.,@+-]*", "gpu or a100,h100"),
    "account": (r"[\w.,@+-]*", "lab"),
}


@dataclass(frozen=True)
class SubmitOrder:
    """Write the files that train a recipe on many machines; all options of `wamlab train` are taken too."""

    nodes: int = 1
    gpus: int = 8  # of a node, with a process each; 0 trains on CPUs
    cpu_processes: int = 1  # of a node without GPUs
    accelerator: str = "H100"  # kind of GPU, for SkyPilot
    time: str = "24:00:00"  # limit of a Slurm job
    partition: str = ""  # of Slurm
    account: str = ""  # of Slurm
    notice_s: int = 300  # before the end or a pre-emption, for the checkpoint
    restarts: int = 3  # after a lost process
    spot: bool = True  # machines that may be taken away, for SkyPilot
    jobs: Path = Path("jobs")  # folder for the files
    replace: bool = False  # a file of that name which says something else, perhaps changed by hand

    def __post_init__(self) -> None:
        check_range("submit", self, 1, 100_000, "nodes", "cpu_processes", "notice_s")
        check_range("submit", self, 0, 1024, "gpus", "restarts")
        for name, (pattern, example) in TEXTS.items():  # they go into a file whose lines are orders
            if not re.fullmatch(pattern, value := getattr(self, name), re.ASCII):
                raise InputError(f"submit.{name} is {value!r}: give one such as {example}")


def submit_command(words: Sequence[str]) -> None:
    """Do what `wamlab submit` is told, and say how to hand the files in."""
    if not words or words[0] not in ENGINES:
        raise InputError(f"name an engine, one of {', '.join(ENGINES)}: wamlab submit slurm tiny --nodes 2")
    engine, *rest = words
    if not rest or (rest[0].startswith("-") and not {"-h", "--help"} & {*rest}):
        raise InputError(f"name a recipe: wamlab submit {engine} tiny --nodes 2")
    recipe = [] if rest[0].startswith("-") else rest[:1]
    prog = f"wamlab submit {engine} {recipe[0] if recipe else 'RECIPE'}"
    order, others = tyro.cli(SubmitOrder, args=rest[len(recipe) :], prog=prog, return_unknown_args=True)
    path = write_job(engine, order, [rest[0], *others])
    print(f"wrote {path}\nread it, then: {HAND_IN[engine].format(path=path)}")


def write_job(engine: str, order: SubmitOrder, train_words: Sequence[str]) -> Path:
    """Write the file of an engine for `wamlab train` with these words, and return its path.

    Raises InputError for words that `wamlab train` would refuse, and for a file there that says something else.
    """
    if odd := [word for word in [*train_words, str(order.jobs)] if not word.isprintable()]:
        raise InputError(f"{odd[0]!r} holds what a line of a file cannot say: give words of one line")
    train: TrainOrder = read_order(TrainOrder, "train", train_words)
    name = slug_of(train.recipe.name)
    if train.processes > 1 or train.resume or train.announce:
        raise InputError(
            "the file starts and resumes the processes itself: leave out --processes, --resume, --announce"
        )
    path = order.jobs / f"{name}{SUFFIXES[engine]}"
    values: dict[str, Any] = {
        "name": name,
        "nodes": order.nodes,
        "processes": order.gpus or order.cpu_processes,
        "restarts": order.restarts,
        "notice_s": order.notice_s,
        "timeout_s": max(1, order.notice_s - 20),  # for torchrun, which then kills
        "python": shlex.quote(sys.executable),
        "words": shlex.join(["train", *_without_runs(train_words)]),
        "words_list": repr(["train", *_without_runs(train_words)]),
        "runs": shlex.quote(str(train.runs)),
        "runs_text": repr(str(train.runs)),
        "jobs": shlex.quote(str(order.jobs)),
        "time": order.time,
        "gpu_line": f"#SBATCH --gpus-per-node={order.gpus}\n" if order.gpus else "",
        "more_lines": "".join(
            f"#SBATCH --{option}={value}\n"
            for option, value in (("partition", order.partition), ("account", order.account))
            if value
        ),
        "resources": f"accelerators: {order.accelerator}:{order.gpus}" if order.gpus else "cpus: 8+",
        "spot": str(order.spot).lower(),
        "use_gpu": bool(order.gpus),
        "backend": "cpu:gloo,cuda:nccl" if order.gpus else "gloo",
    }
    text = ENGINES[engine].substitute(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not order.replace and path.read_bytes() != text.encode():
        raise InputError(f"{path} exists and says something else: --replace writes over it, --jobs elsewhere")
    write_whole(path, text)
    if engine == "slurm":
        path.chmod(0o755)
    return path


def _without_runs(words: Sequence[str]) -> list[str]:
    """Leave ``--runs FOLDER`` out: each engine puts the run where its own job finds it again."""
    kept: list[str] = []
    is_value = False
    for word in words:
        if not is_value and word != "--runs" and not word.startswith("--runs="):
            kept.append(word)
        is_value = word == "--runs" and not is_value
    return kept


ENGINES: dict[str, Template] = {"slurm": SLURM, "skypilot": SKYPILOT, "ray": RAY}
SUFFIXES = {"slurm": ".sbatch", "skypilot": ".sky.yaml", "ray": "_ray.py"}
HAND_IN = {"slurm": "sbatch {path}", "skypilot": "sky jobs launch {path}", "ray": "python {path}"}
