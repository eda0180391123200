"""Blocks one after another from what a policy sees: real frames as they come, or the network's own ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from wamlab.recipes.build import Workbench
from wamlab.recipes.session import Session, begin, draw_noise, observe, plan_from
from wamlab.train import step_generator
from wamlab.types import Clip

Feed = Literal["history", "newest", "own"]  # real frames kept, only the newest real frame, or predicted frames
NOISE_SEED = 20_260_401  # of every evaluation, so that two of them differ by their weights only


@dataclass(frozen=True)
class Rolled:
    """What was predicted for held-out clips of several blocks."""

    actions: Float[np.ndarray, "n a j"]  # normalised, and clipped where the way to robot units clips
    frames: UInt8[np.ndarray, "n t h w 3"]  # frame 0 is real


def roll(bench: Workbench, clips: Sequence[Clip], feed: Feed, *, batch_size: int = 32) -> Rolled:
    """Predict every block of the clips in turn; states are the recorded ones, also beside predicted frames.

    The noise of block ``k`` of a batch is drawn from the batch and ``k``, so feeds differ by what they see alone.
    """
    parts = [
        _roll_batch(bench, clips[start : start + batch_size], feed, start // batch_size)
        for start in range(0, len(clips), batch_size)
    ]
    return Rolled(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("actions", "frames")))


def decode_block(
    bench: Workbench, session: Session, latents: Float[Tensor, "b t c y x"]
) -> UInt8[Tensor, "b frames h w 3"]:
    """Decode the latents of a session's next block, as ``encode_block`` encodes it: with the frame before it."""
    before = bench.encoder.video.encode(session.newest.to(bench.device)[:, None])
    num_frames = 1 + bench.recipe.window.frames_per_block
    return bench.encoder.decode(torch.cat([before.float(), latents.float()], dim=1), session.first, num_frames)[:, 1:]


@torch.no_grad()
def _roll_batch(bench: Workbench, clips: Sequence[Clip], feed: Feed, number: int) -> Rolled:
    device, size = bench.device, bench.recipe.window.frames_per_block
    real = torch.from_numpy(np.stack([clip.frames for clip in clips])).to(device)
    states = torch.from_numpy(np.stack([clip.state for clip in clips])).to(device)
    instructions = [clip.instruction for clip in clips]
    session = begin(bench, real[:, 0], instructions)
    frames, actions = [real[:, :1]], []
    for block in range(states.shape[1]):
        generator = step_generator(NOISE_SEED + block, number, device)
        noise = draw_noise(bench, session.first, generator)
        latents, chunk = plan_from(bench, session, states[:, block], noise)
        predicted = decode_block(bench, session, latents)
        frames.append(predicted)
        actions.append(chunk)
        seen = real[:, 1 + block * size : 1 + (block + 1) * size]
        if feed == "newest":
            session = begin(bench, seen[:, -1], instructions)
        else:
            session = observe(bench, session, predicted if feed == "own" else seen)
    planned = torch.cat(actions, dim=1).float().cpu().numpy()
    if bench.recipe.robot.normalization != "mean_std":
        planned = planned.clip(-1, 1)
    return Rolled(planned, torch.cat(frames, dim=1).cpu().numpy())
