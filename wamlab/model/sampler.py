"""Sampling a block: solvers of the probability-flow ODE, and the loop that runs the network along one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from wamlab.errors import InputError
from wamlab.flow import euler_step, solver_levels
from wamlab.model.kv_cache import History
from wamlab.model.wam import WorldActionModel


class Euler:
    """First-order steps along the flow."""

    def __init__(self, levels: list[float]) -> None:
        self.levels = levels

    def step(self, index: int, noised: Tensor, velocity: Tensor) -> Tensor:
        """Move from level ``index`` to the next."""
        return euler_step(noised, velocity, self.levels[index], self.levels[index + 1])


class UniPC:
    """Second-order predictor-corrector in x0 prediction (UniPC bh2, arXiv 2302.04867), as DreamZero runs it (spec 6.2).

    The corrector acts from the second step on; the last predictor step is of first order.
    """

    def __init__(self, levels: list[float]) -> None:
        self.levels = levels
        self.log_snr = [math.log((1 - s) / s) if 0 < s < 1 else math.inf for s in levels]
        self._clean: list[Tensor] = []  # x0 of the last two evaluations
        self._corrected: Tensor | None = None  # state the last predictor step started from
        self._order = 0  # of the last predictor step

    def step(self, index: int, noised: Tensor, velocity: Tensor) -> Tensor:
        """Correct the state at level ``index`` with its new evaluation, then predict the next one."""
        level = self.levels[index]
        clean = noised - level * velocity
        if index > 0:
            noised = self._correct(index, clean)
        is_last = index == len(self.levels) - 2
        self._order = 1 if index == 0 or is_last else 2
        self._clean = [*self._clean, clean][-2:]
        self._corrected = noised
        return self._predict(index, noised)

    def _predict(self, index: int, noised: Tensor) -> Tensor:
        level, following = self.levels[index], self.levels[index + 1]
        h = self.log_snr[index + 1] - self.log_snr[index]
        drift = self._clean[-1]
        if self._order == 2:
            ratio = (self.log_snr[index - 1] - self.log_snr[index]) / h
            drift = drift + 0.5 * (self._clean[-2] - self._clean[-1]) / ratio
        return following / level * noised - (1 - following) * math.expm1(-h) * drift

    def _correct(self, index: int, clean: Tensor) -> Tensor:
        assert self._corrected is not None
        previous, level = self.levels[index - 1], self.levels[index]
        h = self.log_snr[index] - self.log_snr[index - 1]
        expm1 = math.expm1(-h)
        before = self._clean[-1]
        change = clean - before
        if self._order == 1:
            correction = 0.5 * change
        else:
            ratio = (self.log_snr[index - 2] - self.log_snr[index - 1]) / h
            phi = expm1 / -h - 1
            b1, b2 = phi / expm1, 2 * (phi / -h - 0.5) / expm1
            rho1 = (b2 - b1) / (ratio - 1)  # solves [[1, 1], [ratio, 1]] rho = b
            correction = rho1 * (self._clean[-2] - before) / ratio + (b1 - rho1) * change
        return level / previous * self._corrected - (1 - level) * expm1 * (before + correction)


SOLVERS: dict[str, Callable[[list[float]], Euler | UniPC]] = {"euler": Euler, "unipc": UniPC}


def solve(
    velocity: Callable[[Tensor, float], Tensor],
    noise: Tensor,
    num_steps: int,
    *,
    solver: str = "euler",
    shift: float = 5.0,
) -> Tensor:
    """Integrate any velocity field from noise to data."""
    levels = solver_levels(num_steps, shift).tolist()
    stepper = choose_solver(solver)(levels)
    state = noise
    for index in range(num_steps):
        state = stepper.step(index, state, velocity(state, levels[index]))
    return state


def choose_solver(name: str) -> Callable[[list[float]], Euler | UniPC]:
    """Return a solver by name."""
    if name not in SOLVERS:
        raise InputError(f'there is no solver "{name}": choose one of {", ".join(SOLVERS)}')
    return SOLVERS[name]


def draw_block_noise(
    num_sessions: int,
    latent_shape: Sequence[int],
    action_shape: Sequence[int],
    generator: Generator,
) -> tuple[Tensor, Tensor]:
    """Draw the noise a block starts from: latents (b, t, c, h, w) and actions (b, a, j)."""
    return tuple(
        torch.randn(num_sessions, *shape, generator=generator, device=generator.device)
        for shape in (latent_shape, action_shape)
    )  # pyright: ignore[reportReturnType]


def sample_block(
    net: WorldActionModel,
    history: History,
    state: Float[Tensor, "b s k"],
    noise: tuple[Tensor, Tensor],
    *,
    num_steps: int = 8,
    solver: str = "euler",
    shift: float = 5.0,
    has_integer_time: bool = False,
    condition: Tensor | None = None,
) -> tuple[Float[Tensor, "b t c h w"], Float[Tensor, "b a j"]]:
    """Denoise the next block of every session: latents and actions from ``noise`` along one schedule.

    ``has_integer_time`` truncates the network's time to whole thousandths as the reference does at inference; by
    default the network is asked at the very levels the solver stands at, as in training.
    """
    levels = solver_levels(num_steps, shift).tolist()
    video_solver, action_solver = (choose_solver(solver)(levels) for _ in range(2))
    latents, actions = noise
    for index in range(num_steps):
        level = math.floor(1000 * levels[index]) / 1000 if has_integer_time else levels[index]
        asked = torch.full((len(state),), level, dtype=torch.float64, device=state.device)
        velocity = net.denoise(history, latents, actions, state, asked, asked, condition)
        latents = video_solver.step(index, latents, velocity.video)
        actions = action_solver.step(index, actions, velocity.actions)
    return latents, actions
