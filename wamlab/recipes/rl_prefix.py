"""What the network has seen before it denoises a chunk, computed once where episodes have seen the same.

The members of a group start alike: the first chunk of each has the same frame and instruction, so the frame's encoding
and the keys and values that it leaves in every layer are computed for the first one asked about. Instructions are
projected once for all chunks of all episodes that have them. Asked about one episode at a time, as in exact play, the
bits are those without sharing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from wamlab.data.normalize import Normalizers
from wamlab.data.views import canvas_of
from wamlab.model.block import CrossKeys
from wamlab.model.joined import joined, parted
from wamlab.model.kv_cache import History
from wamlab.recipes.build import Workbench
from wamlab.rl.segments import Asked
from wamlab.train import autocast
from wamlab.types import Observation

MOST_INSTRUCTIONS = 256  # kept
MOST_BYTES = 2**30  # of first frames' keys and values, kept: 0.2 MB each at demo size


@dataclass(frozen=True)
class Conditioning:
    """What the network saw of each chunk before it was planned, bit for bit."""

    latents: Float[Tensor, "b 1 c h w"]  # of the newest frame
    state: Float[Tensor, "b 1 k"]
    text: Float[Tensor, "b n d"]  # padded with zeros to the network's length: rows of different batches fit together
    condition: Float[Tensor, "b t e h w"] | None
    image: Float[Tensor, "b m i"] | None


@dataclass
class PrefixCounts:
    """How much was asked for, and how much of it had to be computed."""

    num_chunks: int = 0
    num_firsts: int = 0  # of these chunks begin an episode
    num_frames: int = 0  # encoded and observed; without sharing as many as chunks
    num_texts: int = 0  # projected; likewise

    @property
    def shared_firsts(self) -> float:
        """The share of first chunks whose frame had been observed before: 7 of 8 in groups of 8."""
        return (self.num_chunks - self.num_frames) / max(1, self.num_firsts)


class Prefixes:
    """Gives chunks their conditioning and history; weights that have changed between two calls are noticed."""

    def __init__(
        self, bench: Workbench, normalizers: Normalizers, *, is_shared: bool = True, most_bytes: int = MOST_BYTES
    ) -> None:
        self.bench, self.normalizers = bench, normalizers
        self.is_shared, self.most_bytes = is_shared, most_bytes
        self.counts = PrefixCounts()
        self._weights: tuple[int, ...] = ()
        self._forget()

    def __call__(self, asked: Asked) -> tuple[Conditioning, History]:
        """Return what the network sees of each episode, and each one's history with the newest frame."""
        observation, net = asked.observation, self.bench.net
        weights = (asked.policy_version, *(parameter._version for parameter in net.parameters()))
        if weights != self._weights:
            self._forget()
            self._weights = weights
        is_first = [not key[4] for key in asked.keys.tolist()]
        names: list[str | int] = [
            _content(observation, row) if self.is_shared and first else row for row, first in enumerate(is_first)
        ]
        wanted = dict(
            zip(reversed(names), reversed(range(len(names))), strict=True)
        )  # name to the first row that has it
        rows = sorted(row for name, row in wanted.items() if name not in self._firsts)
        self.counts.num_chunks += len(names)
        self.counts.num_firsts += sum(is_first)
        self.counts.num_frames += len(rows)
        computed = self._computed(observation, rows) if rows else None
        if computed is not None and not any(is_first):
            return self._with_states(computed[0], observation), computed[1]
        pieces: dict[str | int, tuple[Conditioning, History]] = {**self._firsts}
        if computed is not None:
            single = zip(_parted(computed[0]), parted(computed[1], len(rows)), strict=True)
            pieces |= {names[row]: piece for row, piece in zip(rows, single, strict=True)}
        found = [pieces[name] for name in names]
        self._keep({name: pieces[name] for name in names if isinstance(name, str)})
        given = _joined([given for given, _ in found])
        return self._with_states(given, observation), joined([history for _, history in found])

    def _computed(self, observation: Observation, rows: Sequence[int]) -> tuple[Conditioning, History]:
        bench, robot = self.bench, self.bench.recipe.robot
        frames = {camera: own[list(rows)] for camera, own in observation.frames.items()}
        canvas = torch.from_numpy(canvas_of(frames, robot)).to(bench.device)
        latents, condition = bench.encoder.encode_first(canvas, 1 + bench.recipe.window.frames_per_block)
        image = bench.encoder.encode_image(canvas)
        text, history = self._started([robot.instruct(observation.instructions[row]) for row in rows], image)
        with self._autocast():
            history = bench.net.observe(history, latents, None if condition is None else condition[:, :1])
        state = latents.new_zeros(len(rows), 1, 0)  # each row's own comes last
        return Conditioning(latents, state, text, condition, image), history

    def _started(self, instructions: Sequence[str], image: Tensor | None) -> tuple[Tensor, History]:
        """Return the instructions' features, and histories that have seen nothing else."""
        if image is not None or not self.is_shared:  # first images are no two alike
            self.counts.num_texts += len(instructions)
            text = self._encoded(instructions)
            with self._autocast():
                return text, self.bench.net.start(text, image)
        new = [word for word in dict.fromkeys(instructions) if word not in self._places]
        if len(self._places) + len(new) > MOST_INSTRUCTIONS:
            self._places, self._table = {}, None
            new = list(dict.fromkeys(instructions))
        if new:
            self.counts.num_texts += len(new)
            text = self._encoded(new)
            with self._autocast():
                cross = self.bench.net.start(text).cross
            if self._table is not None:
                text = torch.cat([self._table[0], text])
                cross = tuple(
                    replace(
                        b,
                        text_key=torch.cat([a.text_key, b.text_key]),
                        text_value=torch.cat([a.text_value, b.text_value]),
                    )
                    for a, b in zip(self._table[1], cross, strict=True)
                )
            self._table = text, cross
            self._places |= {word: len(self._places) + number for number, word in enumerate(new)}
        assert self._table is not None
        text, cross = self._table
        places = torch.tensor([self._places[word] for word in instructions], device=text.device)
        own = (replace(c, text_key=c.text_key[places], text_value=c.text_value[places]) for c in cross)
        return text[places], History(tuple(own))

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.bench.device, has_bf16=self.bench.recipe.train.has_bf16)

    def _encoded(self, instructions: Sequence[str]) -> Tensor:
        text = self.bench.encoder.encode_text(instructions)
        return F.pad(text, (0, 0, 0, self.bench.recipe.model.text_len - text.shape[1]))

    def _with_states(self, given: Conditioning, observation: Observation) -> Conditioning:
        state = torch.from_numpy(self.normalizers.state_to_model(observation.state))[:, None]
        return replace(given, state=state.to(self.bench.device))

    def _keep(self, used: dict[str, tuple[Conditioning, History]]) -> None:
        """Keep first frames within the budget of bytes, those used last the longest."""
        for name, piece in used.items():
            self._firsts.pop(name, None)
            self._firsts[name] = piece
        num_bytes = sum(history.num_bytes + history.context_bytes for _, history in self._firsts.values())
        while num_bytes > self.most_bytes:
            _, oldest = self._firsts.pop(next(iter(self._firsts)))
            num_bytes -= oldest.num_bytes + oldest.context_bytes

    def _forget(self) -> None:
        self._firsts: dict[str, tuple[Conditioning, History]] = {}  # by content
        self._places: dict[str, int] = {}  # of instructions in the table
        self._table: tuple[Tensor, tuple[CrossKeys, ...]] | None = None


def _content(observation: Observation, row: int) -> str:
    """Name what an episode sees, so that only episodes that see the same share it."""
    digest = hashlib.sha256(observation.instructions[row].encode())
    for camera, frames in sorted(observation.frames.items()):
        digest.update(camera.encode() + frames[row].tobytes())
    return digest.hexdigest()


def _parted(given: Conditioning) -> list[Conditioning]:
    return [_with(given, lambda value, row=row: value[row : row + 1].clone()) for row in range(len(given.latents))]


def _joined(given: Sequence[Conditioning]) -> Conditioning:
    names = [f.name for f in fields(Conditioning) if getattr(given[0], f.name) is not None]
    return replace(given[0], **{name: torch.cat([getattr(one, name) for one in given]) for name in names})


def _with(given: Conditioning, change: Callable[[Tensor], Tensor]) -> Conditioning:
    names = [f.name for f in fields(given) if getattr(given, f.name) is not None]
    return replace(given, **{name: change(getattr(given, name)) for name in names})
