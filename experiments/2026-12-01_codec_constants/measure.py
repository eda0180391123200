"""Measure which cosine coefficients of robot video carry its energy, and their mean and spread.

    python experiments/2026-12-01_codec_constants/measure.py FOLDER_OF_MP4 wamlab/codec/dct_constants.json

Sources are tabletop episodes (64 and 96 px) and real robot clips at two frame spacings; each one's variances are
divided by its total energy, then averaged with WEIGHTS (small sharp pictures need the coefficients most: with equal
weights 64-px tabletop video came back at 26.5 dB). Coefficients are ranked by this mean share of energy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import torch

from wamlab.codec.video import GROUP, basis_of
from wamlab.sim.experts import play_episodes

NUM_KEPT = 128
WEIGHTS = (0.6, 0.2, 0.1, 0.1)
FAMILIES = ("reach", "push", "pick_place", "stack")


def tabletop(size: int) -> Iterator[np.ndarray]:
    for episode in play_episodes(FAMILIES, 24, seed=11, size=size):
        yield from episode.frames.values()


def recorded(folder: Path, spacing: int) -> Iterator[np.ndarray]:
    for path in sorted(folder.glob("*.mp4")):
        with av.open(str(path)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        video = np.stack(frames[::spacing])
        yield video[:, : video.shape[1] // 16 * 16, : video.shape[2] // 16 * 16]


def patches(video: np.ndarray, stride: int, group: int) -> torch.Tensor:
    """Return all patches [n, group * stride * stride * 3] in -1..1."""
    length = len(video) // group * group
    t, (h, w) = length // group, (video.shape[1] // stride, video.shape[2] // stride)
    cut = torch.from_numpy(video[:length]).double() / 127.5 - 1
    cut = cut.reshape(t, group, h, stride, w, stride, 3).permute(0, 2, 4, 1, 3, 5, 6)
    return cut.reshape(t * h * w, -1)


def measure(sources: list[list[np.ndarray]], stride: int, group: int, names: list[list[int]]) -> torch.Tensor:
    """Return [3, coefficients]: mean, standard deviation and share of energy, the weighted average over sources."""
    basis = basis_of(names, group, stride)
    moments = []
    for videos in sources:
        values = torch.cat([patches(video, stride, group) @ basis for video in videos])
        mean, variance = values.mean(0), values.var(0)
        moments.append(torch.stack([mean, variance, variance / variance.sum()]))
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    mean, variance, share = torch.einsum("s,skc->kc", weights, torch.stack(moments))
    return torch.stack([mean, variance.sqrt(), share])


def main(folder: Path, target: Path) -> None:
    sources = [list(tabletop(64)), list(tabletop(96)), list(recorded(folder, 1)), list(recorded(folder, 3))]
    found = {}
    for stride in (8, 16):
        later = [[t, c, v, h] for t in range(GROUP) for c in range(3) for v in range(stride) for h in range(stride)]
        mean, std, share = measure(sources, stride, GROUP, later)
        order = share.argsort(descending=True)[:NUM_KEPT].tolist()
        kept = [later[i] for i in order]
        first = [[0, c, v, h] for c in range(3) for v in range(stride) for h in range(stride)]
        first_mean, first_std, first_share = measure(sources, stride, 1, first)
        static = {tuple(name) for name in kept if name[0] == 0}
        finer_order = [i for i in first_share.argsort(descending=True).tolist() if tuple(first[i]) not in static]
        num_moving = sum(name[0] > 0 for name in kept)
        finer = finer_order[:num_moving]
        print(stride, f"energy kept by 48: {share[order[:48]].sum():.4f}, moving among 48: "
              f"{sum(n[0] > 0 for n in kept[:48])}")  # fmt: skip
        found[str(stride)] = {
            "kept": kept,
            "mean_std": [[round(mean[i].item(), 6), round(std[i].item(), 6)] for i in order],
            "finer": [first[i] for i in finer],
            "finer_mean_std": [[round(first_mean[i].item(), 6), round(first_std[i].item(), 6)] for i in finer],
        }
    target.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
