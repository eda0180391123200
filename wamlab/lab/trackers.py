"""A run's figures in other trackers, read from its folder: live or later, from any machine that sees the folder.

Training knows nothing of it, so a tracker that is slow or away slows nothing down.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.records import Record
from wamlab.lab.report import flattened
from wamlab.lab.run import Run, read_evaluations
from wamlab.lab.tail import Tail

Log = Callable[[int, Mapping[str, float]], None]  # step, figures by name
POLL_S = 1.0


def send(run: Run, to: str, *, project: str = "wamlab", is_followed: bool = False, is_online: bool = False) -> int:
    """Send a run's records and evaluations to "tensorboard", "wandb" or "trackio"; return how many.

    All keep their files on this machine, TensorBoard and W&B in the run folder, unless ``is_online``. If followed, it
    goes on until the run ends. Raises InputError for a tracker that is not installed.
    """
    if to not in TRACKERS:
        raise InputError(f'there is no tracker "{to}": give one of {", ".join(TRACKERS)}')
    tail, num_sent, num_evaluations = Tail(run), 0, 0
    with ExitStack() as stack:
        try:
            log = TRACKERS[to](stack, run, project, is_online)
        except ImportError as error:
            raise InputError(f"{to} cannot be imported ({error}): run pip install 'wamlab[{to}]'") from error
        while True:
            is_last = not is_followed or run.state != "running"
            for record in tail.read()[0]:
                log(record["step"], figures_of(record, "train"))
                num_sent += 1
            evaluations = read_evaluations(run)
            for record in evaluations[num_evaluations:]:
                log(record["step"], figures_of(record, "held-out"))
                num_sent += 1
            num_evaluations = len(evaluations)
            if is_last:
                return num_sent
            time.sleep(POLL_S)


def figures_of(record: Record, group: str) -> dict[str, float]:
    """Return a record's numbers by names such as ``train/split_s.data``."""
    return {
        f"{group}/{name}": float(value)
        for name, value in flattened(record).items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _tensorboard(stack: ExitStack, run: Run, project: str, is_online: bool) -> Log:
    """Write an event file into the run folder's ``tensorboard/``; without torch."""
    event: Any = import_module("tensorboard.compat.proto.event_pb2")
    summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
    files: Any = import_module("tensorboard.summary.writer.event_file_writer")
    if is_online:
        raise InputError("tensorboard sends nothing anywhere: leave out --online")
    writer = files.EventFileWriter(str(run.folder / "tensorboard"))
    stack.callback(writer.close)

    def log(step: int, figures: Mapping[str, float]) -> None:
        values = [summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        writer.add_event(event.Event(step=step, wall_time=time.time(), summary=summary(value=values)))

    return log


def _wandb(stack: ExitStack, run: Run, project: str, is_online: bool) -> Log:
    """Keep a W&B run in the run folder's ``wandb/``; `wandb sync` sends it later."""
    wandb: Any = import_module("wandb")
    mode = "online" if is_online else "offline"
    tracked = wandb.init(project=project, name=run.name, dir=str(run.folder), config=run.config, mode=mode)
    stack.callback(tracked.finish)
    tracked.define_metric("held-out/*", step_metric="step")  # they come after the records of later steps
    tracked.define_metric("train/*", step_metric="step")
    return lambda step, figures: tracked.log({"step": step, **figures})


def _trackio(stack: ExitStack, run: Run, project: str, is_online: bool) -> Log:
    """Write to trackio's own database on this machine; `trackio show` opens it."""
    if is_online:
        raise InputError("trackio goes online by a space: call trackio.init(space_id=...) yourself")
    os.environ.setdefault("TRACKIO_DIR", str(Path(run.folder.parent, ".trackio").resolve()))
    trackio: Any = import_module("trackio")
    trackio.init(project=project, name=run.name, config=run.config)
    stack.callback(trackio.finish)
    return lambda step, figures: trackio.log(dict(figures), step=step)


TRACKERS: dict[str, Callable[[ExitStack, Run, str, bool], Log]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
