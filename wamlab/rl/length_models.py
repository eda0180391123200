"""How long robot episodes take: synthetic lengths within the published means and limits of three benchmarks.

A group's task has a limit C and a mean success length m. Success lengths are m times a log-normal factor of the group
(sigma 0.2) times one of the member (sigma 0.12); a group succeeds with probability Beta(p k, (1 - p) k), k = 2.5; a
failure takes C. Spreads and k are assumptions: fit them when real rollouts exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from wamlab.errors import InputError

GROUP_SPREAD, MEMBER_SPREAD, CONCENTRATION = 0.2, 0.12, 2.5


@dataclass(frozen=True)
class LengthModel:
    """Tasks that are drawn with equal chance, or in proportion to ``weights``."""

    name: str
    limits: tuple[int, ...]  # ticks at which each task gives up
    means: tuple[float, ...]  # ticks to success
    success: float  # mean rate
    chunk_ticks: int  # executed after each policy call
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class Lengths:
    """How many chunks each episode of an iteration takes."""

    tasks: Int[np.ndarray, " g"]
    caps: Int[np.ndarray, " g"]  # chunks
    lengths: Int[np.ndarray, "g m"]  # chunks; a failure takes the cap
    is_success: Bool[np.ndarray, "g m"]


# mean ticks of LIBERO's demonstrations by suite (spatial, object, goal, long), limit 512 as SimpleVLA-RL sets it
_LIBERO_MEANS = (122.6, 147.5, 121.6, 267.7)
# limits of RoboTwin 2.0's 50 tasks: ticks, number of tasks
_ROBOTWIN_LIMITS = ((1700, 1), (1500, 1), (1200, 4), (900, 2), (800, 3), (700, 7), (600, 3), (500, 5), (400, 24))
_ROBOTWIN = tuple(limit for limit, number in _ROBOTWIN_LIMITS for _ in range(number))

LENGTH_MODELS: Mapping[str, LengthModel] = {
    model.name: model
    for model in (
        LengthModel("LIBERO-40-mix", (512,) * 4, _LIBERO_MEANS, success=0.9, chunk_ticks=8),
        LengthModel("LIBERO-10", (512,), _LIBERO_MEANS[3:], success=0.6, chunk_ticks=8),
        LengthModel("RoboTwin-50", _ROBOTWIN, tuple(0.37 * c for c in _ROBOTWIN), success=0.7, chunk_ticks=16),
    )
}


def draw_lengths(model: LengthModel, num_groups: int, group_size: int, *, seed: int) -> Lengths:
    """Draw one iteration's episode lengths; the same seed gives the same ones."""
    if num_groups < 1 or group_size < 1:
        raise InputError(f"an iteration needs groups with members, got {num_groups} of {group_size}")
    generator = np.random.default_rng(seed)
    weights = np.asarray(model.weights) / sum(model.weights) if model.weights else None
    tasks = generator.choice(len(model.limits), num_groups, p=weights)
    limits, means = np.asarray(model.limits)[tasks], np.asarray(model.means)[tasks]
    rate = generator.beta(model.success * CONCENTRATION, (1 - model.success) * CONCENTRATION, num_groups)
    factor = np.exp(GROUP_SPREAD * generator.standard_normal((num_groups, 1)))
    factor = factor * np.exp(MEMBER_SPREAD * generator.standard_normal((num_groups, group_size)))
    is_success = generator.random((num_groups, group_size)) < rate[:, None]
    caps = -(-limits // model.chunk_ticks)
    wanted = np.ceil(means[:, None] * factor / model.chunk_ticks).astype(int)
    is_success &= wanted < caps[:, None]
    lengths = np.where(is_success, np.maximum(wanted, 1), caps[:, None])
    return Lengths(tasks, caps, lengths, is_success)
