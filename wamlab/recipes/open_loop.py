"""Open-loop evaluation of a run on held-out episodes: clips, baselines and the figures of every feed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from wamlab.data.clips import ClipReader
from wamlab.data.normalize import read_vectors
from wamlab.errors import InputError
from wamlab.flow import velocity_loss, with_noise_at
from wamlab.recipes.build import Workbench
from wamlab.recipes.imagine import NOISE_SEED
from wamlab.recipes.parts import Part
from wamlab.score.bootstrap import Interval, bootstrap_means
from wamlab.score.open_loop import Truth
from wamlab.train import autocast, step_generator
from wamlab.types import Clip

EPISODES_APART = 10**9  # between the episode numbers of two datasets


@dataclass(frozen=True)
class HeldOutClips:
    """One clip of each of some held-out episodes, several blocks long, with what the trivial baselines need."""

    clips: Sequence[Clip]
    truth: Truth
    repeated: np.ndarray  # float32 [n a j]: the action before each block, through the block
    num_blocks: int

    def half(self, remainder: int) -> HeldOutClips:
        """Return every second clip: of even places for 0, of odd ones for 1."""
        return self.rows(np.arange(remainder, len(self.clips), 2))

    def rows(self, rows: np.ndarray) -> HeldOutClips:
        """Return some of the clips."""
        truth, places = self.truth, [int(row) for row in rows]
        chosen = Truth(
            truth.actions[rows],
            truth.mask[rows],
            truth.frames[rows],
            [truth.episodes[row] for row in places],
            [truth.tasks[row] for row in places],
            [truth.embodiments[row] for row in places],
        )
        return HeldOutClips([self.clips[row] for row in rows], chosen, self.repeated[rows], self.num_blocks)


def read_clips(
    bench: Workbench, num_clips: int, num_blocks: int, *, episodes: Sequence[Sequence[int]] | None = None
) -> HeldOutClips:
    """Read one clip of each of up to ``num_clips`` held-out episodes, evenly spaced over the datasets' lists.

    Clips have ``num_blocks`` blocks, or as many as half of the episodes can hold. ``episodes`` (of each dataset) takes
    the place of the held-out ones. Raises InputError where there is no clip.
    """
    parts = bench.parts
    chosen = episodes or [part.held_out.episodes for part in parts]
    readers, length = _readers(bench, parts, chosen, num_blocks)
    found: list[tuple[Clip, int, str, np.ndarray]] = []
    for number, (part, reader) in enumerate(zip(parts, readers, strict=True)):
        own, first = np.unique(reader.sample_episodes, return_index=True)
        count = np.bincount(np.searchsorted(own, reader.sample_episodes), minlength=len(own))
        places = np.linspace(0, len(own) - 1, min(len(own), -(-num_clips // len(parts)))).round().astype(int)
        for place in places.tolist():
            sample = int(first[place] + place % count[place])  # early and late parts of episodes alike
            clip = reader.read(sample, seed=0)
            robot = part.dataset.robot_type or "robot"
            found.append((clip, clip.episode + number * EPISODES_APART, robot, _repeated(reader, clip)))
    clips = [clip for clip, *_ in found]
    truth = Truth(
        np.stack([clip.actions for clip in clips]),
        np.stack([clip.action_mask for clip in clips]),
        np.stack([clip.frames for clip in clips]),
        [episode for _, episode, *_ in found],
        [clip.instruction for clip in clips],
        [robot for _, _, robot, _ in found],
    )
    return HeldOutClips(clips, truth, np.stack([before for *_, before in found]), length)


def loss_intervals(
    bench: Workbench, held_out: HeldOutClips, levels: Sequence[float], *, batch_size: int = 32
) -> dict[str, Interval]:
    """Return the flow loss of the clips' first windows at every noise level, and "mean" over the levels."""
    clips = [first_window(bench, clip) for clip in held_out.clips]
    losses = np.zeros((len(clips), len(levels)))
    with torch.no_grad(), autocast(bench.device, has_bf16=bench.recipe.train.has_bf16):
        for start in range(0, len(clips), batch_size):
            batch = bench.encoder(clips[start : start + batch_size])
            for column, level in enumerate(levels):
                video_level, action_level = (
                    torch.full(data.shape[:2], level, dtype=torch.float64, device=bench.device)
                    for data in (batch.latents, batch.actions)
                )
                generator = step_generator(NOISE_SEED, start + column, bench.device)
                example = with_noise_at(batch, video_level, action_level, generator)
                predicted, target = bench.net(example.batch, example.seen), example.target
                for i in range(len(batch)):
                    one = slice(i, i + 1)
                    losses[start + i, column] = velocity_loss(
                        predicted[one], target[one], video_level[one], action_level[one], batch.action_mask[one],
                        bench.recipe.noise,
                    ).total.item()  # fmt: skip
    episodes, ones = held_out.truth.episodes, np.ones_like(losses)
    found = bootstrap_means(losses, ones, episodes)
    mean = bootstrap_means(losses.mean(axis=1), ones[:, 0], episodes)
    return {f"{level:g}": interval for level, interval in zip(levels, found, strict=True)} | {"mean": mean[0]}


def copied(held_out: HeldOutClips, num_frames: int | None = None) -> np.ndarray:
    """Predict frames by repeating the one seen last: every ``num_frames`` a new one, or the first throughout."""
    real = held_out.truth.frames
    last = np.arange(real.shape[1] - 1)
    seen = np.zeros_like(last) if num_frames is None else last // num_frames * num_frames
    return np.concatenate([real[:, :1], real[:, seen]], axis=1)


def first_window(bench: Workbench, clip: Clip) -> Clip:
    """Cut a clip to as many blocks as the network sees in training."""
    window = bench.recipe.window
    num_actions = window.max_blocks * window.actions_per_block
    return replace(
        clip,
        frames=clip.frames[: window.num_frames],
        actions=clip.actions[:num_actions],
        action_mask=clip.action_mask[:num_actions],
        state=clip.state[: window.max_blocks],
    )


def _readers(
    bench: Workbench, parts: Sequence[Part], episodes: Sequence[Sequence[int]], num_blocks: int
) -> tuple[list[ClipReader], int]:
    """Return readers of the longest clips, up to ``num_blocks``, that half of the episodes hold."""
    least = bench.recipe.window.max_blocks
    for length in range(max(num_blocks, least), least - 1, -1):
        window = replace(bench.recipe.window, max_blocks=length, is_full_only=True)
        is_long = [
            np.mean(part.dataset.lengths[list(own)] >= window.num_rows)
            for part, own in zip(parts, episodes, strict=True)
        ]
        if min(is_long) >= 0.5 or (length == least and min(is_long) > 0):
            held_out = zip(parts, episodes, strict=True)
            return [
                ClipReader(
                    part.dataset, part.held_out.robot, window, episodes=own, is_training=False, source=part.frames,
                    normalizers=part.held_out.normalizers,
                )
                for part, own in held_out
            ], length  # fmt: skip
    raise InputError(f"no held-out episode is as long as a window of {least} blocks: give data.held_out_fraction more")


def _repeated(reader: ClipReader, clip: Clip) -> np.ndarray:
    """Return the action commanded just before each block, through the block; of an episode's first row, zero."""
    window, robot = reader.window, reader.robot
    anchors = clip.first_row + window.block_ticks * np.arange(len(clip.state))
    actions = read_vectors(reader.dataset, clip.episode, robot.action_column)
    states = read_vectors(reader.dataset, clip.episode, robot.state_column)
    before = reader.normalizers.actions_to_model(actions[np.maximum(anchors - 1, 0)][:, None], states[anchors])[:, 0]
    before[anchors == 0] = 0
    return np.repeat(before, window.actions_per_block, axis=0)
