"""Laws of sharding, run by test_shard.py in 1, 2 or 4 processes of their own: what a run does depends on none of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from small_network import batch_of, open_net  # pyright: ignore[reportMissingImports]

from wamlab.checkpoint import load_checkpoint, load_weights, write_checkpoint
from wamlab.checkpoint_folder import newest_checkpoint
from wamlab.errors import InputError
from wamlab.flow import flow_loss
from wamlab.model.lora import LoraConfig, freeze, with_lora
from wamlab.model.wam import WorldActionModel
from wamlab.sharded_checkpoint import ShardWriter
from wamlab.speed.compile import compiled
from wamlab.speed.config import ShardConfig
from wamlab.speed.ranks import Ranks, join_ranks, leave_ranks, read_ranks
from wamlab.speed.recompute import with_recompute
from wamlab.speed.shard import held_bytes, make_mesh, sharded
from wamlab.tensors import whole
from wamlab.train import Ema, TrainConfig, has_native_bf16, make_optimizer, noised_examples, train

CONFIG = TrainConfig(num_steps=4, batch_size=8, learning_rate=3e-3, has_bf16=False, max_gradient_norm=0.1)
COMPILED = "compiled and recomputed"
RELOADED = ("partly frozen", "adapters")
CASES: dict[str, tuple[ShardConfig, TrainConfig]] = {
    "every block freed": (ShardConfig(num_kept=0), CONFIG),
    "blocks kept": (ShardConfig(num_kept=99, num_prefetched=2), CONFIG),
    "whole, offloaded": (ShardConfig(units="whole", is_offloaded=True), CONFIG),
    "two copies": (ShardConfig(num_replicas=2), CONFIG),
    "accumulated": (ShardConfig(), replace(CONFIG, num_micro_batches=2)),
    "muon": (ShardConfig(), replace(CONFIG, optimizer="muon")),
    COMPILED: (ShardConfig(), CONFIG),
    "partly frozen": (ShardConfig(), replace(CONFIG, frozen=("blocks.0.*",))),
    "adapters": (ShardConfig(), replace(CONFIG, lora=LoraConfig())),
}
if has_native_bf16("cpu"):
    CASES["bf16 weights"] = ShardConfig(has_bf16_weights=True), replace(CONFIG, has_bf16=True)


def build(config: TrainConfig) -> WorldActionModel:
    net = open_net(num_layers=3)
    if config.lora is not None:
        with_lora(net, config.lora, torch.Generator().manual_seed(1))
    return cast(WorldActionModel, freeze(net, config.frozen))


def batches(ranks: Ranks, size: int, first: int = 0):
    """Yield this process's part of batches that depend on their index only."""
    index = first
    while True:
        joint = batch_of(torch.Generator().manual_seed(index), size, num_blocks=2)
        part = size // ranks.world_size
        yield joint[ranks.rank * part : (ranks.rank + 1) * part]
        index += 1


def steps(net: Any, optimizer: Any, config: TrainConfig, ranks: Ranks, **options: Any) -> list[list[float]]:
    first = options.get("first_step", 0)
    examples = noised_examples(batches(ranks, config.batch_size, first), seed=0, first_step=first, ranks=ranks)
    set_sync = getattr(net, "set_requires_gradient_sync", None)
    found = train(partial(flow_loss, net), examples, optimizer, config, ranks=ranks, set_sync=set_sync, **options)
    return [[record.loss, record.gradient_norm] for record in found]


def share(net: WorldActionModel, shard: ShardConfig, ranks: Ranks) -> WorldActionModel:
    methods = [(net, "denoise"), (net, "observe"), (net, "start")]
    methods += [(block, name) for block in net.layers for name in ("step", "cross_keys")]
    mesh = make_mesh(shard, "cpu", ranks.world_size)
    return sharded(net, mesh, shard, kept_float32=[net.time_embedding, net.time_projection], methods=methods)


def largest_difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((whole(p.detach()) - whole(q.detach())).abs().max().item() for p, q in pairs)


def reload(net: Any, optimizer: Any, config: TrainConfig, folder: Path, ranks: Ranks) -> float:
    """Return how far weights are off that a checkpoint gives to a network whose own do not matter."""
    writer = ShardWriter(folder, ranks)
    writer.write(1, net, optimizer, None)
    writer.wait()
    ranks.wait()
    other = build(config)
    for p in other.parameters():
        if p.requires_grad or config.lora is None:  # adapters come beside their own base
            p.data.zero_()
    load_weights(newest_checkpoint(folder), other)
    found = largest_difference(net, other)
    if config.lora is not None:
        refuse_another_base(other, folder)
    return found


def refuse_another_base(net: WorldActionModel, folder: Path) -> None:
    """Fail unless adapters are refused beside frozen weights that are not theirs."""
    next(p for p in net.parameters() if not p.requires_grad).data.add_(1.0)
    try:
        load_weights(newest_checkpoint(folder), net)
    except InputError as error:
        assert "was trained beside the frozen weights" in str(error)
    else:
        raise AssertionError("adapters were read beside another base")


def measure(name: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    shard, config = CASES[name]
    alone = build(config)
    wanted = steps(alone, make_optimizer(alone, config), config, Ranks())
    net = build(config)
    net = with_recompute(net) if name in ("every block freed", COMPILED) else net
    net = compiled(net, backend="aot_eager", is_strict=True) if name == COMPILED else net
    net = share(net, shard, ranks)
    optimizer = make_optimizer(net, config)
    found = steps(net, optimizer, config, ranks)
    return {
        "found": found,
        "wanted": wanted,
        "reloaded": reload(net, optimizer, config, folder / name, ranks) if name in RELOADED else None,
        "weights": largest_difference(net, alone),
        "bytes": held_bytes(net, optimizer),
    }


def resume(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Go on from what any number of processes left, or begin; leave two more steps behind."""
    net = share(build(CONFIG), ShardConfig(), ranks)
    optimizer, ema = make_optimizer(net, CONFIG), Ema(net, 0.9)
    checkpoints = folder / "checkpoints"
    writer = ShardWriter(checkpoints, ranks)
    first = 0
    if checkpoints.is_dir():
        first = load_checkpoint(newest_checkpoint(checkpoints), net, optimizer, ema)
    config = replace(CONFIG, num_steps=first + 2)
    found = steps(net, optimizer, config, ranks, first_step=first, ema=ema)
    writer.write(first + 2, net, optimizer, ema)
    writer.wait()
    return {"found": found, "first": first}


def alone(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Do the same in one process that shares nothing."""
    net = build(CONFIG)
    optimizer, ema = make_optimizer(net, CONFIG), Ema(net, 0.9)
    first = load_checkpoint(newest_checkpoint(folder / "checkpoints"), net, optimizer, ema)
    found = steps(net, optimizer, replace(CONFIG, num_steps=first + 2), Ranks(), first_step=first, ema=ema)
    write_checkpoint(folder / "checkpoints", first + 2, net, optimizer, ema)
    return {"found": found, "first": first}


TASKS: dict[str, Callable[[Path, Ranks], dict[str, Any]]] = {"resume": resume, "alone": alone}

if __name__ == "__main__":
    task, target = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    ranks = read_ranks()
    join_ranks(ranks, "cpu")
    names = [name for name, (shard, _) in CASES.items() if ranks.world_size % shard.num_replicas == 0]
    if ranks.world_size != 2:  # once is enough for what takes long
        names.remove(COMPILED)
    done = TASKS[task](target, ranks) if task in TASKS else {name: measure(name, target, ranks) for name in names}
    if ranks.is_first:
        (target / f"{task}_{ranks.world_size}.json").write_text(json.dumps(done))
    leave_ranks()
