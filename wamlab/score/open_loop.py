"""Open-loop figures of predicted chunks and frames: by tick, joint, frame, task and embodiment, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8

from wamlab.score.bootstrap import Interval, bootstrap_means
from wamlab.score.video import measure_frame_errors, measure_ssim


@dataclass(frozen=True)
class Truth:
    """What held-out clips recorded, and where each clip is from."""

    actions: Float[np.ndarray, "n a j"]  # normalised
    mask: Bool[np.ndarray, "n a j"]
    frames: UInt8[np.ndarray, "n t h w 3"]  # frame 0 is what was seen before the first action
    episodes: Sequence[int]  # a number of its own for every episode of every dataset
    tasks: Sequence[str]
    embodiments: Sequence[str]


@dataclass(frozen=True)
class ActionFigures:
    """Mean absolute error of predicted actions in normalised units (range -1..1)."""

    all: Interval
    by_tick: list[Interval]  # by place in the horizon
    by_joint: list[Interval]  # nan where no robot has the joint


@dataclass(frozen=True)
class VideoFigures:
    """Closeness of predicted frames to real ones."""

    psnr_db: Interval
    psnr_db_by_frame: list[Interval]  # frame 1 on
    ssim: Interval
    ssim_by_frame: list[Interval]


def action_figures(predicted: Float[np.ndarray, "n a j"], truth: Truth) -> ActionFigures:
    """Compare actions where the mask says a joint exists."""
    error = np.where(truth.mask, np.abs(predicted - truth.actions), 0.0)
    count = truth.mask.astype(float)

    def intervals(*axes: int) -> list[Interval]:
        return bootstrap_means(error.sum(axis=axes), count.sum(axis=axes), truth.episodes)

    return ActionFigures(intervals(1, 2)[0], intervals(2), intervals(1))


def video_figures(predicted: UInt8[np.ndarray, "n t h w 3"], truth: Truth) -> VideoFigures:
    """Compare frames after the first, which was given."""
    real, guessed = truth.frames[:, 1:], predicted[:, 1:]
    errors, similar = measure_frame_errors(guessed, real), measure_ssim(guessed, real)
    ones = np.ones_like(errors)

    def intervals(values: np.ndarray, *, is_db: bool) -> tuple[Interval, list[Interval]]:
        change = _decibels if is_db else None
        pooled = bootstrap_means(values.mean(axis=1), ones[:, 0], truth.episodes, change=change)[0]
        return pooled, bootstrap_means(values, ones, truth.episodes, change=change)

    return VideoFigures(*intervals(errors, is_db=True), *intervals(similar, is_db=False))


def figures_by(
    groups: Sequence[str],
    truth: Truth,
    predicted: Float[np.ndarray, "n a j"],
    frames: UInt8[np.ndarray, "n t h w 3"],
    baselines: Mapping[str, Float[np.ndarray, "n a j"]],
) -> list[dict[str, Any]]:
    """Return a row for every group of clips, e.g. those of a task: its action error, baselines', and video PSNR."""
    rows = []
    squared = measure_frame_errors(frames[:, 1:], truth.frames[:, 1:]).mean(axis=1)
    for name in sorted(set(groups)):
        own = np.array([group == name for group in groups])
        mask, episodes = truth.mask[own], np.asarray(truth.episodes)[own]

        def error(actions: np.ndarray, own: np.ndarray = own, mask: np.ndarray = mask) -> np.ndarray:
            return np.where(mask, np.abs(actions[own] - truth.actions[own]), 0.0).sum(axis=(1, 2))

        count = mask.sum(axis=(1, 2)).astype(float)
        row: dict[str, Any] = {"name": name, "num_episodes": len(np.unique(episodes))}
        row["action_error"] = bootstrap_means(error(predicted), count, episodes)[0]
        row |= {f"action_error_{key}": error(b).sum() / max(count.sum(), 1.0) for key, b in baselines.items()}
        row["psnr_db"] = bootstrap_means(squared[own], np.ones(own.sum()), episodes, change=_decibels)[0]
        rows.append(row)
    return rows


def hardest_constant(truth: Truth) -> Float[np.ndarray, "n a j"]:
    """Predict the mean action of the very clips compared, per joint: no constant that is known before does better."""
    count = truth.mask.sum(axis=(0, 1))
    mean = np.where(truth.mask, truth.actions, 0).sum(axis=(0, 1)) / np.maximum(count, 1)
    return np.broadcast_to(mean.astype(np.float32), truth.actions.shape)


def _decibels(errors: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):  # no error at all is infinitely many decibels
        return -10 * np.log10(errors)
