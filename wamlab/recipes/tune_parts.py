"""What tuning a recipe needs of it: an example without data, its network at any depth, its loss and its optimiser."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wamlab.flow import flow_loss, level_weight, with_noise
from wamlab.model.flops import IMAGE_TOKENS
from wamlab.model.lora import freeze, narrowed, with_lora
from wamlab.model.plain import PlainWorldActionModel
from wamlab.model.positions import place_code, window_rotation
from wamlab.model.wam import MASK_CHANNELS, WorldActionModel
from wamlab.recipes.config import Recipe
from wamlab.recipes.plan import REAL_TEXT_TOKENS, encoder_costs, window_of
from wamlab.speed.activation_memory import StepMemory, trace_step_memory
from wamlab.speed.recompute_plan import POLICIES
from wamlab.speed.tree import flat, rebuilt
from wamlab.speed.update import clip_gradients
from wamlab.train import make_optimizer
from wamlab.types import Batch, FlowExample

CACHES = (window_rotation, place_code)
MAX_SIZES = 8
BYTES_8BIT = 2  # a parameter, of the two averages that bitsandbytes keeps


def list_sizes(batch_size: int, most: int = MAX_SIZES) -> list[int]:
    """Return the divisors of a device's batch, or as many of them as wanted, evenly over their order."""
    divisors = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    if len(divisors) <= most:
        return divisors
    places = {round(place * (len(divisors) - 1) / (most - 1)) for place in range(most)}
    return [divisors[place] for place in sorted(places)]


def sample_of(recipe: Recipe, device: torch.device | str = "cpu") -> FlowExample:
    """Return one sample of the shapes that training sees, with random values and a prompt of ordinary length."""
    window, model = window_of(recipe), recipe.model
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator)

    frames = 1 + window.num_blocks * model.latents_per_block
    size = (window.latent_height, window.latent_width)
    actions = window.num_blocks * window.actions_per_block
    batch = Batch(
        latents=drawn(frames, model.latent_channels, *size),
        actions=drawn(actions, model.max_action_dim),
        action_mask=torch.ones(1, actions, model.max_action_dim, dtype=torch.bool),
        state=drawn(window.num_blocks, model.max_state_dim),
        text=drawn(min(REAL_TEXT_TOKENS, recipe.text.max_tokens), model.text_dim),
        condition=drawn(frames, MASK_CHANNELS + model.latent_channels, *size) if model.has_condition else None,
        image=drawn(IMAGE_TOKENS, model.image_dim) if model.has_image else None,
    )
    return on_device(with_noise(batch, generator, recipe.noise), device)


def on_device(example: FlowExample, device: torch.device | str) -> FlowExample:
    """Return an example whose tensors lie on a device."""
    tensors: list[Tensor] = []
    tree = flat(example, tensors)
    return rebuilt(tree, iter([tensor.to(device) for tensor in tensors]))


def network_of(recipe: Recipe, num_blocks: int, *, has_bf16: bool, is_narrow: bool = False) -> nn.Module:
    """Return the recipe's network with so many blocks and random weights, adapters and frozen parameters included.

    ``is_narrow`` makes weights bfloat16 as ``speed.shard.has_bf16_weights`` gathers them.
    """
    kind = PlainWorldActionModel if recipe.speed.is_plain else WorldActionModel
    net = kind(replace(recipe.model, layers=num_blocks))
    if recipe.train.lora is not None:
        if has_bf16:
            narrowed(net, recipe.train.lora)
        with_lora(net, recipe.train.lora)
    freeze(net, recipe.train.frozen)
    if is_narrow:
        kept = {id(p) for module in (net.time_embedding, net.time_projection) for p in module.parameters()}
        for module in net.modules():  # fake parameters cannot be converted in place
            for name, p in list(module.named_parameters(recurse=False)):
                if id(p) not in kept:
                    setattr(module, name, nn.Parameter(p.detach().to(torch.bfloat16), requires_grad=p.requires_grad))
    return net


def loss_of(recipe: Recipe, device_type: str, *, has_bf16: bool) -> Any:
    """Return the loss of a network and an example in the recipe's precision."""

    def loss(net: Any, example: Any) -> Tensor:
        with torch.autocast(device_type, torch.bfloat16, enabled=has_bf16):
            return flow_loss(net, example, recipe.noise).total

    return loss


def trace_recipe(
    recipe: Recipe, sizes: Sequence[int], *, has_bf16: bool, is_narrow: bool = False,
    policies: Sequence[str] = POLICIES,
) -> list[StepMemory]:  # fmt: skip
    """Trace the memory of the whole network on one device, under fake tensors, for some micro-batches.

    The optimiser's state is in it; the average of weights and encoders are not.
    """
    loss, example, train = loss_of(recipe, "cpu", has_bf16=has_bf16), sample_of(recipe), recipe.train
    level_weight(example.seen.video_noise_level, recipe.noise)  # reads its constants once
    make_net = partial(network_of, recipe, has_bf16=has_bf16, is_narrow=is_narrow)
    is_8bit = train.optimizer == "adamw8bit"

    def update(net: nn.Module, optimizer: Optimizer) -> None:
        clip_gradients([p for p in net.parameters() if p.requires_grad], train.max_gradient_norm)
        optimizer.step()

    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        traced = [
            trace_step_memory(
                make_net, loss, example, num_blocks=recipe.model.layers, micro_batch=size, policies=policies,
                caches=CACHES, update=update,
                make_optimizer=None if is_8bit else partial(
                    make_optimizer, config=train, is_fused=recipe.speed.is_optimizer_fused
                ),
            )
            for size in sizes
        ]  # fmt: skip
    finally:
        log.setLevel(level)
    return [replace(one, optimizer=BYTES_8BIT * one.gradients // 4) for one in traced] if is_8bit else traced


def held_bytes(recipe: Recipe, trained_bytes: int | float) -> tuple[int | float, int | float]:
    """Return the bytes beside a step, average of weights and encoders, and those alive while a batch is encoded.

    An autoencoder's peak is taken to be its widest maps of a group of frames, in and out, in bfloat16.
    """
    held = trained_bytes if recipe.train.ema_decay else 0.0
    if recipe.features.mode == "cached":
        return held, 0.0
    weights = sum(cost.weight_bytes for cost in encoder_costs(recipe))
    at_once = recipe.train.batch_size if recipe.speed.is_encode_batched else 1
    robot, settings = recipe.robot, getattr(recipe.video, "settings", None)
    if settings is None:
        return held + weights, 0.0
    maps = settings["base_dim"] * 4 * robot.canvas_height_px * robot.canvas_width_px
    return held + weights, 2.0 * 3 * at_once * maps
