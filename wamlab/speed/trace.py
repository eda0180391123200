"""A Perfetto trace of chosen training steps, written into a run folder: drag it into https://ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from pathlib import Path
from uuid import uuid4

import torch
from torch.profiler import ProfilerActivity, profile

from wamlab.types import StepRecord


def traced(
    records: Iterable[StepRecord], steps: Collection[int], folder: Path | str, *, first_step: int = 0
) -> Generator[StepRecord, None, None]:
    """Pass training records on; record each of ``steps`` into ``folder/trace_step_00000042.json``.

    The parts that the run's ``Clock`` times are named in the trace. ``first_step`` counts the steps finished before
    the records begin. Steps that are not traced cost nothing; a traced one is slower, mostly in writing its file.
    """
    iterator, step, wanted = iter(records), first_step + 1, frozenset(steps)
    try:
        while True:
            profiler = _profiler() if step in wanted else None
            if profiler is not None:
                profiler.start()
            try:
                record = next(iterator)
            except StopIteration:
                return
            finally:
                if profiler is not None:
                    profiler.stop()
            if profiler is not None:
                _write(profiler, Path(folder) / f"trace_step_{record.step:08d}.json")
            step = record.step + 1
            yield record
    finally:
        if isinstance(iterator, Generator):
            iterator.close()  # the loader's threads end with it


def _profiler() -> profile:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    return profile(activities=activities)


def _write(profiler: profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{uuid4().hex[:8]}.json")  # a reader never sees half a file
    try:
        profiler.export_chrome_trace(str(partial))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
