"""How long every block takes under every policy on devices that are not here: the roofline of ``wamlab plan``."""

from __future__ import annotations

from collections.abc import Sequence

from wamlab.model.flops import NetworkFlops
from wamlab.recipes.config import Recipe
from wamlab.recipes.methods import METHODS, Method
from wamlab.recipes.plan import _encode_phases, count_parameters_once, encoder_costs, network_flops
from wamlab.speed.activation_memory import StepMemory
from wamlab.speed.peaks import DevicePeak
from wamlab.speed.recompute_plan import POLICIES
from wamlab.speed.roofline import Achieved, Limits, Phase, time_collective, time_device_optimizer, time_phase
from wamlab.speed.step_time import BlockTime, MicroBatchTime

NUM_MAPS = 14  # products of a block


def method_of(recipe: Recipe) -> Method:
    """Return how a recipe is trained, among the ways that the roofline knows."""
    name = "wamlab" if recipe.speed.compile == "blocks" else "wamlab-eager"
    return METHODS["wamlab-cached" if recipe.features.mode == "cached" and name == "wamlab" else name]


def predict_times(
    recipe: Recipe, memory: StepMemory, num_devices: int, peak: DevicePeak, policies: Sequence[str] = POLICIES
) -> MicroBatchTime:
    """Predict what one micro-batch takes; ``memory`` says what offloading moves.

    Of the messages of sharing a block hides as many as it computes: each block lasts as long as the slower of both.
    What is read back from the host is fetched beside the backward pass of the block after it.
    """
    size, model, achieved = memory.micro_batch, recipe.model, Achieved()
    method, limits = method_of(recipe), Limits.of(num_devices, peak)
    flops = network_flops(recipe, is_published=False)
    num_parameters = count_parameters_once(model)
    is_lora = recipe.train.lora is not None
    trained = max(1, num_parameters // 100) if is_lora else num_parameters
    is_narrow = recipe.speed.shard is not None and recipe.speed.shard.has_bf16_weights
    block_bytes = (2.0 if is_narrow else 4.0) * num_parameters / model.layers
    gather_s = time_collective(block_bytes, limits, achieved) if num_devices > 1 else 0.0
    reduce_s = gather_s * 4.0 * trained / (num_parameters * (2.0 if is_narrow else 4.0))  # sums are float32
    moved = memory.first.forward["keep"].change - memory.first.forward["full"].change
    copy_s = moved / (achieved.host_link_gb_s * 1e9)

    def seconds(
        name: str, factor: int | float, kernels: int, passes: int | float, *, is_last: bool, parts: int | float = 1.0
    ) -> float:
        """Return a pass of one block; ``parts`` of its products are done."""
        return time_phase(
            _block_phase(name, flops, method, size, model.dim, factor, kernels, passes, is_last=is_last, parts=parts),
            limits, achieved,
        ).seconds  # fmt: skip

    def times(*, is_last: bool) -> dict[str, BlockTime]:
        code = method.block
        forward_s = seconds("forward", 1.0, code.forward_kernels, code.forward_passes, is_last=is_last)
        backward_s = seconds(
            "backward", 1.0 if is_lora else 2.0, code.backward_kernels, code.backward_passes, is_last=is_last
        )
        attention_s = _attention_s(flops, size, limits, achieved, is_last=is_last)
        products = seconds("again", 1.0, code.forward_kernels, code.forward_passes, is_last=is_last, parts=0.0)
        again = {"keep": 0.0, "full": forward_s, "attention": forward_s - attention_s, "matmuls": products}
        found = {}
        for policy in policies:
            ahead, behind = forward_s, backward_s
            if policy == "offload":
                ahead, behind = max(forward_s, copy_s), max(backward_s, copy_s)
            extra = again.get(policy, 0.0)
            whole_ahead = max(ahead, gather_s)
            whole_behind = max(behind + extra, gather_s + reduce_s)
            found[policy] = BlockTime(whole_ahead, extra, whole_behind - extra)
        return found

    return MicroBatchTime(
        size, model.layers, _rest_s(recipe, flops, method, size, limits, achieved),
        _update_s(recipe, method, trained / num_devices, limits, achieved) + gather_s + reduce_s,
        times(is_last=False), times(is_last=True),
    )  # fmt: skip


def _block_phase(
    name: str, flops: NetworkFlops, method: Method, size: int, dim: int, factor: int | float, kernels: int,
    passes: int | float, *, is_last: bool, parts: int | float,
) -> Phase:  # fmt: skip
    saved_attention = flops.saved_last * flops.block_attention / flops.block if is_last else 0.0
    saved = flops.saved_last - saved_attention if is_last else 0.0
    return Phase(
        name,
        matmul_flops=parts * size * factor * (flops.block_linear - saved),
        num_matmuls=factor * NUM_MAPS,
        attention_flops=parts * size * factor * (flops.block_attention - saved_attention),
        bytes_moved=passes * 2.0 * size * flops.tokens * dim,
        launches=0 if method.block.is_graph else kernels,
        graph_launches=kernels if method.block.is_graph else 0,
        is_serial=method.is_serial,
    )


def _attention_s(flops: NetworkFlops, size: int, limits: Limits, achieved: Achieved, *, is_last: bool) -> float:
    saved = flops.saved_last * flops.block_attention / flops.block if is_last else 0.0
    return size * (flops.block_attention - saved) / (achieved.attention * limits.flops)


def _rest_s(
    recipe: Recipe, flops: NetworkFlops, method: Method, size: int, limits: Limits, achieved: Achieved
) -> float:
    phase = Phase("outside", matmul_flops=3 * size * flops.outside, num_matmuls=60, graph_launches=200)
    return time_phase(phase, limits, achieved).seconds


def _update_s(recipe: Recipe, method: Method, trained: int | float, limits: Limits, achieved: Achieved) -> float:
    phases = _encode_phases(recipe, method, recipe.train.batch_size, encoder_costs(recipe))
    encode_s = sum(time_phase(phase, limits, achieved).seconds for phase in phases)
    optimizer_s = time_device_optimizer(trained, limits, achieved, is_fused=recipe.speed.is_optimizer_fused)
    return encode_s + optimizer_s
