"""The workers of a rollout as its scheduler sees them: in this process, or behind any transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from wamlab.errors import InputError
from wamlab.rl.batch_curve import BatchCurve
from wamlab.rl.episode import MakeEnv
from wamlab.rl.segments import Act, Group, Setting
from wamlab.rl.worker import Given, Round, Worker


@dataclass(frozen=True)
class Heard:
    """What came from a worker."""

    worker: int
    round: Round | None  # None: it has died, or is back
    is_back: bool = False  # started again, and ready
    will_return: bool = False  # of one that has died
    why: str = ""  # how it ended


@runtime_checkable
class Crew(Protocol):
    """Workers that take orders and say what became of them."""

    num_workers: int
    num_slots: int
    is_remote: bool  # True where workers play while nobody listens, so that a thread has to

    def begin(self, groups: Mapping[int, Group], setting: Setting) -> list[int]:
        """Begin an iteration; return the workers that are alive. What is still under way of another is void."""
        ...

    def give(self, worker: int, given: Sequence[Given]) -> None:
        """Give orders to a worker: once after each of its rounds, none if no order ended in it, and when it is idle."""
        ...

    def hear(self, timeout_s: float) -> list[Heard]:
        """Return what came from the workers, after at most ``timeout_s``."""
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Hand every worker's policy the weights of a version, before the iteration that it plays."""
        ...

    def close(self) -> None: ...


class LocalCrew:
    """Workers that take turns in this process."""

    is_remote = False

    def __init__(
        self,
        act: Act,
        make_env: MakeEnv,
        *,
        num_slots: int = 8,
        num_workers: int = 1,
        curve: BatchCurve | None = None,
    ) -> None:
        if num_slots < 1 or num_workers < 1:
            raise InputError(f"a crew needs workers with slots, got {num_workers} with {num_slots}")
        self.num_workers, self.num_slots, self.act = num_workers, num_slots, act
        curve = curve or BatchCurve()  # one for all: they are one process
        self.workers = [Worker(act, make_env, num_slots, curve) for _ in range(num_workers)]
        self._turn = 0

    def begin(self, groups: Mapping[int, Group], setting: Setting) -> list[int]:
        """Begin an iteration."""
        for worker in self.workers:
            worker.begin(groups, setting)
        return list(range(self.num_workers))

    def give(self, worker: int, given: Sequence[Given]) -> None:
        """Give orders to a worker."""
        self.workers[worker].give(given)

    def hear(self, timeout_s: float) -> list[Heard]:
        """Play a round of the next worker that has something to play."""
        for _ in range(self.num_workers):
            worker, self._turn = self._turn, (self._turn + 1) % self.num_workers
            if self.workers[worker].places:
                return [Heard(worker, self.workers[worker].play_round())]
        return []

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Hand the policy other weights; one that shares its network with the trainer needs no call."""
        load_into(self.act, weights, version)

    def close(self) -> None:
        """Nothing outlives the last episode."""


def load_into(act: Act, weights: Mapping[str, Tensor], version: int) -> None:
    """Hand weights to a policy that can take them: one with ``load_weights(weights, version)``."""
    load = getattr(act, "load_weights", None)
    if load is None:
        raise InputError("this policy takes no weights: give it a method load_weights(weights, version)")
    load(weights, version)
