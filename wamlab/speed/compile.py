"""Compile the repeated blocks of a network."""

from __future__ import annotations

import shutil
from typing import Any, TypeVar

import torch
from torch import nn

from wamlab.errors import InputError

Net = TypeVar("Net", bound=nn.Module)
NUM_FORMS = 64  # of a block that may be compiled: first, middle, last; training, observing, sampling; each history


def has_cpp_compiler() -> bool:
    """Say whether this machine can compile for its CPU."""
    return any(map(shutil.which, ("g++", "clang++", "cl")))


def compiled(net: Net) -> Net:
    """Compile every block of ``net.blocks`` in place, for training and for cached inference; return the network.

    On a CPU this needs a C++ compiler, and each shape takes its own compilation.
    """
    device = next(net.parameters()).device
    if device.type == "cpu" and not has_cpp_compiler():
        raise InputError("compiling for a CPU needs a C++ compiler: install g++, or train eagerly")
    torch._dynamo.config.recompile_limit = max(NUM_FORMS, torch._dynamo.config.recompile_limit)
    for block in net.get_submodule("blocks").children():
        block.compile(fullgraph=True, dynamic=False)
        step: Any = block.step
        vars(block)["step"] = torch.compile(step, fullgraph=True, dynamic=False)
    return net
