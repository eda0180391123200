"""A policy that goes on with its episodes: what a session has seen is its key-value cache, held by the caller.

Each call brings the real frames that followed the last chunk; they replace what the network predicted of them. A window
that is full slides or begins anew, as ``sampler.when_full`` says. The server, closed-loop scores, parity and
``wamlab play`` all plan here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from wamlab.data.normalize import Normalizers
from wamlab.data.views import canvas_of
from wamlab.recipes.build import Workbench
from wamlab.recipes.imagine import decode_block
from wamlab.recipes.policy import WamPolicy
from wamlab.recipes.session import Session, begin, draw_noise, join, observe, observe_each, part, plan_from
from wamlab.serve.sessions import Memory
from wamlab.train import step_generator
from wamlab.types import Observation

SEEDS_APART = 2**20  # between sessions
BYTES_A_SESSION = 100  # its count of calls and the objects around it


@dataclass(frozen=True)
class Carried:
    """What a session's memory holds."""

    num_calls: int  # made before
    seen: Session | None  # None where the recipe keeps no history


class HistoryPolicy(WamPolicy):
    """Plans for each session from what it has seen, with noise of its own.

    The noise of call ``n`` of session ``s`` is drawn from ``(seed, s, n)``, so what a session gets depends on its own
    calls alone: to the bit if it is planned alone, to rounding in a batch, whatever the others' age. Episodes that two
    policies play as the same sessions are pairs, however many play side by side.

    A session begins anew with its first call, with another instruction, and when it shows its newest frame alone: only
    a film (``Observation.films``) of two frames or more goes on with an episode, and stands for one executed block. A
    recipe whose window has one block has been trained without history: then every chunk is planned from the newest
    frame (``has_history``).
    """

    def __init__(
        self, bench: Workbench, normalizers: Normalizers, *, seed: int = 0, memory_gib: float | int = 2.0
    ) -> None:
        super().__init__(bench, normalizers, seed=seed)
        self.memory_gib = memory_gib  # of sessions that are played in this process, through ``__call__``
        self._memories: dict[int, Memory] = {}  # least recently used first

    @property
    def has_history(self) -> bool:
        return self.bench.recipe.window.max_blocks > 1

    @property
    def history_sentence(self) -> str:
        """Say what a client must know about it."""
        if not self.has_history:
            return "sessions keep no history: the recipe's window has one block, so chunks follow from the newest frame"
        window = self.bench.recipe.window
        return (
            f"sessions go on from up to {window.max_blocks - 1} executed blocks if requests carry the frames since the "
            f"last one, as stacks of {window.frames_per_block}; a single frame begins anew"
        )

    def __call__(self, observation: Observation) -> Float[np.ndarray, "b a j"]:
        """Return robot actions [b a j] for every parallel session; memories are kept here, by session number."""
        return self.plan_blocks(observation, 1)

    def plan_blocks(self, observation: Observation, num_blocks: int) -> Float[np.ndarray, "b a j"]:
        """Return the actions of several blocks from now, those after the first planned from predicted frames.

        Memories are kept here, by session number. Beyond ``memory_gib`` the sessions that were played longest ago are
        forgotten, and never one of this call: an episode would lose what it has seen because others play beside it.
        """
        numbers = observation.session.tolist()
        actions, memories = self.plan(observation, [self._memories.get(number) for number in numbers], num_blocks)
        for number, memory in zip(numbers, memories, strict=True):
            self._memories.pop(number, None)
            self._memories[number] = memory
        total = sum(memory.num_bytes for memory in self._memories.values())
        for number in [n for n in self._memories if n not in set(numbers)]:
            if total <= self.memory_gib * 2**30:
                break
            total -= self._memories.pop(number).num_bytes
        return actions

    def forget(self) -> None:
        """Forget all sessions kept here and count their calls from 0, before the same ones are played anew."""
        self._memories = {}

    @torch.no_grad()
    def plan(
        self, observation: Observation, memories: Sequence[Memory | None], num_blocks: int = 1
    ) -> tuple[Float[np.ndarray, "b a j"], Sequence[Memory]]:
        """Return robot actions [b a j] and what each session carries on; changes nothing here.

        Blocks after the first follow from predicted frames, of which nothing is carried on. No state is predicted: they
        have the newest one, with relative dimensions where the last action of the block before commands them to be.
        """
        carried = [memory.value if memory else Carried(0, None) for memory in memories]
        seen = self._look(observation, carried)
        actions = self._plan_from(seen, observation, self._generators(observation.session, carried), num_blocks)
        found = [
            Carried(old.num_calls + 1, own)
            for old, own in zip(carried, seen if self.has_history else [None] * len(carried), strict=True)
        ]
        sizes = [BYTES_A_SESSION + (new.seen.num_bytes if new.seen else 0) for new in found]
        return actions, [Memory(*pair) for pair in zip(found, sizes, strict=True)]

    def _plan_from(
        self, seen: list[Session], observation: Observation, generators: Sequence[torch.Generator], num_blocks: int
    ) -> Float[np.ndarray, "b a j"]:
        state, dims, chunks = observation.state, list(self.normalizers.relative_dims), []
        for block in range(num_blocks):
            session = join(seen) if self.has_history else seen[0]
            model_state = torch.from_numpy(self.normalizers.state_to_model(state))
            latents, actions = plan_from(self.bench, session, model_state, self._draw(session, generators))
            chunks.append(self.normalizers.actions_to_robot(actions.float().cpu().numpy(), state))
            if block + 1 < num_blocks:
                seen = self._imagine(seen, decode_block(self.bench, session, latents))
                if dims:
                    state = state.copy()
                    state[:, dims] = chunks[-1][:, -1, dims]
        return np.concatenate(chunks, axis=1)

    def _imagine(self, seen: list[Session], frames: UInt8[Tensor, "b t h w 3"]) -> list[Session]:
        """Go on as if predicted frames had been seen."""
        if self.has_history:
            return observe_each(self.bench, seen, frames)
        return [observe(self.bench, seen[0], frames)]

    def _look(self, observation: Observation, carried: Sequence[Carried]) -> list[Session]:
        """Take in what each session shows; without history the only item holds all of them."""
        bench, robot = self.bench, self.bench.recipe.robot
        instructions = [robot.instruct(task) for task in observation.instructions]
        canvas = torch.from_numpy(canvas_of(observation.frames, robot)).to(bench.device)
        if not self.has_history:
            return [begin(bench, canvas, instructions)]
        found: dict[int, Session] = {}
        films, going_on = [], []
        for row, (old, instruction) in enumerate(zip(carried, instructions, strict=True)):
            film = observation.films[row] if observation.films else {}
            if old.seen and old.seen.instructions == (instruction,) and min(map(len, film.values()), default=1) > 1:
                going_on.append((row, old.seen))
                films.append(torch.from_numpy(canvas_of(self._block_of(film), robot)))
        if going_on:
            frames = torch.stack(films).to(bench.device)
            seen = observe_each(bench, [session for _, session in going_on], frames)
            found |= {row: session for (row, _), session in zip(going_on, seen, strict=True)}
        if new := [row for row in range(len(carried)) if row not in found]:
            begun = begin(bench, canvas[new], [instructions[row] for row in new])
            found |= dict(zip(new, part(begun), strict=True))
        return [found[row] for row in range(len(carried))]

    def _block_of(self, film: Mapping[str, np.ndarray]) -> dict[str, UInt8[np.ndarray, "t h w 3"]]:
        """Choose a block's frames from a film of any length: evenly, repeated where there are fewer (spec 6.1)."""
        num_frames = self.bench.recipe.window.frames_per_block
        return {camera: frames[even_places(len(frames), num_frames)] for camera, frames in film.items()}

    def _generators(self, numbers: np.ndarray, carried: Sequence[Carried]) -> list[torch.Generator]:
        """Return where each session draws the noise of this call from."""
        return [
            step_generator(self.seed + number * SEEDS_APART, old.num_calls, self.bench.device)
            for number, old in zip(numbers.tolist(), carried, strict=True)
        ]

    def _draw(self, session: Session, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Draw the noise of a block, one session after another."""
        drawn = [draw_noise(self.bench, session.first[:1], generator) for generator in generators]
        latents, actions = zip(*drawn, strict=True)
        return torch.cat(latents), torch.cat(actions)


def even_places(num_frames: int, num_wanted: int) -> np.ndarray:
    """Return which of the frames since the last observation a block shows; the last is always the newest.

    A frame a tick gives every ``frame_stride``-th; one too many leaves out the frame before the block; half as many as
    wanted are shown twice each, as the reference does.
    """
    return -(-(np.arange(num_wanted) + 1) * num_frames // num_wanted) - 1
