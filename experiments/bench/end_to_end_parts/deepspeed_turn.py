"""A turn of DeepSpeed itself: DreamZero's optimiser stack around the official baseline's network, data and encoders.

ZeRO-2 with Adam on the host, no overlap, bfloat16 weights with float32 masters: what DreamZero's scripts configure.
Run by a Python that has both packages; what it prints and writes is as ``wamlab.recipes.ablate_turn`` does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from wamlab.errors import InputError
from wamlab.flow import flow_loss
from wamlab.lab.lifeline import hold_lifeline
from wamlab.lab.records import read_json, write_json
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import recipe_from_dict
from wamlab.recipes.network import build_net
from wamlab.speed.clock import Clock
from wamlab.speed.ranks import Ranks, join_ranks, leave_ranks
from wamlab.train import autocast, cosine_rate, has_native_bf16, make_optimizer


def settings_of(bench: Workbench) -> dict[str, Any]:
    """Return DeepSpeed's settings for a recipe; raises InputError for an optimiser that is not its Adam."""
    config = bench.recipe.train
    if config.optimizer != "adamw":
        raise InputError(f'DeepSpeed\'s Adam stands beside train.optimizer "adamw", not "{config.optimizer}"')
    adam = {"lr": config.learning_rate, "betas": [config.beta1, config.beta2], "eps": config.epsilon}
    return {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.num_micro_batches,
        "gradient_clipping": config.max_gradient_norm,
        "optimizer": {"type": "AdamW", "params": adam},
        "bf16": {"enabled": config.has_bf16 and has_native_bf16(bench.device)},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": bench.device.type == "cuda"},
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": 100_000_000,
        },
        "steps_per_print": 10**9,
    }


def losses_of(bench: Workbench) -> Iterator[float]:
    """Take the recipe's steps; yield each one's loss, over all processes."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    recipe, ranks = bench.recipe, bench.ranks
    net = build_net(replace(recipe, speed=replace(recipe.speed, shard=None)), bench.device, Ranks())
    groups = [
        {name: group[name] for name in ("params", "weight_decay")}
        for group in make_optimizer(net, recipe.train).param_groups
    ]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=settings_of(bench))
    examples = bench.examples(Clock(bench.device))
    with closing(examples):
        for step, example in enumerate(islice(examples, recipe.train.num_steps), 1):
            for group in engine.optimizer.param_groups:
                group["lr"] = cosine_rate(step, recipe.train)
            with autocast(bench.device, has_bf16=recipe.train.has_bf16):
                terms = flow_loss(engine, example, recipe.noise)
            engine.backward(terms.total)
            engine.step()
            yield ranks.mean(terms.total.detach().float()).item()


def main(words: Sequence[str]) -> int:
    """Read a recipe, take its turn, write the result: CONFIG RESULT NUM_WARMUP."""
    hold_lifeline(grace_s=0.0)
    config, result, num_warmup = words
    bench = Workbench(recipe_from_dict(read_json(Path(config))))
    if bench.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    join_ranks(bench.ranks, bench.device)
    start_s, steps = time.perf_counter(), losses_of(bench)
    losses = list(islice(steps, int(num_warmup)))
    warm_s, cpu_start_s = time.perf_counter(), time.process_time()
    measured = list(steps)
    cpu_s = torch.tensor((time.process_time() - cpu_start_s) / len(measured))
    turn = {
        "step_s": (time.perf_counter() - warm_s) / len(measured),
        "cpu_s": bench.ranks.mean(cpu_s).item() * bench.ranks.world_size,
        "warmup_s": warm_s - start_s,
        "losses": losses + measured,
    }
    if bench.ranks.is_first:
        write_json(Path(result), turn)
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
