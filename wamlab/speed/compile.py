"""Compile the repeated blocks of a network, once for all of them."""

from __future__ import annotations

import shutil

import torch
from torch import nn

from wamlab.errors import InputError


def has_cpp_compiler() -> bool:
    """Say whether this machine can compile for its CPU."""
    return any(map(shutil.which, ("g++", "clang++", "cl")))


def compiled(net: nn.Module) -> nn.Module:
    """Compile every block of ``net.blocks`` in place, in training and in cached inference; return the network.

    All blocks share one compilation (the last, which does less, has its own). On a CPU this needs a C++ compiler.
    """
    device = next(net.parameters()).device
    if device.type == "cpu" and not has_cpp_compiler():
        raise InputError("compiling for a CPU needs a C++ compiler: install g++, or train eagerly")
    for block in net.get_submodule("blocks").children():
        block.compile(fullgraph=True, dynamic=False)
        block.step = torch.compile(block.step, fullgraph=True, dynamic=False)  # pyright: ignore[reportAttributeAccessIssue]
    return net
