"""Workers as Ray actors on the nodes of a cluster: orders and segments through Ray, weights through its object store.

Needs the extra ``ray``. A worker whose process or node dies is started again where there is room, with the weights and
the iteration of the others.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wamlab.errors import InputError
from wamlab.rl.crew import Heard, load_into
from wamlab.rl.episode import MakeEnv
from wamlab.rl.process_workers import MakeAct
from wamlab.rl.segments import Group, Setting
from wamlab.rl.worker import Given, Round, Worker

Begin = tuple[int, Mapping[int, Group], Setting]  # number of the iteration that this crew plays


def import_ray() -> Any:
    """Import Ray; raise InputError with the install command if it is missing."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InputError(f"ray cannot be imported ({error}): run pip install -e '.[ray]'") from error


class RayPlayer:
    """A worker in an actor."""

    def __init__(self, worker: int, make_act: MakeAct, make_env: MakeEnv, num_slots: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.player, self.number = Worker(make_act(worker), make_env, num_slots), -1

    def begin(self, begun: Begin | None, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Take weights, if there are any, and an iteration, if one has begun."""
        if weights is not None:
            load_into(self.player.act, weights, version)
        if begun is not None:
            self.number = begun[0]
            self.player.begin(*begun[1:])

    def play(self, number: int, given: Sequence[Given]) -> Round | None:
        """Take orders and play a round; nothing where there is nothing to play, or of an iteration given up."""
        if number != self.number:
            return None
        self.player.give(given)
        return self.player.play_round() if self.player.places else None


class RayCrew:
    """Actors on the cluster that runs, or on one started here; use it as a context, or close it."""

    is_remote = True

    def __init__(
        self,
        make_act: MakeAct,
        make_env: MakeEnv,
        *,
        num_workers: int,
        num_slots: int = 8,
        num_threads: int = 1,
        num_cpus: float = 1,
        num_gpus: float = 0,
        max_restarts: int = 3,
        patience_s: float = 60.0,
    ) -> None:
        """Start the actors, spread over nodes; ``num_cpus`` and ``num_gpus`` are what each takes of its node.

        An iteration begins without those that have found no room after ``patience_s``; they join when they do.
        """
        if num_slots < 1 or num_workers < 1:
            raise InputError(f"a crew needs workers with slots, got {num_workers} with {num_slots}")
        self._ray = import_ray()
        if not self._ray.is_initialized():
            self._ray.init()
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "scheduling_strategy": "SPREAD"}
        self._kind = self._ray.remote(**options)(RayPlayer)
        self._made = (make_act, make_env, num_slots, num_threads)
        self.num_workers, self.num_slots, self.restarts_left = num_workers, num_slots, max_restarts
        self.patience_s = patience_s
        self._weights: tuple[Any, int] = (None, 0)
        self._begun: Begin | None = None
        self._actors: dict[int, Any] = {}
        self._ready: set[int] = set()
        self._pending: dict[Any, tuple[int, bool]] = {}  # what is awaited, of whom, and whether it says "ready"
        for worker in range(num_workers):
            self._start(worker)

    def begin(self, groups: Mapping[int, Group], setting: Setting) -> list[int]:
        """Begin an iteration when all workers are there, or patience is at an end; return those that are."""
        self._begun = (self._begun[0] + 1 if self._begun else 0), dict(groups), setting
        self._ask_all()
        return sorted(self._ready)

    def give(self, worker: int, given: Sequence[Given]) -> None:
        """Let a worker take orders and play a round."""
        if worker in self._actors and self._begun is not None:
            self._pending[self._actors[worker].play.remote(self._begun[0], list(given))] = worker, False

    def hear(self, timeout_s: float) -> list[Heard]:
        """Return rounds, deaths and returns; raises RuntimeError with the words of a worker whose code failed."""
        return self._listen(timeout_s)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Hand over weights, all or those that training changes; they reach each node once."""
        tensors = {name: tensor.detach().cpu() for name, tensor in weights.items()}
        self._weights = self._ray.put(tensors), version
        self._ask_all()

    def close(self) -> None:
        """End the actors; the cluster stays."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._pending.clear()

    def __enter__(self) -> RayCrew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, worker: int) -> None:
        self._actors[worker] = self._kind.remote(worker, *self._made)
        self._ask_to_begin(worker)

    def _ask_all(self) -> None:
        """Ask all to begin; what they still do of before is void. Raises RuntimeError where none answers."""
        self._pending, self._ready = {}, set()
        for worker in self._actors:
            self._ask_to_begin(worker)
        until_s = time.monotonic() + self.patience_s
        while self._pending and (left_s := until_s - time.monotonic()) > 0:
            self._listen(left_s)
        if not self._ready:
            raise RuntimeError(f"none of the {self.num_workers} rollout workers is there after {self.patience_s:g} s")

    def _ask_to_begin(self, worker: int) -> None:
        self._pending[self._actors[worker].begin.remote(self._begun, *self._weights)] = worker, True

    def _listen(self, timeout_s: float) -> list[Heard]:
        if not self._pending:
            return []
        done, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        found = []
        for reference in done:
            worker, is_ready = self._pending.pop(reference)
            try:
                played = self._ray.get(reference)
            except self._ray.exceptions.RayActorError as error:
                found.append(self._bury(worker, error))
                continue
            except self._ray.exceptions.RayTaskError as error:
                raise RuntimeError(f"rollout worker {worker} failed:\n{error}") from error
            if is_ready:
                self._ready.add(worker)
                found.append(Heard(worker, None, is_back=True))
            elif played is not None:
                found.append(Heard(worker, played))
        return found

    def _bury(self, worker: int, error: Exception) -> Heard:
        del self._actors[worker]
        self._ready.discard(worker)
        self._pending = {r: pair for r, pair in self._pending.items() if pair[0] != worker}
        will_return = self.restarts_left > 0
        if will_return:
            self.restarts_left -= 1
            self._start(worker)
        why = f"worker {worker} died: {str(error).splitlines()[0]}"
        return Heard(worker, None, why=why, will_return=will_return)
