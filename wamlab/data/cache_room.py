"""What stays in a cache of limited size. It knows sizes and when each thing is needed next, not what the things are."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable

from wamlab.errors import InputError

POLICIES = ("future", "lru", "keep")
PATIENCE = 32  # positions by which a use may be late, as threads overtake one another, before the next one counts


class Room:
    """Decide which keys stay within ``max_bytes``; not to be shared by threads without a lock.

    "future" drops what is needed latest, and takes nothing in that would be needed later still (Belady 1966, optimal
    for things of one size); "lru" drops what was not used for longest; "keep" drops nothing.
    """

    def __init__(self, max_bytes: int, policy: str = "future"):
        if policy not in POLICIES:
            raise InputError(f'the policy of a frame cache is "{policy}": give one of {", ".join(POLICIES)}')
        if max_bytes < 0:
            raise InputError(f"a frame cache of {max_bytes} bytes cannot be: give 0 or more")
        self.max_bytes, self.policy, self.used_bytes, self.num_evicted = max_bytes, policy, 0, 0
        self._bytes: OrderedDict[Hashable, int] = OrderedDict()  # the longest unused first
        self._next_use: dict[Hashable, int] = {}
        self._latest: list[tuple[int, int, Hashable]] = []  # heaps; an entry counts while _next_use says the same
        self._soonest: list[tuple[int, int, Hashable]] = []
        self._count = 0  # decides ties, so that keys are never compared

    def __contains__(self, key: Hashable) -> bool:
        return key in self._bytes

    def bytes_of(self, key: Hashable) -> int:
        """Return the room a kept key takes."""
        return self._bytes[key]

    def next_use_of(self, key: Hashable) -> int:
        """Return when a kept key is needed next, as far as it was told."""
        return self._next_use[key]

    def touch(self, key: Hashable, next_use: int | None) -> None:
        """Take note that a kept key was used, and when it is needed again if that is known."""
        self._bytes.move_to_end(key)
        if next_use is not None:
            self._expect(key, next_use)

    def admit(self, key: Hashable, num_bytes: int, next_use: int, *, can_evict: bool = True) -> list | None:
        """Make room for a key and return the keys that had to go, or None where it is not worth it."""
        victims: list = []
        free = self.max_bytes - self.used_bytes
        if free < num_bytes:
            if num_bytes > self.max_bytes or self.policy == "keep" or not can_evict:
                return None
            find = self._oldest if self.policy == "lru" else self._needed_later
            victims = find(num_bytes - free, next_use)
            if not victims:
                return None
        for victim in victims:
            self.drop(victim)
        self.num_evicted += len(victims)
        self._bytes[key] = num_bytes
        self.used_bytes += num_bytes
        self._expect(key, next_use)
        return victims

    def drop(self, key: Hashable) -> None:
        """Forget a key."""
        self.used_bytes -= self._bytes.pop(key)
        del self._next_use[key]

    def renew(self, now: int, next_use: Callable[[Hashable], int]) -> None:
        """Look again at keys whose use is overdue: another rank had it, or a group of samples shared one."""
        while self._soonest and self._soonest[0][0] < now - PATIENCE:
            due, _, key = heapq.heappop(self._soonest)
            if self._next_use.get(key) == due:
                self._expect(key, next_use(key))

    def _expect(self, key: Hashable, next_use: int) -> None:
        if self._next_use.get(key) == next_use:
            return
        self._next_use[key] = next_use
        if self.policy != "future":
            return
        self._count += 1
        heapq.heappush(self._latest, (-next_use, self._count, key))
        heapq.heappush(self._soonest, (next_use, self._count, key))
        if len(self._latest) > 64 + 8 * len(self._next_use):  # mostly entries that no longer count
            entries = [(when, number, key) for number, (key, when) in enumerate(self._next_use.items())]
            self._latest, self._soonest = [(-when, number, key) for when, number, key in entries], entries
            heapq.heapify(self._latest)
            heapq.heapify(self._soonest)

    def _oldest(self, needed: int, next_use: int) -> list:
        victims = []
        for key, size in self._bytes.items():
            if needed <= 0:
                break
            victims.append(key)
            needed -= size
        return victims

    def _needed_later(self, needed: int, next_use: int) -> list:
        """Return keys needed later than ``next_use``, the latest first, that free enough; else none."""
        victims: dict = {}
        popped = []
        while self._latest and needed > 0 and -self._latest[0][0] > next_use:
            entry = heapq.heappop(self._latest)
            key = entry[-1]
            if self._next_use.get(key) == -entry[0] and key not in victims:
                popped.append(entry)
                victims[key] = None
                needed -= self._bytes[key]
        if needed <= 0:
            return list(victims)
        for entry in popped:
            heapq.heappush(self._latest, entry)
        return []
