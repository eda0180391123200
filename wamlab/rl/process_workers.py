"""Workers as processes of this machine: orders and segments through pipes, weights through a file in shared memory.

A worker plays rounds and tells of each; when an order has ended in it, it waits for the answer, and nobody writes much
to it at other times, so that neither side waits for the other to read. One that dies is noticed by the end of its pipe
and started again with the weights and the iteration of the others; workers whose parent dies find theirs closed, and
leave.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wamlab.errors import InputError
from wamlab.rl.crew import Heard, load_into
from wamlab.rl.episode import MakeEnv
from wamlab.rl.segments import Act, Group, Setting
from wamlab.rl.worker import Given, Round, Worker

MakeAct = Callable[[int], Act]  # of a worker, by its number, in its process
SHARED_MEMORY = Path("/dev/shm")  # nosec B108  # folders made in it are private and have random names
STOP_S = 5.0  # for a worker to leave by itself
Begin = tuple[int, Mapping[int, Group], Setting]  # number of the iteration that this crew plays


class ProcessCrew:
    """Worker processes; use it as a context, or close it. ``make_act`` and ``make_env`` must be importable."""

    is_remote = True

    def __init__(
        self,
        make_act: MakeAct,
        make_env: MakeEnv,
        *,
        num_workers: int = 2,
        num_slots: int = 8,
        num_threads: int = 1,
        max_restarts: int = 3,
    ) -> None:
        """Start the processes; ``num_threads`` are those of torch in each, ``max_restarts`` of all together."""
        if num_slots < 1 or num_workers < 1:
            raise InputError(f"a crew needs workers with slots, got {num_workers} with {num_slots}")
        self.num_workers, self.num_slots, self.restarts_left = num_workers, num_slots, max_restarts
        self._made = (make_act, make_env, num_slots, num_threads)
        parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        sweep(SHARED_MEMORY)
        self._folder = tempfile.TemporaryDirectory(prefix=f"wamlab-weights-{os.getpid()}-", dir=parent)
        self._weights: tuple[str, int] | None = None
        self._begun: Begin | None = None
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}
        self._starting: set[int] = set()
        self._waiting: set[int] = set()  # for an answer
        self._unheard: list[tuple[int, Any]] = []  # came while something was sent
        for worker in range(num_workers):
            self._start(worker)

    def begin(self, groups: Mapping[int, Group], setting: Setting) -> list[int]:
        """Begin an iteration when all workers are there; return those that are."""
        while self._starting:
            self._listen(None)
        if not self._pipes:
            raise RuntimeError(f"none of the {self.num_workers} rollout workers is alive")
        number = self._begun[0] + 1 if self._begun else 0
        self._begun = number, dict(groups), setting
        self._waiting.clear()
        for worker in self._ready:
            self._send(worker, ("begin", self._begun))
        return self._ready

    def give(self, worker: int, given: Sequence[Given]) -> None:
        """Answer a worker that waits, or give to an idle one; one that plays on, or is dead, is told nothing."""
        if worker in self._pipes and (given or worker in self._waiting):
            self._waiting.discard(worker)
            self._send(worker, ("give", list(given)))

    def hear(self, timeout_s: float) -> list[Heard]:
        """Return rounds, deaths and returns; raises RuntimeError with the words of a worker whose code failed."""
        return self._listen(timeout_s)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Hand over weights, all or those that training changes; workers that start later get these."""
        while self._starting:
            self._listen(None)
        path = Path(self._folder.name) / f"{version}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)
        before, self._weights = self._weights, (str(path), version)
        self._starting.update(self._pipes)
        for worker in list(self._pipes):
            self._send(worker, ("load", self._weights))
        while self._starting:
            self._listen(None)
        if before is not None and before[0] != str(path):
            Path(before[0]).unlink(missing_ok=True)

    def close(self) -> None:
        """End all processes: by word, then by force."""
        for worker in list(self._pipes):
            self._send(worker, None)
        for process in self._processes.values():
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes.clear()
        self._folder.cleanup()

    def __enter__(self) -> ProcessCrew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the workers that live."""
        return {worker: self._processes[worker].pid for worker in self._pipes}

    @property
    def _ready(self) -> list[int]:
        return [worker for worker in self._pipes if worker not in self._starting]

    def _start(self, worker: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, worker, *self._made, self._weights)
        process = context.Process(target=serve, args=arguments, daemon=True, name=f"rollout-{worker}")
        process.start()
        theirs.close()  # else the end of theirs would not end ours
        self._pipes[worker], self._processes[worker] = ours, process
        self._starting.add(worker)

    def _listen(self, timeout_s: float | None) -> list[Heard]:
        workers = {pipe: worker for worker, pipe in self._pipes.items()}
        found = []
        for heard in wait(list(workers), 0 if self._unheard else timeout_s):
            pipe = cast(Connection, heard)
            try:
                self._unheard.append((workers[pipe], pipe.recv()))
            except (EOFError, ConnectionResetError):
                found.append(self._bury(workers[pipe]))
        unheard, self._unheard = self._unheard, []
        for worker, message in unheard:
            if isinstance(message, str):
                raise RuntimeError(f"rollout worker {worker} failed:\n{message}")
            if message is None:  # ready
                self._starting.discard(worker)
                if self._begun is not None and timeout_s is not None:
                    self._send(worker, ("begin", self._begun))
                    found.append(Heard(worker, None, is_back=True))
            elif self._begun is not None and message[0] == self._begun[0]:
                found.append(Heard(worker, message[1]))
                if message[1].ended:
                    self._waiting.add(worker)
        return found

    def _bury(self, worker: int) -> Heard:
        self._pipes.pop(worker).close()
        process = self._processes[worker]
        process.join()
        self._starting.discard(worker)
        self._waiting.discard(worker)
        why = f"worker {worker} ended with status {process.exitcode}"
        will_return = self.restarts_left > 0
        if will_return:
            self.restarts_left -= 1
            self._start(worker)
        return Heard(worker, None, why=why, will_return=will_return)

    def _send(self, worker: int, message: Any) -> None:
        """Send, and read meanwhile what a worker still says of an iteration that was given up."""
        pipe = self._pipes[worker]
        if message is not None and message[0] == "give":
            _send_if_alive(pipe, message)  # the worker waits for it
            return
        sender = Thread(target=_send_if_alive, args=(pipe, message))
        sender.start()
        while sender.is_alive():
            sender.join(0.001)
            with suppress(EOFError, ConnectionResetError):  # its death is heard of next
                if sender.is_alive() and pipe.poll(0):
                    self._unheard.append((worker, pipe.recv()))


def _send_if_alive(pipe: Connection, message: Any) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the end of a dead one's pipe tells of it
        pipe.send(message)


def sweep(folder: Path) -> None:
    """Remove weights that parents left there who were killed."""
    for left in folder.glob("wamlab-weights-*-*"):
        if not Path(f"/proc/{left.name.split('-')[2]}").exists():
            shutil.rmtree(left, ignore_errors=True)


def serve(
    pipe: Connection,
    worker: int,
    make_act: MakeAct,
    make_env: MakeEnv,
    num_slots: int,
    num_threads: int,
    weights: tuple[str, int] | None,
) -> None:
    """Be a worker until told to stop, or until nobody is there to tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted notebook cell stops the rollout, not the crew
    torch.set_num_threads(num_threads)
    try:
        act = make_act(worker)
        if weights is not None:
            load_into(act, load_file(weights[0]), weights[1])
        pipe.send(None)
        _play(pipe, Worker(act, make_env, num_slots))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception:
        pipe.send(traceback.format_exc())


def _play(pipe: Connection, player: Worker) -> None:
    number, is_answered = -1, False
    while True:
        while not (is_answered and player.places) or pipe.poll():
            message = pipe.recv()
            if message is None:
                return
            if message[0] == "begin":
                number, groups, setting = message[1]
                player.begin(groups, setting)
            elif message[0] == "load":
                path, version = message[1]
                player.drop(list(player.places))  # of an iteration that was given up
                load_into(player.act, load_file(path), version)
                pipe.send(None)
            else:
                player.give(message[1])
                is_answered = True
        found: Round = player.play_round()
        pipe.send((number, found))
        is_answered = not found.ended
