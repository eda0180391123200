"""The processes of one run: who this one is among them, and what they tell each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from wamlab.errors import InputError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # the first step may wait for a slow disk or a compiler


@dataclass(frozen=True)
class Ranks:
    """This process's place among those of a run; one alone tells nobody anything."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # on this machine

    @property
    def is_first(self) -> bool:
        """Say whether this process writes what there is to be once."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over processes, in float32."""
        if self.world_size == 1:
            return values
        total = values.float()
        dist.all_reduce(total)
        return total / self.world_size

    def shared(self, value: T) -> T:
        """Return the first process's value in all of them; it is pickled between processes of one run."""
        if self.world_size == 1:
            return value
        held: list[Any] = [value]
        dist.broadcast_object_list(held)
        return held[0]

    def greatest(self, number: int) -> int:
        """Return the greatest of the numbers that the processes give, in all of them; devices are not waited for."""
        if self.world_size == 1:
            return number
        held = torch.tensor(number)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return int(held)

    def wait(self) -> None:
        """Wait until every process has come here."""
        if self.world_size > 1:
            dist.barrier()


def read_ranks() -> Ranks:
    """Return what torchrun says this process is; alone without it.

    Raises InputError for an environment that makes no sense.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "WORLD_SIZE" not in os.environ:
        return Ranks()
    try:
        ranks = Ranks(*(int(os.environ.get(name, "0")) for name in names))
    except ValueError:
        given = ", ".join(f"{name}={os.environ.get(name)!r}" for name in names)
        raise InputError(f"the environment has {given}, not whole numbers: start the run with torchrun") from None
    if not 0 <= ranks.rank < ranks.world_size:
        raise InputError(
            f"the environment has RANK={ranks.rank} of WORLD_SIZE={ranks.world_size}: start the run with torchrun"
        )
    return ranks


def join_ranks(ranks: Ranks, device: torch.device | str) -> None:
    """Let the processes find each other: gloo on CPUs, NCCL on CUDA devices and gloo for what lies in host memory.

    A process alone joins itself, which sharding needs. What was joined already stays.
    """
    if dist.is_initialized():
        return
    device = torch.device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.world_size == 1 and "MASTER_ADDR" not in os.environ:
        alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, rank=0, world_size=1, store=alone, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT)


def leave_ranks() -> None:
    """Part from the other processes, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def torchrun_command(
    num_processes: int, module: str, words: Sequence[str], *, num_restarts: int = 0, python: str = sys.executable
) -> list[str]:
    """Return the command that runs ``python -m module words`` in several processes of this machine.

    When one fails all are ended, and begun again up to ``num_restarts`` times.
    """
    start = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return [*start, f"--max-restarts={num_restarts}", "--monitor-interval=0.2", "-m", module, *words]


def torchrun_environment(num_processes: int) -> dict[str, str]:
    """Return what torchrun's environment should say, unless it says otherwise.

    Processes that begin again need a store without the addresses of those before: in torch 2.13 they share the agent's,
    and gloo waits for the dead (2026-12-03; pytorch issue 135712). To be removed when the agent makes a new one.
    """
    num_threads = max(1, (os.cpu_count() or 1) // num_processes)
    return {"OMP_NUM_THREADS": str(num_threads), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
