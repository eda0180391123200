"""How much memory of one device a recipe takes with a method, and how many blocks must forget their activations."""

from __future__ import annotations

from dataclasses import dataclass

from wamlab.codec.flops import EncoderCost
from wamlab.model.flops import NetworkFlops
from wamlab.recipes.config import Recipe
from wamlab.recipes.methods import Method

RESERVED_GIB = 8.0  # context, libraries, fragments, the collectives' own buffers
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Predicted GiB of one device at its peak."""

    parameters: int | float
    gradients: int | float
    optimizer: int | float
    unsharded: int | float  # units whose parameters and gradients are whole at a time
    activations: int | float
    encoders: int | float

    @property
    def total(self) -> float:
        return sum(vars(self).values()) + RESERVED_GIB


def choose_recompute(
    recipe: Recipe, method: Method, num_devices: int, size: int, flops: NetworkFlops, num_parameters: int,
    trained: int, costs: tuple[EncoderCost, ...], limit_gib: int | float,
) -> tuple[int, Memory]:  # fmt: skip
    """Return how many blocks are recomputed, and the memory that needs; "fit" takes the fewest that fit."""

    def memory(num_recomputed: int) -> Memory:
        return predict_memory(
            recipe, method, num_devices, size, flops.tokens, num_parameters, trained, costs, num_recomputed
        )

    layers = recipe.model.layers
    if method.recompute != "fit":
        number = layers if method.recompute == "all" else 0
        return number, memory(number)
    for number in range(layers + 1):
        if (found := memory(number)).total <= limit_gib:
            return number, found
    return layers, memory(layers)


def predict_memory(
    recipe: Recipe, method: Method, num_devices: int, size: int, tokens: int, num_parameters: int, trained: int,
    costs: tuple[EncoderCost, ...], num_recomputed: int,
) -> Memory:  # fmt: skip
    """Predict one device's memory.

    A block that keeps its activations holds 19.5 + 2.4 x feed-forward / width passes over its tokens: two figures of
    ``FSDPMemTracker`` on fake ranks of the published networks, 3.96 and 5.6 GiB a block.
    """
    model, parts = recipe.model, num_devices
    pass_gib = 2.0 * size * tokens * model.dim / GIB
    kept = (19.5 + 2.4 * model.ffn_dim / model.dim) * pass_gib
    working = kept * (2.0 if method.is_published_network else 1.0)  # the block at work; eager float32 copies
    activations = num_recomputed * pass_gib + (model.layers - num_recomputed) * kept + working
    block = (num_parameters / model.layers) * 2.0 / GIB
    shard = parts if method.sharding != "none" else 1
    if method.sharding == "fsdp2":
        weights = 4.0 * trained + 2.0 * (num_parameters - trained)  # frozen ones stay in bf16
        parameters, gradients = weights / parts / GIB, 4.0 * trained / parts / GIB
        unsharded = 3 * block
    else:
        parameters, gradients = (
            2.0 * num_parameters / GIB,
            (2.0 if method.is_host_optimizer else 4.0) * trained / shard / GIB,
        )
        unsharded = 4 * 1e8 * 2 / GIB
    optimizer = 0.0 if method.is_host_optimizer else 8.0 * trained / shard / GIB
    held = tuple(c for c, skipped in zip(costs, (False, method.has_text_cache, False), strict=True) if not skipped)
    encoders = 0.0 if method.has_features else sum(cost.weight_bytes for cost in held) / GIB
    if method.has_sharded_encoders:
        encoders /= parts / 2  # kept in float32, in parts
    return Memory(parameters, gradients, optimizer, unsharded, activations, encoders)
