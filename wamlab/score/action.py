"""How close predicted actions are to recorded ones, open loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float


@dataclass(frozen=True)
class ActionErrors:
    """Mean absolute errors of a prediction and of two trivial ones, in normalised units (range -1..1)."""

    model: float
    mean: float  # always predict the mean action of the very samples compared: the hardest constant
    zero: float  # always predict the middle of the range
    by_tick: list[float]  # the model's, by the action's place in its chunk
    by_joint: list[float]  # the model's, by action dimension; nan where no robot has that joint

    @property
    def gain_over_mean(self) -> float:
        """Say how many times smaller the model's error is than the mean's."""
        return self.mean / self.model if self.model else float("inf")


def measure_action_errors(
    predicted: Float[np.ndarray, "b a j"],
    recorded: Float[np.ndarray, "b a j"],
    mask: Bool[np.ndarray, "b a j"],
    mean_action: Float[np.ndarray, " j"],
) -> ActionErrors:
    """Compare action chunks where the mask says a joint exists."""
    error = np.abs(predicted - recorded)

    def masked(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        count = mask.sum(axis=axes)
        total = np.where(mask, values, 0).sum(axis=axes)
        return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)

    everything = (0, 1, 2)
    return ActionErrors(
        model=float(masked(error, everything)),
        mean=float(masked(np.abs(mean_action - recorded), everything)),
        zero=float(masked(np.abs(recorded), everything)),
        by_tick=masked(error, (0, 2)).tolist(),
        by_joint=masked(error, (0, 1)).tolist(),
    )
