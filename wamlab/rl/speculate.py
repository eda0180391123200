"""Exact speculative sampling of Gaussian denoising steps (De Bortoli et al., arXiv 2501.05370): drafts cost little,
and what comes out is distributed as if every step had been asked for.

No policy here uses it: a world action model's steps move video and actions together. Where the video follows its ODE, a
drafted video is never the asked one, so no later step can be told in advance. Where it is noised, too, drafts with the
velocity of the step before are accepted jointly in 8 to 14 % of the second steps of 8, in under 0.3 % of all others:
the video has too many dimensions. Actions alone would be accepted in 36 to 43 % with 2 steps; with 4 or 8 in 56 to
96 %, but for the last step's 7 to 14 % (trained demo, noise scales 0.1 to 0.7, 2026-12-03).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wamlab.errors import InputError
from wamlab.flow import Gaussian


@dataclass(frozen=True)
class Coupled:
    """Draws from a target, equal to the drafts where those were accepted."""

    value: Float[Tensor, " b ..."]
    is_accepted: Bool[Tensor, " b"]


def couple(
    draft_mean: Float[Tensor, " b ..."],
    target: Gaussian,
    noise: Float[Tensor, " b ..."],
    uniform: Float[Tensor, " b"],
) -> Coupled:
    """Turn ``draft_mean + std * noise`` into a draw from the target, by reflection-maximal coupling (F10).

    A draft is accepted with the ratio of densities, which happens with probability 2 Phi(-|difference| / 2 std); else
    its noise is mirrored along the difference of the means. The target's std is one number for each row, positive;
    ``noise`` is standard normal, ``uniform`` from 0 to 1. Raises InputError for other stds.
    """
    std = target.std.expand_as(target.mean).flatten(1)
    if not (std > 0).all() or not (std == std[:, :1]).all():
        raise InputError("only steps with one positive std for all entries can be speculated: not the ODE's")
    std, flat = std[:, :1], noise.flatten(1)
    shift = (draft_mean - target.mean).flatten(1) / std  # in units of the noise
    # log N(y; target) - log N(y; draft) at y = draft + std * noise
    log_ratio = -(shift * flat).sum(dim=1) - 0.5 * shift.square().sum(dim=1)
    is_accepted = uniform.log() <= log_ratio
    direction = shift / shift.norm(dim=1, keepdim=True).clamp(min=torch.finfo(shift.dtype).tiny)
    mirrored = flat - 2 * direction * (direction * flat).sum(dim=1, keepdim=True)
    kept = torch.where(is_accepted[:, None], shift + flat, mirrored)
    value = target.mean + (std * kept).view_as(target.mean)
    return Coupled(value, is_accepted)


def acceptance(draft_mean: Tensor, target: Gaussian) -> Float[Tensor, " b"]:
    """Return how probably a draft is accepted: 2 Phi(-|difference of means| / 2 std)."""
    distance = ((draft_mean - target.mean) / target.std).flatten(1).norm(dim=1)
    return torch.special.erfc(distance / 2**1.5)


@dataclass(frozen=True)
class Speculated:
    """A chain of noised states, and what it cost."""

    states: tuple[Float[Tensor, " b ..."], ...]  # the start, then the end of every step
    num_calls: int  # of the target, each for a batch of steps


# Where steps end: noised states of all, one after the other, and the step of each row.
Steps = Callable[[Tensor, Sequence[int]], Gaussian]


def speculate(
    target: Steps,
    draft: Steps,
    start: Float[Tensor, " 1 ..."],
    noises: Sequence[Float[Tensor, " 1 ..."]],
    uniforms: Sequence[float],
    *,
    window: int,
) -> Speculated:
    """Walk a chain of Gaussian steps: draft ``window`` of them, ask the target about all at once, keep those accepted.

    The first that is rejected is mirrored, so at least one step is done a call. ``noises`` and ``uniforms`` hold one a
    step, counted, so that a chain does not depend on how it was cut. Draft and target must have the same std.
    """
    if window < 1 or len(noises) != len(uniforms):
        raise InputError(f"a window of {window} steps, {len(noises)} noises, {len(uniforms)} uniform numbers")
    states, num_calls = [start], 0
    while (first := len(states) - 1) < len(noises):
        steps = range(first, min(first + window, len(noises)))
        drafted, means = [states[-1]], []
        for step in steps:
            guess = draft(drafted[-1], [step])
            means.append(guess.mean)
            drafted.append(guess.mean + guess.std * noises[step])
        ends = target(torch.cat(drafted[:-1]), list(steps))
        num_calls += 1
        std = ends.std.expand_as(ends.mean)
        for row, step in enumerate(steps):
            own = Gaussian(ends.mean[row : row + 1], std[row : row + 1])
            found = couple(means[row], own, noises[step], torch.tensor([uniforms[step]], dtype=start.dtype))
            states.append(drafted[row + 1] if found.is_accepted.item() else found.value)
            if not found.is_accepted.item():
                break
    return Speculated(tuple(states), num_calls)
