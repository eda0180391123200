"""What a chunk costs on a worker: the line fixed + row * batch, its fit to measurements, the batch to choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wamlab.errors import InputError, check_range


@dataclass(frozen=True)
class Service:
    """Time of one round on a worker: one chunk of every episode it holds."""

    fixed_s: float = 0.12  # of one policy call, whatever its batch
    row_s: float = 0.02  # of each episode in the batch
    env_s: float = 0.08  # median time of a chunk in one environment
    env_spread: float = 0.3  # sigma of its log-normal spread; the same draw for a chunk under every rule
    move_s: float = 0.02  # to fetch the state of an episode that last ran elsewhere
    has_parallel_envs: bool = True  # a round waits for the slowest environment; else for one after the other

    def __post_init__(self) -> None:
        check_range("service", self, 0, float("inf"), "fixed_s", "row_s", "env_s", "env_spread", "move_s")
        if self.fixed_s + self.row_s <= 0:
            raise InputError("service.fixed_s and service.row_s are both 0: a chunk must take time")

    def policy_s(self, num_rows: int) -> float:
        """Return the time of one policy call for ``num_rows`` episodes."""
        return self.fixed_s + self.row_s * num_rows


SERVICES: Mapping[str, Service] = {
    "latency-bound": Service(fixed_s=0.25, row_s=0.005),
    "balanced": Service(),
    "compute-bound": Service(fixed_s=0.03, row_s=0.04),
}


def fit_service(measured_s: Mapping[int, float], **others: float) -> Service:
    """Fit fixed_s and row_s to the measured time of a round at several batches, by least squares of relative errors.

    Raises InputError for fewer than two batches.
    """
    if len(measured_s) < 2:
        raise InputError(f"a cost line needs rounds of at least two batch sizes, got {sorted(measured_s)}")
    rows, times_s = np.array(list(measured_s), float), np.array(list(measured_s.values()), float)
    design = np.stack([1 / times_s, rows / times_s], axis=1)
    fixed_s, row_s = np.linalg.lstsq(design, np.ones_like(times_s), rcond=None)[0].tolist()
    if fixed_s < 0:
        fixed_s, row_s = 0.0, float(np.mean(times_s / rows))
    elif row_s < 0:
        fixed_s, row_s = float(np.mean(times_s)), 0.0
    return Service(fixed_s=fixed_s, row_s=row_s, **others)  # pyright: ignore[reportArgumentType]


def choose_batch(
    measured_s: Mapping[int, float], *, row_bytes: int = 0, memory_bytes: int | float = float("inf"), gain: float = 0.01
) -> int:
    """Return the batch with the most episodes a second that fits; a larger one must add more than ``gain``.

    Raises InputError where not even the smallest measured batch fits.
    """
    fitting = sorted(batch for batch in measured_s if batch * row_bytes <= memory_bytes)
    if not fitting:
        raise InputError(
            f"no measured batch of {sorted(measured_s)} fits {memory_bytes:g} bytes at {row_bytes:,} an episode"
        )
    best = fitting[0]
    for batch in fitting[1:]:
        if batch / measured_s[batch] > (1 + gain) * best / measured_s[best]:
            best = batch
    return best
