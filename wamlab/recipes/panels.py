"""Panels of what other rooms made: a dataset, a tuner's front, an iteration of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.lab.clip_viewer import encode_frame
from wamlab.lab.dataset_browser import DatasetBrowser
from wamlab.lab.rollout_panel import RolloutPanel
from wamlab.lab.tuner_front import TunerFront
from wamlab.recipes.plan_memory import GIB
from wamlab.recipes.tune import Tuned
from wamlab.rl.jobs import JobKey
from wamlab.rl.simulate import Timeline


def browse_dataset(dataset: RobotDataset | Path | str, *, max_cameras: int = 3) -> DatasetBrowser:
    """Show a dataset's episodes in this notebook; the first, middle and last frame of each camera when looked at."""
    dataset = dataset if isinstance(dataset, RobotDataset) else open_dataset(dataset)
    fps = dataset.info["fps"]
    rows: list[dict[str, Any]] = [
        {
            "episode": int(number),
            "task": " / ".join(dataset.tasks_of(place)) or "no task",
            "seconds": float(dataset.lengths[place]) / fps,
            "ticks": int(dataset.lengths[place]),
            **dataset.extras_of(place),
        }
        for place, number in enumerate(dataset.episode_index)
    ]

    def thumbnails(place: int) -> list[bytes]:
        ticks = np.unique([0, (dataset.lengths[place] - 1) // 2, dataset.lengths[place] - 1])
        cameras = list(dataset.cameras)[:max_cameras]
        return [encode_frame(frame) for camera in cameras for frame in dataset.frames(place, camera, ticks)]

    return DatasetBrowser(rows, thumbnails, title=f"{dataset.root.name}: {len(rows):,} episodes")


def tuner_panel(tuned: Tuned) -> TunerFront:
    """Show what a tuner found in this notebook: memory against step time, and each choice's plan and command."""
    choices = [
        {
            "label": str(choice.plan),
            "memory_gib": choice.peak_bytes / GIB,
            "step_s": choice.step_s,
            "runs": choice.plan.runs,
            "micro_batch": choice.micro_batch,
            "num_micro_batches": choice.num_micro_batches,
            "command": f'wamlab train {tuned.recipe} --speed.recompute "{choice.plan}" '
            f"--train.num-micro-batches {choice.num_micro_batches}",
        }
        for choice in tuned.front
    ]
    limit_gib = None if tuned.budget_bytes is None else tuned.budget_bytes / GIB
    return TunerFront(choices, limit_gib=limit_gib, title=f"{tuned.recipe} on {tuned.device}")


def rollout_panel(timeline: Timeline, lengths: Mapping[JobKey, int]) -> RolloutPanel:
    """Show an iteration of rollouts in this notebook; ``lengths`` are the chunks of each episode, by group and member.

    Of a bar that another one follows the chunks are known from where that begins.
    """
    later: dict[JobKey, int] = dict(lengths)
    rows = []
    for worker, key, from_chunk, start_s, end_s in sorted(timeline.bars, key=lambda bar: bar[4], reverse=True):
        chunks = max(0, later.get(key, from_chunk) - from_chunk)
        later[key] = from_chunk
        row = {"worker": worker, "group": key[0], "member": key[1], "start_s": start_s, "end_s": end_s}
        rows.append(row | {"chunks": chunks})
    return RolloutPanel(rows, timeline.num_workers)
