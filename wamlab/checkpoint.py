"""Checkpoints: everything a run needs to go on bit for bit, written whole or not at all.

A checkpoint is a folder ``step_00001000`` with ``model.safetensors``, ``ema.safetensors`` (if there is an
average), ``optimizer.pt`` (loaded with ``weights_only=True``) and ``state.json``. Of a network with adapters only they
and what else is trained are stored, with the fingerprint of the frozen weights that they belong to.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from wamlab.checkpoint_folder import SHARDS, begin_checkpoint, finish_checkpoint, keep_newest, read_state, unwritten
from wamlab.errors import InputError
from wamlab.model.lora import check_base, fingerprint_base, has_adapters, split_lora
from wamlab.tensors import put, shared_like
from wamlab.train import Ema


def write_checkpoint(
    folder: Path, step: int, net: nn.Module, optimizer: Optimizer, ema: Ema | None, *, num_kept: int = 2
) -> Path:
    """Write the checkpoint of a step below ``folder``, then remove all but the newest ``num_kept``."""
    stored = _stored(net)
    partial = begin_checkpoint(folder, step)
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in stored.items()},
            partial / "model.safetensors",
        )
        if ema is not None:
            save_file(ema.average, partial / "ema.safetensors")
        torch.save(
            {"optimizer": optimizer.state_dict(), "torch_rng": torch.get_rng_state()},
            partial / "optimizer.pt",
        )
        target = finish_checkpoint(folder, step, has_ema=ema is not None, base=fingerprint_base(net))
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError | RuntimeError):
            raise unwritten(folder, step, error) from error
        raise
    keep_newest(folder, num_kept)
    return target


def load_weights(checkpoint: Path, net: nn.Module, *, is_ema: bool = False) -> None:
    """Put a checkpoint's weights, or their moving average, into a network; missing or extra keys raise.

    A checkpoint of adapters needs a network that has them, beside the base it was trained on.
    """
    check_base(read_state(checkpoint)["base"], net, checkpoint)
    if (checkpoint / SHARDS).is_dir():
        from wamlab.sharded_checkpoint import read_shards

        read_shards(checkpoint, net, None, None, is_ema=is_ema and read_state(checkpoint)["has_ema"])
        return
    stored = _stored(net)
    weights = _read_tensors(checkpoint / "model.safetensors")
    if is_ema and (checkpoint / "ema.safetensors").exists():
        weights |= _read_tensors(checkpoint / "ema.safetensors")
    expected = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if expected != given:
        wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
        first = wrong[0]
        raise InputError(
            f"{checkpoint} does not fit this network in {len(wrong)} tensors, the first being {first} "
            f"(network {expected.get(first)}, file {given.get(first)}): build it from the run's own config"
        )
    with torch.no_grad():
        for name, tensor in stored.items():
            put(tensor, weights[name])


def load_checkpoint(checkpoint: Path, net: nn.Module, optimizer: Optimizer, ema: Ema | None) -> int:
    """Restore weights, optimiser, average and random state exactly; return the number of finished steps."""
    state = read_state(checkpoint)
    if state["has_ema"] != (ema is not None):
        raise InputError(
            f"{checkpoint} {'has' if state['has_ema'] else 'lacks'} a moving average: keep train.ema_decay"
        )
    if (checkpoint / SHARDS).is_dir():
        from wamlab.sharded_checkpoint import read_shards  # imports what few runs need, in half a second

        check_base(state["base"], net, checkpoint)
        read_shards(checkpoint, net, optimizer, ema)
        return state["step"]
    load_weights(checkpoint, net)
    try:
        saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        _load_optimizer(optimizer, saved["optimizer"])
        torch.set_rng_state(saved["torch_rng"])
    except Exception as error:  # what unpickling raises is up to the damaged bytes
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{checkpoint / 'optimizer.pt'} cannot be read ({reason}): delete {checkpoint} to go on from an older one"
        ) from error
    if ema is not None:
        for name, tensor in _read_tensors(checkpoint / "ema.safetensors").items():
            put(ema.average[name], tensor)
    return state["step"]


def _load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimiser its state, of which it may hold a share only."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in saved["state"].items():
        like = parameters[index]
        saved["state"][index] = {
            name: shared_like(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value
            for name, value in values.items()
        }
    optimizer.load_state_dict(saved)


def _stored(net: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint holds: all, or what is trained beside a frozen base."""
    return split_lora(net)[1] if has_adapters(net) else net.state_dict()


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({error}): delete {path.parent} to go on from an older one") from error
