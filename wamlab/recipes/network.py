"""Build a recipe's network with its tricks, on one process or shared among many."""

from __future__ import annotations

import torch

from wamlab.errors import InputError
from wamlab.model.lora import freeze, narrowed, with_lora
from wamlab.model.plain import PlainWorldActionModel
from wamlab.model.wam import WorldActionModel
from wamlab.model.weights import load_pretrained
from wamlab.recipes.config import Recipe
from wamlab.speed.config import ShardConfig
from wamlab.speed.ranks import Ranks, join_ranks
from wamlab.speed.recompute import with_recompute
from wamlab.speed.recompute_plan import RecomputePlan
from wamlab.train import has_native_bf16, step_generator


def is_shared(recipe: Recipe, ranks: Ranks) -> bool:
    """Say whether processes hold shares of the network only."""
    return ranks.world_size > 1 or recipe.speed.shard is not None


def build_net(recipe: Recipe, device: torch.device, ranks: Ranks) -> WorldActionModel:
    """Build the network: drawn from the seed or read from ``start``, then adapters, frozen parameters, tricks.

    Without ``start`` each process draws the whole network, so that it is the same for any number of them.
    """
    train = recipe.train
    has_shares = is_shared(recipe, ranks)
    kind = PlainWorldActionModel if recipe.speed.is_plain else WorldActionModel
    torch.manual_seed(train.seed)
    generator = step_generator(train.seed, 0)
    if recipe.start is None:
        net = kind(recipe.model)
        if not has_shares:  # sharing moves each process's part
            net = net.to(device)
    else:
        with torch.device("meta"):
            net = kind(recipe.model)
        if train.lora is not None and train.has_bf16 and has_native_bf16(device):
            narrowed(net, train.lora)  # before any memory is taken
        if has_shares and train.lora is None:
            freeze(net, train.frozen)
            net = _shared(_with_tricks(net, recipe), recipe, device, ranks)
            net.to_empty(device=_home(recipe, device))
            load_pretrained(net, recipe.start, generator=generator)
            return net
        net.to_empty(device="cpu" if has_shares else device)
        load_pretrained(net, recipe.start, generator=generator)
    if train.lora is not None:
        with_lora(net, train.lora, generator)
    freeze(net, train.frozen)
    net = _with_tricks(net, recipe)
    return _shared(net, recipe, device, ranks) if has_shares else net


def _with_tricks(net: WorldActionModel, recipe: Recipe) -> WorldActionModel:
    speed = recipe.speed
    if speed.recompute in ("all", "tuned"):  # tuning changes the plan in place, so it goes below the other tricks
        net = with_recompute(net)
    elif speed.recompute != "none":
        net = with_recompute(net, RecomputePlan.read(speed.recompute))
    if speed.compile == "blocks":
        from wamlab.speed.compile import compiled, mark_step  # the compiler takes a second to import

        net = compiled(net, mode=speed.compile_mode, activation_budget=speed.activation_budget)
        if speed.compile_mode == "reduce-overhead":
            net.register_forward_pre_hook(lambda *_: mark_step())
    return net


def _shared(net: WorldActionModel, recipe: Recipe, device: torch.device, ranks: Ranks) -> WorldActionModel:
    from wamlab.speed.shard import make_mesh, sharded  # half a second to import

    shard = recipe.speed.shard or ShardConfig()
    if shard.has_bf16_weights and not (recipe.train.has_bf16 and has_native_bf16(device)):
        raise InputError(
            "speed.shard.has_bf16_weights needs train.has_bf16 and a device that computes in bfloat16: turn it off"
        )
    if recipe.speed.has_graph:
        raise InputError("speed.has_graph cannot capture the messages between processes: turn it off")
    if recipe.train.optimizer == "adamw8bit":
        raise InputError('train.optimizer "adamw8bit" cannot step shares of a network: give "adamw" or "muon"')
    join_ranks(ranks, device)
    methods = [(net, name) for name in ("start", "observe", "denoise")]
    methods += [(block, name) for block in net.layers for name in ("step", "cross_keys")]
    mesh = make_mesh(shard, device, ranks.world_size)
    return sharded(net, mesh, shard, kept_float32=[net.time_embedding, net.time_projection], methods=methods)


def _home(recipe: Recipe, device: torch.device) -> torch.device:
    """Return where shares lie between steps."""
    is_offloaded = recipe.speed.shard is not None and recipe.speed.shard.is_offloaded
    return torch.device("cpu") if is_offloaded else device
