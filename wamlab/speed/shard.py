"""FSDP2: parameters, gradients and the optimiser's averages live across processes, a block's weights come when needed.

    net = with_recompute(net)
    net = compiled(net)
    net = sharded(net, make_mesh(config, device), config)  # outermost

Every parameter becomes a ``DTensor`` of which a process holds its share; losses, gradients and their norm are those of
one process, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from wamlab.errors import InputError
from wamlab.speed.config import ShardConfig

Net = TypeVar("Net", bound=nn.Module)


def make_mesh(config: ShardConfig, device: torch.device | str, world_size: int) -> DeviceMesh:
    """Lay out the processes: in one row, or in ``num_replicas`` rows that each hold a whole copy."""
    if world_size % config.num_replicas:
        raise InputError(
            f"shard.num_replicas {config.num_replicas} does not divide {world_size} processes: give a divisor"
        )
    kind = torch.device(device).type
    if config.num_replicas == 1:
        return init_device_mesh(kind, (world_size,), mesh_dim_names=("share",))
    shape = (config.num_replicas, world_size // config.num_replicas)
    return init_device_mesh(kind, shape, mesh_dim_names=("replica", "share"))


def sharded(
    net: Net,
    mesh: DeviceMesh,
    config: ShardConfig | None = None,
    *,
    kept_float32: Sequence[nn.Module] = (),
    methods: Sequence[tuple[nn.Module, str]] = (),
) -> Net:
    """Share ``net`` among the processes of ``mesh`` in place, its ``blocks`` one by one, and return it.

    ``kept_float32`` are modules gathered in float32 whatever the others are; ``methods`` are those, besides forward,
    that use weights. A network on the meta device is shared without taking memory: ``to_empty`` it and load it then.
    """
    config = config or ShardConfig()
    offload = OffloadPolicy()
    if config.is_offloaded:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    narrow = torch.bfloat16 if config.has_bf16_weights else None
    sums = torch.bfloat16 if config.has_bf16_sums else torch.float32
    # What enters a module is left as it is: autocast decides, and noise levels must not be rounded.
    mixed = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=sums, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    share = partial(
        fully_shard,
        mesh=mesh,
        offload_policy=offload,
        shard_placement_fn=partial(_axis, num_shares=mesh.size(mesh.ndim - 1)),
    )
    blocks = list(net.get_submodule("blocks").children()) if config.units == "blocks" else []
    for module in kept_float32 if narrow is not None else ():
        share(module, mp_policy=exact)
    for index, block in enumerate(blocks):
        share(block, mp_policy=mixed, reshard_after_forward=index < len(blocks) - config.num_kept)
    share(net, mp_policy=mixed, reshard_after_forward=False)
    units = cast(list[FSDPModule], blocks)
    for index, unit in enumerate(units):
        ahead = units[index + 1 : index + 1 + config.num_prefetched]
        behind = units[max(0, index - config.num_prefetched) : index][::-1]
        unit.set_modules_to_forward_prefetch(ahead)
        unit.set_modules_to_backward_prefetch(behind)
    for module, name in methods:
        if isinstance(module, FSDPModule):
            register_fsdp_forward_method(module, name)
    return net


def free_weights(net: nn.Module) -> None:
    """Let a process hold its shares only again, where a forward pass without a backward pass left gathered weights."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _axis(parameter: nn.Parameter, num_shares: int) -> Shard:
    """Cut a parameter along its first axis that divides evenly: one of shape (1, 6, d) would all be one process's."""
    return Shard(next((axis for axis, size in enumerate(parameter.shape) if size % num_shares == 0), 0))


def held_bytes(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes of parameters, gradients and the optimiser's state that this process holds."""

    def size(tensor: Tensor) -> int:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return own.numel() * own.element_size()

    total = sum(size(p) + (size(p.grad) if p.grad is not None else 0) for p in net.parameters())
    states = optimizer.state.values() if optimizer is not None else ()
    return total + sum(size(value) for state in states for value in state.values() if isinstance(value, Tensor))
