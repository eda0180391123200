"""Ways to train the same recipe on many devices, as data: what DreamZero and RLinf do, and what this library does.

Kernels and passes of the eager blocks were counted on meta tensors at 14 B and 5 B in December 2026, attention
counted as one kernel a call: the plain form of the network (``model/plain.py``) for the published code, the network
itself for ours; what a published change takes away was subtracted. Compiled figures are estimates.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from wamlab.errors import InputError


@dataclass(frozen=True)
class BlockCode:
    """What one block launches and moves besides its products; a pass is a token's width in bf16, read or written."""

    forward_kernels: int
    backward_kernels: int
    forward_passes: int | float
    backward_passes: int | float
    is_graph: bool = False


# Forward 54 and backward 162 kernels cut out and join the keys of fifteen attention calls: 63 and 330 passes.
PUBLISHED = BlockCode(150, 368, 213, 620)
FUSED_ATTENTION = BlockCode(76, 190, 150, 290)  # what RLinf's four compiled functions leave
EAGER = BlockCode(99, 370, 140, 375)
COMPILED = BlockCode(30, 60, 40, 90, is_graph=True)


@dataclass(frozen=True)
class Method:
    """How a recipe is trained; every field can be changed by itself."""

    name: str
    block: BlockCode
    is_published_network: bool  # all tokens through every block, padded text, noise levels once a token
    sharding: str  # "zero2": gradients and optimiser in parts; "fsdp2": parameters too; "none"
    is_host_optimizer: bool = False  # Adam on the host
    is_fused_optimizer: bool = False
    is_overlapped: bool = True  # collectives run beside computation
    is_serial: bool = True  # attention copies its lengths from pageable memory, so the host waits for the device
    recompute: str = "all"  # blocks: "all", "none" or "fit": as few as the memory allows
    is_encode_batched: bool = True
    has_dead_encode: bool = False  # the condition is encoded where the network does not read it (5 B)
    has_text_cache: bool = False
    has_features: bool = False  # latents, image and text read from a store
    has_sharded_encoders: bool = False  # gathered each step like the network


METHODS = {
    method.name: method
    for method in (
        Method("official", PUBLISHED, True, "zero2", is_host_optimizer=True, is_overlapped=False,
               is_encode_batched=False, has_dead_encode=True),
        Method("fsdp2-base", PUBLISHED, True, "fsdp2", is_encode_batched=False, has_dead_encode=True,
               has_sharded_encoders=True),
        Method("rlinf", FUSED_ATTENTION, True, "fsdp2", has_dead_encode=True, has_sharded_encoders=True),
        Method("wamlab-eager", EAGER, False, "fsdp2", is_fused_optimizer=True, is_serial=False, has_text_cache=True),
        Method("wamlab", COMPILED, False, "fsdp2", is_fused_optimizer=True, is_serial=False, recompute="fit",
               has_text_cache=True),
        Method("wamlab-cached", COMPILED, False, "fsdp2", is_fused_optimizer=True, is_serial=False, recompute="fit",
               has_text_cache=True, has_features=True),
    )
}  # fmt: skip


def find_method(name: str) -> Method:
    """Return a method by name; an unknown one raises with the nearest name."""
    if name not in METHODS:
        near = difflib.get_close_matches(name.lower(), METHODS, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(METHODS)}"
        raise InputError(f'there is no method "{name}": {hint}')
    return METHODS[name]
