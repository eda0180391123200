"""Who is being served: sessions with numbers of their own, the least recently used of which make room."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from wamlab.errors import InputError
from wamlab.serve.protocol import Request
from wamlab.types import Observation


@dataclass(frozen=True)
class Memory:
    """What a policy carries from one call of a session to the next: the caller keeps it, the policy alone reads it."""

    value: Any
    num_bytes: int


@runtime_checkable
class Carries(Protocol):
    """A policy that goes on with episodes: each session's memory goes in, None at first, and comes out anew."""

    def plan(
        self, observation: Observation, memories: Sequence[Memory | None], /
    ) -> tuple[np.ndarray, Sequence[Memory]]: ...


@dataclass
class Session:
    """One client's episode."""

    number: int  # what the policy knows it by; a reset gives a new one
    owner: Hashable  # connection that spoke for it last
    last_used_s: float = field(default_factory=time.monotonic)
    num_at_work: int = 0  # requests; more than one where a client came back before its last was answered
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the request that is being planned
    memory: Memory | None = None
    waiting: list[np.ndarray] = field(default_factory=list)  # actions planned and not yet asked for, one by one
    film: list[Mapping[str, np.ndarray]] = field(default_factory=list)  # frames that came since the last plan

    @property
    def is_busy(self) -> bool:
        return self.num_at_work > 0

    @property
    def num_bytes(self) -> int:
        """Return the memory that is kept of it."""
        arrays = [*self.waiting, *(frame for frames in self.film for frame in frames.values())]
        return (self.memory.num_bytes if self.memory else 0) + sum(array.nbytes for array in arrays)

    def filmed(self, request: Request) -> Request:
        """Gather the frames of a client that sends one for each action; the request that needs a plan gets them all."""
        if self.waiting:
            self.film.append({camera: frame.copy() for camera, frame in request.frames.items()})
            return request
        seen, self.film = [*self.film, request.frames], []
        if len({tuple(frame.shape for frame in frames.values()) for frames in seen}) > 1:
            return request
        return replace(request, film={camera: np.stack([frames[camera] for frames in seen]) for camera in seen[0]})


class Sessions:
    """All sessions of a server; what is kept of one ends with it."""

    def __init__(self, *, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._numbers = itertools.count()
        self._open: set[Hashable] = set()  # connections
        self._sessions: dict[Hashable, Session] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_bytes(self) -> int:
        """Return the memory that is kept of all of them."""
        return sum(session.num_bytes for session in self._sessions.values())

    def connect(self, connection: Hashable) -> None:
        self._open.add(connection)

    def disconnect(self, connection: Hashable) -> None:
        """End the connection's own session; those with a name wait for it to come back."""
        self._open.discard(connection)
        self._end((connection, None))

    def find(self, connection: Hashable, session_id: str | None) -> Session:
        """Return the session of a name, or of a connection without one; begin it if there is none.

        A name that another open connection speaks for begins a session of its own here: strangers share none.
        """
        key = self._key(connection, session_id)
        session = self._sessions.get(key)
        if session is None:
            if len(self._sessions) >= self._max_sessions and not self._evict_oldest():
                raise InputError(f"all {self._max_sessions} sessions are at work: try again later")
            session = self._sessions[key] = Session(next(self._numbers), connection)
        session.owner, session.last_used_s = connection, time.monotonic()
        return session

    def reset(self, connection: Hashable, session_id: str | None) -> None:
        """Forget an episode; the session's next request begins another."""
        self._end(self._key(connection, session_id))

    def evict_idle(self, idle_s: float) -> None:
        """End sessions that have not been used for so long."""
        limit = time.monotonic() - idle_s
        for key in [k for k, s in self._sessions.items() if s.last_used_s < limit and not s.is_busy]:
            self._evict(key)

    def keep_within(self, budget_bytes: int) -> None:
        """End the least recently used sessions that are not at work until the others fit."""
        total = self.num_bytes
        if total <= budget_bytes:
            return
        for key, session in sorted(self._sessions.items(), key=lambda item: item[1].last_used_s):
            if total <= budget_bytes:
                return
            if not session.is_busy and session.num_bytes:
                total -= session.num_bytes
                self._evict(key)

    def _key(self, connection: Hashable, session_id: str | None) -> Hashable:
        if session_id is None:
            return (connection, None)
        named = self._sessions.get(session_id)
        is_strangers = named is not None and named.owner != connection and named.owner in self._open
        return (connection, session_id) if is_strangers else session_id

    def _evict_oldest(self) -> bool:
        idle = [(s.last_used_s, key) for key, s in self._sessions.items() if not s.is_busy]
        if idle:
            self._evict(min(idle, key=lambda pair: pair[0])[1])
        return bool(idle)

    def _evict(self, key: Hashable) -> None:
        self.num_evicted += 1
        self._end(key)

    def _end(self, key: Hashable) -> None:
        self._sessions.pop(key, None)
