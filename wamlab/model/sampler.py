"""Sampling a block: solvers of the probability-flow ODE, and the loop that runs the network along one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from wamlab.errors import InputError, check_range
from wamlab.flow import euler_step, solver_levels
from wamlab.model.kv_cache import History
from wamlab.types import Velocity


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


# Which of 16 steps evaluate the network, by number of evaluations; the others reuse the last velocity (spec 6.1).
STATIC_SCHEDULES = {
    8: (0, 1, 2, 6, 10, 13, 14, 15),
    7: (0, 1, 2, 6, 10, 14, 15),
    6: (0, 1, 5, 10, 14, 15),
    5: (0, 1, 2, 7, 12),
}
DYNAMIC_SKIPS = ((0.95, 4), (0.93, 2))  # above this cosine of the last two action velocities, skip so many steps


@dataclass(frozen=True)
class SamplerConfig:
    """How a block is sampled."""

    num_steps: int = 8  # of the solver
    solver: str = "euler"  # or "unipc"
    num_evaluations: int = 0  # of the network, out of 16 steps: 5 to 8; 0 evaluates at every step
    has_dynamic_skips: bool = False  # reuse velocities for as long as the actions' direction barely changes
    guidance_scale: float = 1.0  # of the instruction over the negative one, for video alone; 1: no guidance
    video_end_level: float = 0.0  # noise level at which the video's schedule ends; 0.8 in DreamZero-Flash
    has_integer_time: bool = False  # truncate the network's time to thousandths, as the reference does
    when_full: str = "slide"  # what a session's window does: "slide" over the past, or "restart" as the reference does

    def __post_init__(self) -> None:
        choose_solver(self.solver)
        check_range("sampler", self, 1, math.inf, "num_steps")
        check_range("sampler", self, 0, 0.999, "video_end_level")
        check_range("sampler", self, 0, 100, "guidance_scale")
        if self.when_full not in ("slide", "restart"):
            raise InputError(f'sampler.when_full is "{self.when_full}": give slide or restart')
        if self.num_evaluations and (self.num_steps != 16 or self.num_evaluations not in STATIC_SCHEDULES):
            known = ", ".join(map(str, sorted(STATIC_SCHEDULES)))
            raise InputError(
                f"sampler.num_evaluations {self.num_evaluations} of num_steps {self.num_steps} is no known schedule: "
                f"give one of {known} with num_steps 16, or 0"
            )
        if self.num_evaluations and self.has_dynamic_skips:
            raise InputError("sampler: give num_evaluations or has_dynamic_skips, not both")


class StepSkips:
    """Says at which steps of one sampling call the network is evaluated."""

    def __init__(self, config: SamplerConfig) -> None:
        self.config = config
        self._wanted = STATIC_SCHEDULES.get(config.num_evaluations) or range(config.num_steps)
        self._num_skipped = 0
        self._last: list[Tensor] = []  # action velocities of the last two evaluations

    def is_evaluated(self, index: int) -> bool:
        """Decide for one step; steps are asked for in order."""
        if self._num_skipped:
            self._num_skipped -= 1
            return False
        return index in self._wanted

    def evaluated(self, actions: Tensor) -> None:
        """Note the action velocities (b, a, j) of an evaluation; the session that turned most decides for all."""
        if not self.config.has_dynamic_skips:
            return
        self._last = [*self._last, actions.flatten(1).float()][-2:]
        if len(self._last) == 2:
            cosine = torch.nn.functional.cosine_similarity(*self._last, dim=1).min().item()
            self._num_skipped = next((count for least, count in DYNAMIC_SKIPS if cosine > least), 0)


@runtime_checkable
class Denoises(Protocol):
    """What ``sample_block`` asks: a ``WorldActionModel``, or one that evaluates otherwise."""

    @property
    def denoise(self) -> Callable[..., Velocity]: ...


def sample_block(
    net: Denoises,
    history: History,
    state: Float[Tensor, "b s k"],
    noise: tuple[Tensor, Tensor],
    config: SamplerConfig | None = None,
    *,
    shift: float = 5.0,
    condition: Tensor | None = None,
) -> tuple[Float[Tensor, "b t c h w"], Float[Tensor, "b a j"]]:
    """Denoise the next block of every session: latents and actions from ``noise``.

    By default the network is asked at the very levels the solver stands at, as in training. With guidance the history
    holds 2 b sessions: those with the instruction, then the same ones with the negative instruction. Both are evaluated
    in one call; actions always follow the instruction (spec 6.1).
    """
    config = config or SamplerConfig()
    is_guided = config.guidance_scale != 1
    action_levels = solver_levels(config.num_steps, shift).tolist()
    end = config.video_end_level
    video_levels = [end + (1 - end) * level for level in action_levels]
    video_solver, action_solver = (choose_solver(config.solver)(levels) for levels in (video_levels, action_levels))
    skips = StepSkips(config)
    latents, actions = noise
    velocity = None
    for index in range(config.num_steps):
        if velocity is None or skips.is_evaluated(index):
            video_level, action_level = (
                torch.full((len(state),), _time(levels[index], config), dtype=torch.float64, device=state.device)
                for levels in (video_levels, action_levels)
            )
            velocity = net.denoise(history, latents, actions, state, video_level, action_level, condition)  # pyright: ignore[reportCallIssue]
            if is_guided:
                wanted, unwanted = velocity.video.chunk(2)
                velocity = Velocity(
                    video=unwanted + config.guidance_scale * (wanted - unwanted),
                    actions=velocity.actions.chunk(2)[0],
                )
            skips.evaluated(velocity.actions)
        latents = video_solver.step(index, latents, velocity.video)
        actions = action_solver.step(index, actions, velocity.actions)
    return latents, actions


def _time(level: float, config: SamplerConfig) -> float:
    return math.floor(1000 * level) / 1000 if config.has_integer_time else level
