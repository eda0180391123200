"""Which decoded frames leave memory when others need the room."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from wamlab.errors import InputError

Key = tuple[int, str]  # episode, camera
NextUse = Callable[[int, int], int]  # (episode, after) -> first place of the stream beyond ``after`` that needs it
POLICIES = ("future", "lru", "keep")
SLACK = 256  # places of the stream that threads may lag behind the one furthest ahead


@runtime_checkable
class Eviction(Protocol):
    """A rule of what to drop. It is told what is kept; the caller holds a lock around every call."""

    def touch(self, key: Key, position: int, /) -> None: ...

    def forget(self, key: Key, /) -> None: ...

    def make_way(self, key: Key, position: int, num_uses: int, needed: int, sizes: Mapping[Key, int], /) -> list[Key]:
        """Return what to drop so that ``needed`` bytes come free for a key; nothing where it should stay out.

        ``num_uses``: how often the newcomer must be used before keeping it has paid for itself.
        """
        ...


def make_eviction(policy: str, next_use: NextUse | None) -> Eviction:
    """Make the rule of a name; InputError for an unknown one and for a future that nobody tells."""
    if policy not in POLICIES:
        raise InputError(f'the policy of a frame cache is "{policy}": give one of {", ".join(POLICIES)}')
    if policy == "future":
        if next_use is None:
            raise InputError('a frame cache with the policy "future" needs next_use, the order of the samples')
        return Future(next_use)
    return LeastRecent() if policy == "lru" else Keep()


class Keep:
    """Drop nothing: what came first stays."""

    def touch(self, key: Key, position: int) -> None: ...

    def forget(self, key: Key) -> None: ...

    def make_way(self, key: Key, position: int, num_uses: int, needed: int, sizes: Mapping[Key, int]) -> list[Key]:
        return []


class LeastRecent:
    """Drop what was used longest ago; for comparison, as training comes back to everything in turn."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def touch(self, key: Key, position: int) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)

    def forget(self, key: Key) -> None:
        self._keys.pop(key, None)

    def make_way(self, key: Key, position: int, num_uses: int, needed: int, sizes: Mapping[Key, int]) -> list[Key]:
        dropped = []
        for old in self._keys:
            if needed <= 0:
                break
            if old != key:
                dropped.append(old)
                needed -= sizes[old]
        return dropped if needed <= 0 else []


class Future:
    """Drop what is needed latest, and let nobody in who is needed later still (Belady 1966, MIN).

    Letting an episode in costs the decoding of all of it, a request only that of its window. So a newcomer has to
    come so many uses before the next use of what it drops as pay for it.
    """

    def __init__(self, next_use: NextUse) -> None:
        self._next_use = next_use
        self._next: dict[Key, int] = {}
        self._latest: list[tuple[int, Key]] = []  # heaps; entries that _next contradicts are void
        self._soonest: list[tuple[int, Key]] = []
        self._now = 0

    def touch(self, key: Key, position: int) -> None:
        self._set(key, self._next_use(key[0], position))
        self._advance(position)

    def forget(self, key: Key) -> None:
        self._next.pop(key, None)

    def make_way(self, key: Key, position: int, num_uses: int, needed: int, sizes: Mapping[Key, int]) -> list[Key]:
        self._advance(position)
        paid = position
        for _ in range(num_uses):
            paid = self._next_use(key[0], paid)
        dropped: dict[Key, int] = {}
        while needed > 0 and self._latest and -self._latest[0][0] > paid:
            due, old = heapq.heappop(self._latest)
            if self._next.get(old) == -due and old not in dropped:
                dropped[old] = due
                needed -= sizes[old]
        for old, due in dropped.items():
            heapq.heappush(self._latest, (due, old))
        return list(dropped) if needed <= 0 else []

    def _advance(self, position: int) -> None:
        """Look up anew what should have come and did not: another rank had it, or it was skipped."""
        self._now = max(self._now, position)
        while self._soonest and self._soonest[0][0] < self._now - SLACK:
            due, key = heapq.heappop(self._soonest)
            if self._next.get(key) == due:
                self._set(key, self._next_use(key[0], self._now))

    def _set(self, key: Key, due: int) -> None:
        if self._next.get(key) == due:
            return
        self._next[key] = due
        heapq.heappush(self._latest, (-due, key))
        heapq.heappush(self._soonest, (due, key))
        if len(self._latest) > 64 + 4 * len(self._next):
            self._latest = [(-due, key) for key, due in self._next.items()]
            self._soonest = [(due, key) for key, due in self._next.items()]
            heapq.heapify(self._latest)
            heapq.heapify(self._soonest)
