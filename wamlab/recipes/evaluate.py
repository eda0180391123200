"""What a network has learnt, measured on held-out episodes of its own dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from wamlab.flow import flow_loss, with_noise, with_noise_at
from wamlab.model.sampler import draw_block_noise, sample_block
from wamlab.recipes.build import Workbench
from wamlab.recipes.session import start_history
from wamlab.score.action import ActionErrors, measure_action_errors
from wamlab.score.video import measure_frame_errors, psnr_db
from wamlab.train import autocast, step_generator
from wamlab.types import Batch, Clip

NOISE_SEED = 20_260_401  # of every evaluation, so that two of them differ by their weights only


@dataclass(frozen=True)
class HeldOut:
    """A fixed set of held-out clips, read and encoded once."""

    clips: Sequence[Clip]
    batches: Sequence[Batch]

    @property
    def num_clips(self) -> int:
        return len(self.clips)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation's figures; ``predicted`` holds the sampled frames for pictures."""

    held_out_loss: float
    held_out_video_loss: float
    held_out_action_loss: float
    held_out_loss_by_level: dict[str, float]
    action: ActionErrors
    video_psnr_db: float
    video_psnr_copy_db: float  # of repeating the last frame seen before each block
    predicted: np.ndarray  # uint8 [clip, t, h, w, 3]; frame 0 is real

    def record(self, step: int) -> dict:
        """Return the line for ``evaluations.jsonl``."""
        return {
            "step": step,
            "held_out_loss": self.held_out_loss,
            "held_out_video_loss": self.held_out_video_loss,
            "held_out_action_loss": self.held_out_action_loss,
            "held_out_loss_by_level": self.held_out_loss_by_level,
            "action_error": self.action.model,
            "action_error_mean_baseline": self.action.mean,
            "action_error_by_tick": self.action.by_tick,
            "video_psnr_db": self.video_psnr_db,
            "video_psnr_copy_db": self.video_psnr_copy_db,
        }


def read_held_out(bench: Workbench) -> HeldOut:
    """Read evenly spaced clips of the held-out episodes; the same ones in every evaluation."""
    reader = bench.held_out
    num_clips = min(bench.recipe.evaluation.num_clips, reader.num_samples)
    indices = np.linspace(0, reader.num_samples - 1, num_clips).round().astype(int)
    clips = [reader.read(int(index), seed=0) for index in indices]
    size = bench.recipe.train.batch_size
    batches = [bench.encoder(clips[start : start + size]) for start in range(0, len(clips), size)]
    return HeldOut(clips, batches)


@torch.no_grad()
def evaluate(bench: Workbench, held_out: HeldOut) -> Evaluation:
    """Measure held-out losses, open-loop action errors and predicted video of the network as it is."""
    recipe = bench.recipe
    was_training = bench.net.training
    bench.net.eval()
    with autocast(bench.device, has_bf16=recipe.train.has_bf16):
        losses = _measure_losses(bench, held_out)
        by_level = {
            f"{level:g}": _measure_losses(bench, held_out, level)[0] for level in recipe.evaluation.noise_levels
        }
        sampled = [predict_window(bench, batch, seed=i) for i, batch in enumerate(held_out.batches)]
    if bench.is_shared:  # no backward pass frees what these gathered
        from wamlab.speed.shard import free_weights

        free_weights(bench.net)
    bench.net.train(was_training)
    actions = torch.cat([actions for _, actions in sampled]).float().cpu().numpy()
    latents = torch.cat([latents for latents, _ in sampled]).float()
    real = np.stack([clip.frames for clip in held_out.clips])
    predicted = bench.encoder.decode(latents, torch.from_numpy(real[:, 0]), real.shape[1]).cpu().numpy()
    recorded = np.stack([clip.actions for clip in held_out.clips])
    mask = np.stack([clip.action_mask for clip in held_out.clips])
    count = mask.sum(axis=(0, 1))
    mean_action = np.where(mask, recorded, 0).sum(axis=(0, 1)) / np.maximum(count, 1)
    return Evaluation(
        *losses,
        held_out_loss_by_level=by_level,
        action=measure_action_errors(actions, recorded, mask, mean_action.astype(np.float32)),
        video_psnr_db=psnr_db(measure_frame_errors(predicted[:, 1:], real[:, 1:])),
        video_psnr_copy_db=psnr_db(measure_frame_errors(copy_last(real, recipe.window.frames_per_block), real[:, 1:])),
        predicted=predicted,
    )


def predict_window(bench: Workbench, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
    """Sample every block of a window from the real frames before it.

    Returns latents [b t c h w], frame 0 being the real one, and actions [b a j] (normalised).
    """
    recipe = bench.recipe
    size = recipe.model.latents_per_block
    generator = step_generator(NOISE_SEED, seed, bench.device)
    history = start_history(bench, batch.text, batch.image)
    history = bench.net.observe(history, batch.latents[:, :1], _frames(batch.condition, slice(0, 1)))
    latents, actions = [batch.latents[:, :1]], []
    for block in range(batch.state.shape[1]):
        span = slice(1 + block * size, 1 + (block + 1) * size)
        condition = _frames(batch.condition, span)
        noise = draw_block_noise(
            len(batch),
            (size, *batch.latents.shape[2:]),
            (recipe.model.actions_per_block, recipe.model.max_action_dim),
            generator,
        )
        block_latents, block_actions = sample_block(
            bench.net,
            history,
            batch.state[:, block : block + 1],
            noise,
            recipe.sampler,
            shift=recipe.noise.shift,
            condition=condition,
        )
        latents.append(block_latents)
        actions.append(block_actions)
        history = bench.net.observe(history, batch.latents[:, span], condition)
    return torch.cat(latents, dim=1), torch.cat(actions, dim=1)


def copy_last(real: np.ndarray, frames_per_block: int) -> np.ndarray:
    """Predict each block of frames [b t h w 3] by repeating the last real frame before it."""
    starts = np.arange(1, real.shape[1], frames_per_block)
    return np.repeat(real[:, starts - 1], frames_per_block, axis=1)[:, : real.shape[1] - 1]


def _frames(condition: Tensor | None, span: slice) -> Tensor | None:
    return None if condition is None else condition[:, span]


def _measure_losses(bench: Workbench, held_out: HeldOut, level: float | None = None) -> tuple[float, float, float]:
    """Return total, video and action loss under fixed noise: at one level, or as training draws levels."""
    sums = np.zeros(3)
    loss = partial(flow_loss, bench.net, config=bench.recipe.noise)
    for i, batch in enumerate(held_out.batches):
        generator = step_generator(NOISE_SEED, i, bench.device)
        if level is None:
            example = with_noise(batch, generator, bench.recipe.noise)
        else:
            video_level, action_level = (
                torch.full(data.shape[:2], level, dtype=torch.float64, device=bench.device)
                for data in (batch.latents, batch.actions)
            )
            example = with_noise_at(batch, video_level, action_level, generator)
        terms = loss(example)
        sums += len(batch) * np.array([terms.total.item(), terms.video.item(), terms.action.item()])
    return tuple((sums / held_out.num_clips).tolist())
