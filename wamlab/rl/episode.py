"""One episode in its environment: begun anew, or gone on from a segment by restoring or by replaying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from wamlab.errors import InputError
from wamlab.rl.segments import Arrays, Asked, Group, Planned, Segment, Setting
from wamlab.types import Env, Observation

MakeEnv = Callable[[str], Env]  # of one place (num_envs 1) for a group's task
OWN_COLUMNS = ("actions", "rewards", "num_ticks", "state")


@runtime_checkable
class Restorable(Protocol):
    """An environment that can go on from a snapshot, bit for bit; others replay their actions."""

    def snapshot(self, row: int, /) -> Any: ...

    def restore(self, row: int, snapshot: Any, /) -> None: ...

    def observe(self) -> Mapping[str, Any]: ...


@runtime_checkable
class Joint(Protocol):
    """An environment that steps in one call with others that share the same, e.g. a world model."""

    shared: Any

    def chunk_steps(self, envs: Sequence[Any], actions: Sequence[np.ndarray], /) -> Sequence[tuple[Any, ...]]: ...


def step_each(
    episodes: Sequence[Episode], actions: Sequence[Float[np.ndarray, "a j"]], *, is_joint: bool
) -> list[tuple[Any, ...]]:
    """Step the environments of some episodes; those that can go together do, if that is wanted."""
    found: list[tuple[Any, ...]] = [()] * len(episodes)
    together: dict[int, list[int]] = {}
    for place, (episode, chunk) in enumerate(zip(episodes, actions, strict=True)):
        if is_joint and isinstance(episode.env, Joint):
            together.setdefault(id(episode.env.shared), []).append(place)
        else:
            found[place] = episode.env.chunk_step(chunk[None])
    for places in together.values():
        envs: list[Any] = [episodes[place].env for place in places]
        for place, result in zip(places, envs[0].chunk_steps(envs, [actions[p][None] for p in places]), strict=True):
            found[place] = result
    return found


class Episode:
    """An episode that is being played; what it has played since its last segment waits for ``cut``."""

    def __init__(self, env: Env, group: Group, member: int, setting: Setting, start: Segment | None = None) -> None:
        if env.num_envs != 1:
            raise InputError(f"make_env returned {env.num_envs} places for {group.task}: give environments of one")
        self.env, self.group, self.member, self.setting = env, group, member, setting
        self.num_chunks = self.num_ticks = self.num_segments = 0
        self.is_done = self.is_success = False
        self.memory: Arrays = {}
        self._rows: list[dict[str, np.ndarray]] = []
        if start is None:
            self.seen = env.reset(seed=group.seed)[0]
            return
        if (start.sampler, start.policy_version) != (setting.sampler, setting.policy_version):
            raise InputError(
                f'segment {start.name} was played by policy {start.policy_version} with the sampler "{start.sampler}", '
                f'not by policy {setting.policy_version} with "{setting.sampler}"'
            )
        self.num_chunks, self.num_ticks = start.num_chunks, start.num_ticks
        self.num_segments, self.memory = start.num_segments, start.memory
        self.seen = _restored(env, group, start)

    @property
    def key(self) -> tuple[int, int]:
        return self.group.number, self.member

    def note(self, actions: Float[np.ndarray, "a j"], kept: Arrays, memory: Arrays, result: tuple[Any, ...]) -> None:
        """Note what was seen before a chunk, and what its environment's ``chunk_step`` returned."""
        if taken := set(kept).intersection(OWN_COLUMNS):
            raise InputError(f"a policy keeps {sorted(taken)}: choose other names than {', '.join(OWN_COLUMNS)}")
        row = {"state": np.asarray(self.seen["agent_pos"])[0]}
        if self.setting.has_frames:
            row |= {f"frames.{camera}": frames[0] for camera, frames in self.seen["pixels"].items()}
        self.seen, rewards, *_, infos = result
        num_ticks = int(infos["num_ticks"][0])
        self._rows.append({**row, **kept, "actions": actions, "rewards": rewards[0], "num_ticks": np.int64(num_ticks)})  # pyright: ignore[reportArgumentType]
        self.memory = memory
        self.num_chunks += 1
        self.num_ticks += num_ticks
        self.is_success = bool(self.env.is_success[0])
        self.is_done = bool(self.env.is_done[0]) or self.num_chunks >= self.group.cap

    def execute(self, actions: Float[np.ndarray, "a j"], kept: Arrays, memory: Arrays) -> None:
        """Play one chunk alone."""
        self.note(actions, kept, memory, self.env.chunk_step(actions[None]))

    def cut(self) -> Segment:
        """Return the segment played since the last cut: its own chunks, and where the episode stands after them."""
        self.num_segments += 1
        chunks = {name: np.stack([row[name] for row in self._rows]) for name in self._rows[0]}
        self._rows = []
        is_open = not self.is_done
        return Segment(
            iteration=self.setting.iteration,
            group=self.group.number,
            member=self.member,
            num_segments=self.num_segments,
            num_chunks=self.num_chunks,
            num_ticks=self.num_ticks,
            policy_version=self.setting.policy_version,
            sampler=self.setting.sampler,
            is_done=self.is_done,
            is_success=self.is_success,
            snapshot=self.env.snapshot(0) if is_open and isinstance(self.env, Restorable) else None,
            memory=self.memory if is_open else {},
            chunks=chunks,
        )


def plan_next(act: Callable[[Asked], Planned], episodes: Sequence[Episode]) -> list[tuple[np.ndarray, Arrays, Arrays]]:
    """Ask the policy once about some episodes; return the actions, what it keeps and what it remembers of each."""
    setting = episodes[0].setting
    cameras = episodes[0].seen.get("pixels", {})
    observation = Observation(
        frames={name: np.concatenate([e.seen["pixels"][name] for e in episodes]) for name in cameras},
        state=np.concatenate([e.seen["agent_pos"] for e in episodes]),
        instructions=[e.env.instructions[0] for e in episodes],
        session=np.array([(e.group.number << 32) | e.member for e in episodes]),
    )
    words = [(setting.seed, setting.iteration, *e.key, e.num_chunks) for e in episodes]
    memories = [e.memory for e in episodes]
    planned = act(Asked(observation, np.array(words, np.uint64), memories, setting.policy_version))
    if len(planned.actions) != len(episodes) or (planned.memories and len(planned.memories) != len(episodes)):
        raise InputError(f"a policy asked about {len(episodes)} episodes planned {len(planned.actions)}")
    return [
        (
            planned.actions[row],
            {name: np.asarray(values[row]) for name, values in planned.kept.items()},
            planned.memories[row] if planned.memories else {},
        )
        for row in range(len(episodes))
    ]


def _restored(env: Env, group: Group, start: Segment) -> Mapping[str, Any]:
    """Bring an environment to where a segment ended; return what is seen there."""
    if start.snapshot is None:
        seen = env.reset(seed=group.seed)[0]
        for actions in start.chunks["actions"]:
            seen = env.chunk_step(actions[None])[0]
        return seen
    if not isinstance(env, Restorable):
        raise InputError(f"segment {start.name} holds a snapshot, but environments of {group.task} cannot restore one")
    if not env.instructions[0]:
        env.reset(seed=group.seed)  # a fresh one has nothing to restore onto
    env.restore(0, start.snapshot)
    return env.observe()
