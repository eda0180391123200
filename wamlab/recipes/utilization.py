"""What a run's steps use of its devices: the figures beside every step in ``metrics.jsonl``."""

from __future__ import annotations

import torch

from wamlab.recipes.build import Workbench
from wamlab.recipes.plan import encoder_costs, network_flops
from wamlab.speed.peaks import measure_matmul_peak, peak_of
from wamlab.speed.recompute import plan_of
from wamlab.speed.utilization import Utilization
from wamlab.train import has_native_bf16


def utilization_of(bench: Workbench) -> Utilization:
    """Return what a sample of this run costs, against the device's published peak, or one measured here.

    MFU counts the operations of the published form of the network, whatever this run saves of them, so that it
    compares with others and rises with every saving; HFU counts what is really computed. Where the device has no
    known peak, square products are timed for a fifth of a second.
    """
    recipe, num_devices = bench.recipe, bench.ranks.world_size
    published = network_flops(recipe, is_published=True)
    own = published if recipe.speed.is_plain else network_flops(recipe, is_published=False)
    num_recomputed = plan_of(bench.net).count("full")  # of a tuned run: as it begins
    frozen = recipe.train.lora is not None
    executed = own.executed(num_recomputed, has_frozen_weights=frozen)
    if recipe.features.mode == "online":
        video, text, image = encoder_costs(recipe)  # every instruction is encoded once in a run
        num_passes = 1 + (recipe.condition != "none" or recipe.speed.has_dead_encode)
        executed += num_passes * video.flops + image.flops + (not recipe.speed.has_text_cache) * text.flops
    model = published.executed(has_frozen_weights=frozen)
    peak = peak_of(bench.device)
    if peak is not None and recipe.train.has_bf16:
        return Utilization(
            model, executed, own.tokens, peak.bf16_tflops * 1e12, num_devices, f"{peak.name}, {peak.source}"
        )
    is_bf16 = recipe.train.has_bf16 and has_native_bf16(bench.device)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    measured = measure_matmul_peak(bench.device, dtype)
    return Utilization(model, executed, own.tokens, measured, num_devices, f"{dtype} products measured here")
