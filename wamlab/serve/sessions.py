"""Who is being served: sessions with numbers of their own, the least recently used of which make room."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from wamlab.errors import InputError


@runtime_checkable
class Remembers(Protocol):
    """A policy that keeps something of each session, by ``Observation.session``."""

    def forget(self, session: int, /) -> None: ...

    def session_bytes(self) -> Mapping[int, int]: ...


@dataclass
class Session:
    """One client's episode."""

    number: int  # what the policy knows it by; a reset gives a new one
    owner: Hashable  # connection that spoke for it last
    last_used_s: float = field(default_factory=time.monotonic)
    is_busy: bool = False
    waiting: list[np.ndarray] = field(default_factory=list)  # actions planned and not yet asked for, one by one


class Sessions:
    """All sessions of a server; ``forget`` hears the number of each one that ends."""

    def __init__(self, forget: Callable[[int], object], *, max_sessions: int) -> None:
        self._forget = forget
        self._max_sessions = max_sessions
        self._numbers = itertools.count()
        self._open: set[Hashable] = set()  # connections
        self._sessions: dict[Hashable, Session] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._sessions)

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

    def keep_within(self, num_bytes: Mapping[int, int], budget_bytes: int) -> None:
        """End the least recently used sessions that are not at work until the others fit."""
        total = sum(num_bytes.get(session.number, 0) for session in self._sessions.values())
        for key, session in sorted(self._sessions.items(), key=lambda item: item[1].last_used_s):
            if total <= budget_bytes:
                return
            if not session.is_busy and num_bytes.get(session.number):
                total -= num_bytes[session.number]
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
        session = self._sessions.pop(key, None)
        if session is not None:
            self._forget(session.number)
