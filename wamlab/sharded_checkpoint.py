"""Checkpoints that every process writes its share of: asynchronous, whole or not at all, for any number of processes.

``step_00001000`` holds ``shards/``, in the format of ``torch.distributed.checkpoint``, with tensors by name, and
``state.json``, which is written last. It is read by as many processes as there are then, or by one that shares nothing.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from wamlab.checkpoint_folder import SHARDS, begin_checkpoint, finish_checkpoint, keep_newest, partial_folder, unwritten
from wamlab.errors import InputError
from wamlab.model.lora import fingerprint_base, has_adapters
from wamlab.speed.ranks import Ranks
from wamlab.train import Ema


class ShardWriter:
    """Writes checkpoints beside training: a step waits for a copy of its state, not for the disk.

    All processes call its methods together. One checkpoint is written at a time.
    """

    def __init__(self, folder: Path, ranks: Ranks, *, num_kept: int = 2) -> None:
        self.folder, self.ranks, self.num_kept = folder, ranks, num_kept
        self._group: Any = dist.new_group(backend="gloo")  # writing must not disturb the order of training's messages
        self._writing: tuple[int, Future, bool] | None = None
        self._base: str | None = None  # of the frozen weights, which stay as they are

    def write(self, step: int, net: nn.Module, optimizer: Optimizer, ema: Ema | None) -> None:
        """Begin to write the checkpoint of a step, after the one before it is on the disk."""
        self.wait()
        if self.ranks.is_first:
            self._attempt(step, lambda: begin_checkpoint(self.folder, step))
        self.ranks.wait()
        self._base = self._base or fingerprint_base(net)
        state, shards = state_of(net, optimizer, ema), partial_folder(self.folder, step) / SHARDS
        future = self._attempt(step, lambda: async_save(state, checkpoint_id=shards, process_group=self._group))
        assert isinstance(future, Future)
        self._writing = step, future, ema is not None

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and give it its name once all of it is there."""
        if self._writing is None:
            return
        (step, future, has_ema), self._writing = self._writing, None
        self._attempt(step, future.result)
        self.ranks.wait()
        if self.ranks.is_first:
            self._attempt(step, lambda: finish_checkpoint(self.folder, step, has_ema=has_ema, base=self._base))
            keep_newest(self.folder, self.num_kept)

    def _attempt(self, step: int, action: Any) -> Any:
        try:
            return action()
        except (OSError, RuntimeError, CheckpointException) as error:
            raise unwritten(self.folder, step, error) from error


def state_of(net: nn.Module, optimizer: Optimizer | None, ema: Ema | None) -> dict[str, Any]:
    """Return what a checkpoint holds, by name; tensors are the very ones of the run, or its shares."""
    options = _options(net)
    state: dict[str, Any] = {"net": get_model_state_dict(net, options=options)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(net, optimizer, options=options)
    if ema is not None:
        state["ema"] = dict(ema.average)
    return state


def _options(net: nn.Module) -> StateDictOptions:
    """Leave out the frozen base beside adapters; other frozen weights may be in no other file."""
    return StateDictOptions(ignore_frozen_params=has_adapters(net))


def read_shards(
    checkpoint: Path, net: nn.Module, optimizer: Optimizer | None, ema: Ema | None, *, is_ema: bool = False
) -> None:
    """Put a checkpoint into a network, an optimiser and an average; ``is_ema`` puts the average into the network."""
    state = state_of(net, optimizer, ema)
    if is_ema:
        state = {"ema": state["net"]}
    try:
        load(state, checkpoint_id=checkpoint / SHARDS, no_dist=not dist.is_initialized())
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        lines = str(error).strip().splitlines() or [repr(error)]
        raise InputError(
            f"{checkpoint} cannot be read ({lines[-1]}): delete it to go on from an older one, or use its own recipe"
        ) from error
    if optimizer is not None:  # weights and averages were read into place
        set_optimizer_state_dict(net, optimizer, state["optimizer"], options=_options(net))
