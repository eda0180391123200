"""A small classifier that says whether a picture shows the task done, learnt from how recorded episodes end.

Frames of an episode's end are examples of its instruction done; earlier frames are not, and neither is an end beside
the instruction of another episode, or the head would learn what any end looks like.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, UInt8
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from wamlab.errors import InputError

WIDTH = 24
SHRINK_PX = 16  # of the canvas' sides before the last layers
MOVED_PX = 2  # training frames are moved by up to so many


@dataclass(frozen=True)
class Endings:
    """Frames and whether they show their instruction done."""

    frames: UInt8[Tensor, "b h w 3"]
    text: Float[Tensor, "b d"]  # mean of the instruction's token features
    is_done: Bool[Tensor, " b"]


class SuccessHead(nn.Module):
    """Convolutions over the canvas, their channels scaled and moved by the instruction (FiLM, arXiv 1709.07871)."""

    def __init__(self, height_px: int, width_px: int, text_dim: int) -> None:
        super().__init__()
        if height_px % SHRINK_PX or width_px % SHRINK_PX:
            raise InputError(f"a canvas of {height_px} x {width_px} px does not divide by {SHRINK_PX}: resize it")
        self.eyes = nn.Sequential(
            nn.Conv2d(3, WIDTH, 5, 2, 2), nn.ReLU(), nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, 2, 1),
        )  # fmt: skip
        self.words = nn.Sequential(nn.Linear(text_dim, 64), nn.ReLU(), nn.Linear(64, 4 * WIDTH))
        self.mixed = nn.Conv2d(2 * WIDTH, WIDTH, 3, 2, 1)
        num_places = (height_px // SHRINK_PX) * (width_px // SHRINK_PX)
        self.verdict = nn.Sequential(nn.Linear(WIDTH * num_places, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, frames: UInt8[Tensor, "b h w 3"], text: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """Return the logit of each frame showing its instruction done."""
        seen = self.eyes(frames.permute(0, 3, 1, 2).float() / 127.5 - 1)
        scale, shift = self.words(text)[..., None, None].chunk(2, dim=1)
        mixed = F.relu(self.mixed(F.relu(seen * (1 + scale) + shift)))
        return self.verdict(mixed.flatten(1))[:, 0]

    @torch.no_grad()
    def score(self, frames: UInt8[Tensor, "b h w 3"], text: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """Return the probability of each frame showing its instruction done."""
        return self(frames, text).sigmoid()


def mean_text(text: Float[Tensor, "b n d"]) -> Float[Tensor, "b d"]:
    """Return the mean of the token features that are not padding, which is zero."""
    count = text.abs().sum(dim=-1).gt(0).sum(dim=1).clamp(min=1)
    return text.sum(dim=1) / count[:, None]


def train_head(
    head: SuccessHead, endings: Endings, *, num_steps: int = 600, batch_size: int = 128, seed: int = 0
) -> list[float]:
    """Train in place; half of each batch shows a task done. Return the losses. Raises InputError for one kind alone."""
    kinds = [torch.nonzero(endings.is_done == is_done)[:, 0] for is_done in (True, False)]
    if not all(len(kind) for kind in kinds):
        raise InputError("a success head needs frames of both kinds: done, and not yet done")
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps)
    losses = []
    for _ in range(num_steps):
        rows = torch.cat([k[torch.randint(len(k), (batch_size // 2,), generator=generator)] for k in kinds])
        down, right = torch.randint(-MOVED_PX, MOVED_PX + 1, (2,), generator=generator).tolist()
        frames = endings.frames[rows].roll((down, right), dims=(1, 2))
        loss = F.binary_cross_entropy_with_logits(head(frames, endings.text[rows]), endings.is_done[rows].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def measure_head(head: SuccessHead, endings: Endings, threshold: float = 0.5) -> dict[str, float]:
    """Return how often done and not yet done are recognised, and their mean, for which 0.5 is chance."""
    parts = endings.frames.split(256), endings.text.split(256)
    scores = torch.cat([head.score(f, t) for f, t in zip(*parts, strict=True)])
    said = scores >= threshold
    done = said[endings.is_done].float().mean().item()
    open_ = (~said)[~endings.is_done].float().mean().item()
    return {"done": done, "open": open_, "balanced": (done + open_) / 2}


def write_head(head: SuccessHead, path: Path) -> None:
    """Write the weights of a head."""
    save_file({name: value.contiguous() for name, value in head.state_dict().items()}, path)


def read_head(head: SuccessHead, path: Path) -> SuccessHead:
    """Read weights into a head of the same size; raises InputError where there are none that fit."""
    try:
        head.load_state_dict(load_file(path))
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path} holds no success head of this canvas and text: train it again") from error
    return head
