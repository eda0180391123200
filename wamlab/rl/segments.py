"""How far an episode is: a record from which any worker goes on, and noise that depends on no schedule."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt64
from torch import Tensor

from wamlab.errors import InputError
from wamlab.rl.jobs import JobKey
from wamlab.types import Observation, Policy

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Group:
    """Episodes that start alike."""

    number: int
    task: str  # which environment, as ``make_env`` knows it
    seed: int  # of the environment's reset, the same for all members
    cap: int  # chunks after which the environment has given up


@dataclass(frozen=True)
class Setting:
    """What all episodes of an iteration have in common."""

    seed: int = 0
    iteration: int = 0
    policy_version: int = 0
    sampler: str = ""  # names steps, noise and guidance; a segment of another sampler is refused
    is_exact: bool = False  # ask the policy about one episode at a time: bit-equal whatever plays beside it
    is_batch_chosen: bool = False  # plan for as many episodes at a time as measured calls say; else for all in a round
    has_frames: bool = False  # keep what the cameras saw before every chunk


@dataclass(frozen=True)
class Asked:
    """What a policy is asked about: one row an episode."""

    observation: Observation
    keys: UInt64[np.ndarray, "b 5"]  # seed, iteration, group, member, chunk; see noise_generator
    memories: Sequence[Arrays]  # what it returned with the episode's chunk before, e.g. its window; {} at first
    policy_version: int


@dataclass(frozen=True)
class Planned:
    """What a policy plans: actions to execute, what training needs of them, what it must remember."""

    actions: Float[np.ndarray, "b a j"]
    kept: Arrays = field(default_factory=dict)  # [b ...] each, e.g. the denoising chain and its log-probability
    memories: Sequence[Arrays] = ()  # one a row, or none


Act = Callable[[Asked], Planned]


def acting(policy: Policy) -> Act:
    """Let a plain policy play: without noise keys, memory or anything kept."""
    return lambda asked: Planned(policy(asked.observation))


def noise_generator(key: Sequence[int] | np.ndarray, denoising_step: int = 0) -> np.random.Generator:
    """Return the generator of one chunk's denoising step, the same wherever and whenever it is asked for.

    Counter-based (Philox): seed and iteration are the key; group, member, chunk and step count in words that draws do
    not reach before 2**64 of them.
    """
    seed, iteration, group, member, chunk = (int(word) for word in key)
    counter = [0, denoising_step, chunk, (group << 32) | member]
    return np.random.Generator(np.random.Philox(key=[seed, iteration], counter=counter))


@dataclass(frozen=True)
class Segment:
    """An episode up to a chunk; with ``is_done`` it is the whole trajectory."""

    iteration: int
    group: int
    member: int
    num_segments: int  # played so far
    num_chunks: int  # played so far; also the counter of the noise
    num_ticks: int  # executed so far
    policy_version: int
    sampler: str
    is_done: bool
    is_success: bool
    snapshot: Any  # the environment's, plain JSON; None where actions are replayed
    memory: Arrays  # the policy's
    chunks: Arrays  # a row a chunk: actions, rewards, num_ticks, state, what the policy kept

    @property
    def key(self) -> JobKey:
        return self.group, self.member

    @property
    def name(self) -> str:
        return segment_name(self.iteration, self.group, self.member, self.num_chunks)


def segment_name(iteration: int, group: int, member: int, num_chunks: int) -> str:
    """Return the name under which a segment is stored."""
    return f"{iteration}-{group}-{member}-{num_chunks}"


def words_of_name(name: str) -> tuple[int, ...] | None:
    """Return iteration, group, member and chunks of a segment's name; None for a name of anything else."""
    words = name.split("-")
    is_name = len(words) == 4 and all(word.isascii() and word.isdigit() and len(word) < 19 for word in words)
    return tuple(map(int, words)) if is_name else None


def joined_segment(pieces: Sequence[Segment]) -> Segment:
    """Put the chunks of an episode's segments, each with its own alone, behind one another."""
    if not pieces:
        raise InputError("an episode needs at least one segment")
    names = pieces[0].chunks.keys()
    chunks = {name: np.concatenate([piece.chunks[name] for piece in pieces]) for name in names}
    return replace(pieces[-1], chunks=chunks)


def segment_to_tensors(segment: Segment) -> dict[str, Tensor]:
    """Turn a record into tensors without copying its arrays."""
    plain = {f.name: getattr(segment, f.name) for f in fields(segment) if f.name not in ("memory", "chunks")}
    text = np.frombuffer(json.dumps(plain).encode(), np.uint8).copy()
    parts = {f"{part}.{name}": value for part in ("memory", "chunks") for name, value in getattr(segment, part).items()}
    return {"record": torch.from_numpy(text)} | {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in parts.items()}


def segment_from_tensors(tensors: Mapping[str, Tensor], where: str) -> Segment:
    """Read a record back, bit for bit; raises InputError where it is none."""
    try:
        arrays = {name: value.cpu().numpy() for name, value in tensors.items()}
        plain: dict[str, Any] = json.loads(arrays.pop("record").tobytes())
        parts: dict[str, dict[str, np.ndarray]] = {"memory": {}, "chunks": {}}
        for name, value in arrays.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        segment = Segment(**plain, memory=parts["memory"], chunks=parts["chunks"])
        _check(segment)
    except (KeyError, ValueError, TypeError, RecursionError) as error:  # TypeError: of bfloat16, or not its fields
        raise InputError(f"{where} holds no whole episode segment ({error}): remove it to play it again") from error
    return segment


def _check(segment: Segment) -> None:
    """Raise ValueError for fields of other kinds and chunks that are not a row each."""
    counts = ("iteration", "group", "member", "num_segments", "num_chunks", "num_ticks", "policy_version")
    if odd := [name for name in counts if type(value := getattr(segment, name)) is not int or not 0 <= value < 2**63]:
        raise ValueError(f"{odd[0]} is {str(getattr(segment, odd[0]))[:40]!r}")
    if not (type(segment.sampler) is str and type(segment.is_done) is bool and type(segment.is_success) is bool):
        raise ValueError("sampler, is_done or is_success is of another kind")
    if "num_ticks" not in segment.chunks or len({value.shape[:1] for value in segment.chunks.values()}) > 1:
        raise ValueError("its chunks are not a row each")
