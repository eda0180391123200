"""Policy sessions: what has been seen, held by the caller; real frames replace predicted ones as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from wamlab.errors import InputError
from wamlab.model.joined import joined, parted
from wamlab.model.kv_cache import History
from wamlab.model.sampler import draw_block_noise, sample_block
from wamlab.recipes.build import Workbench
from wamlab.train import autocast


@dataclass(frozen=True)
class Session:
    """A batch of parallel sessions: their cached history, and the frames that the next encoding needs."""

    history: History  # twice the sessions with guidance: with the instruction, then with the negative one
    instructions: tuple[str, ...]
    first: UInt8[Tensor, "b h w 3"]  # canvas that the window began with
    newest: UInt8[Tensor, "b h w 3"]

    @property
    def num_bytes(self) -> int:
        """Return the memory that the sessions take."""
        return self.history.num_bytes + self.history.context_bytes + self.first.nbytes + self.newest.nbytes


def start_history(bench: Workbench, text: Float[Tensor, "b n d"], image: Tensor | None = None) -> History:
    """Begin histories; with guidance each session begins twice, the second time with the negative instruction."""
    if bench.recipe.sampler.guidance_scale == 1:
        return bench.net.start(text, image)
    negative = bench.encoder.encode_text([bench.recipe.robot.negative_prompt]).expand(len(text), -1, -1)
    length = max(text.shape[1], negative.shape[1])
    both = torch.cat([F.pad(t, (0, 0, 0, length - t.shape[1])) for t in (text, negative)])
    return bench.net.start(both, None if image is None else torch.cat([image, image]))


@torch.no_grad()
def begin(bench: Workbench, frames: UInt8[Tensor, "b h w 3"], instructions: Sequence[str]) -> Session:
    """Begin sessions with the canvas each one sees first."""
    latents, condition = bench.encoder.encode_first(frames, 1)
    with autocast(bench.device, has_bf16=bench.recipe.train.has_bf16):
        history = start_history(bench, bench.encoder.encode_text(instructions), bench.encoder.encode_image(frames))
        history = bench.net.observe(history, latents, condition)
    return Session(history, tuple(instructions), frames, frames)


@torch.no_grad()
def observe(bench: Workbench, session: Session, frames: UInt8[Tensor, "b t h w 3"]) -> Session:
    """Append the real frames of one executed block.

    A window that has become full slides, keeping the frame it began with, or begins anew with the newest frame as the
    reference does (``sampler.when_full``).
    """
    if session.history.lengths:
        raise InputError("these sessions have seen different numbers of frames: observe_each takes them")
    if does_restart(bench, session):
        _check_block(bench, frames)
        return begin(bench, frames[:, -1], session.instructions)
    seen = _append(bench, session, frames)
    return _slide(bench, seen) if _is_full(bench, session) else seen


def observe_each(bench: Workbench, sessions: Sequence[Session], frames: UInt8[Tensor, "b t h w 3"]) -> list[Session]:
    """Append one executed block to single sessions of any length, in one call of the network where they go on.

    Each gets what ``observe`` gives it alone; together sums are rounded otherwise.
    """
    _check_block(bench, frames)
    found = list(sessions)
    restarting = [row for row, session in enumerate(sessions) if does_restart(bench, session)]
    going_on = [row for row in range(len(sessions)) if row not in restarting]
    if restarting:
        instructions = [sessions[row].instructions[0] for row in restarting]
        _put(found, restarting, part(begin(bench, frames[restarting, -1], instructions)))
    if going_on:
        seen = part(_append(bench, join([sessions[row] for row in going_on]), frames[going_on]))
        is_full = [_is_full(bench, sessions[row]) for row in going_on]
        _put(found, going_on, [_slide(bench, s) if full else s for s, full in zip(seen, is_full, strict=True)])
    return found


def join(sessions: Sequence[Session]) -> Session:
    """Put single sessions together, of whatever length, so that one call plans for all of them."""
    return Session(
        joined([session.history for session in sessions]),
        tuple(instruction for session in sessions for instruction in session.instructions),
        torch.cat([session.first for session in sessions]),
        torch.cat([session.newest for session in sessions]),
    )


def part(session: Session) -> list[Session]:
    """Take sessions apart, each in memory of its own."""
    rows = range(len(session.instructions))
    histories = parted(session.history, len(session.instructions))
    return [
        Session(
            history, (session.instructions[i],), session.first[i : i + 1].clone(), session.newest[i : i + 1].clone()
        )
        for i, history in zip(rows, histories, strict=True)
    ]


def does_restart(bench: Workbench, session: Session) -> bool:
    """Say whether the next block makes a window begin anew, with nothing kept."""
    can_slide = bench.recipe.sampler.when_full == "slide" and bench.recipe.window.max_blocks > 1
    return not can_slide and _is_full(bench, session)


def _is_full(bench: Workbench, session: Session) -> bool:
    """Say whether a window has no room for another block before the one that is planned."""
    window = bench.recipe.window
    most = 1 + (window.max_blocks - 1) * window.latents_per_block
    return session.history.num_frames + window.latents_per_block > most


def _append(bench: Workbench, session: Session, frames: UInt8[Tensor, "b t h w 3"]) -> Session:
    _check_block(bench, frames)
    latents, condition = bench.encoder.encode_block(session.first, session.newest, frames)
    with autocast(bench.device, has_bf16=bench.recipe.train.has_bf16):
        history = bench.net.observe(session.history, latents, condition)
    return replace(session, history=history, newest=frames[:, -1])


def _slide(bench: Workbench, session: Session) -> Session:
    return replace(session, history=session.history.slid(bench.recipe.window.latents_per_block))


def _check_block(bench: Workbench, frames: Tensor) -> None:
    window = bench.recipe.window
    if frames.shape[1] != window.frames_per_block:
        raise InputError(f"a block has {window.frames_per_block} frames, not {frames.shape[1]}")


def _put(found: list[Session], rows: Sequence[int], sessions: Sequence[Session]) -> None:
    for row, session in zip(rows, sessions, strict=True):
        found[row] = session


def draw_noise(bench: Workbench, first: UInt8[Tensor, "b h w 3"], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the noise of the next block of sessions with such canvases: latents [b t c h w] and actions [b a j]."""
    recipe = bench.recipe
    _, *latent_shape = bench.encoder.video.latent_shape(1, *first.shape[1:3])
    return draw_block_noise(
        len(first),
        (recipe.model.latents_per_block, *latent_shape),
        (recipe.model.actions_per_block, recipe.model.max_action_dim),
        generator,
    )


def plan(
    bench: Workbench, session: Session, state: Float[Tensor, "b k"], generator: torch.Generator
) -> tuple[Float[Tensor, "b t c h w"], Float[Tensor, "b a j"]]:
    """Sample the next block of every session: latents, and actions as the network has them (normalised)."""
    return plan_from(bench, session, state, draw_noise(bench, session.first, generator))


@torch.no_grad()
def plan_from(
    bench: Workbench, session: Session, state: Float[Tensor, "b k"], noise: tuple[Tensor, Tensor]
) -> tuple[Float[Tensor, "b t c h w"], Float[Tensor, "b a j"]]:
    """Sample the next block of every session from noise that ``draw_noise`` drew."""
    recipe = bench.recipe
    _, condition = bench.encoder.encode_first(session.first, 1 + recipe.window.frames_per_block)
    with autocast(bench.device, has_bf16=recipe.train.has_bf16):
        return sample_block(
            bench.net,
            session.history,
            state[:, None].to(bench.device),
            noise,
            recipe.sampler,
            shift=recipe.noise.shift,
            condition=None if condition is None else condition[:, 1:],
        )
