"""Run by test_trick_pairs.py in a process of its own: compilers cannot read functions whose annotations are checked.

Every trick alone, every pair and all of them, with real encoders of tiny random weights, in float32: how far the loss
and the gradients of a step are from those of the official baseline.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from wamlab.data.write import write_dataset
from wamlab.flow import flow_loss
from wamlab.model import presets
from wamlab.recipes.ablate import prepare_features
from wamlab.recipes.ablate_turn import take_turn
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe
from wamlab.recipes.small import small_5b, write_random_encoders
from wamlab.recipes.tricks import TRICKS, Trick, official_baseline, with_tricks
from wamlab.sim.experts import play_episodes
from wamlab.speed.clock import Clock
from wamlab.speed.compile import compiled
from wamlab.speed.config import ShardConfig
from wamlab.speed.ranks import leave_ranks
from wamlab.tensors import whole

LATENTS, TEXT_DIM = 4, 16
VAE = {"base_dim": 4, "decoder_base_dim": 4, "z_dim": LATENTS, "latents_mean": [0.1] * 4, "latents_std": [1.1] * 4}
TEXT = {"vocab_size": 64, "d_model": TEXT_DIM, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
COMPILER = "aot_eager_decomp_partition"  # the compiler's first half; test_compile.py runs the whole
SHARED = Trick("FSDP2", {"speed.shard": None}, {"speed.shard": ShardConfig()})  # of one process, through gloo
SLOW = [
    {"compiled blocks", name} for name in (
        "asynchronous loading", "batched encoding", "no dead encode", "text encoded once", "stored features"
    )
]  # fmt: skip
LEFT_OUT = ("FSDP2 for ZeRO-2 offload", "CUDA graph")  # SHARED in place of the first; the other needs a GPU


def recipe_in(folder: Path) -> Recipe:
    """Write a dataset and encoders; return a recipe of the published form that reads them."""
    recipe = small_5b(folder)
    robot = replace(recipe.robot, view_height_px=32, view_width_px=32)
    write_dataset(play_episodes(("reach",), 2, seed=0, size=(32, 32)), folder / "data", robot_type="tabletop")
    sizes = folder / "vae.json", folder / "text.json"
    for path, values in zip(sizes, (VAE, TEXT), strict=True):
        path.write_text(json.dumps(values))
    write_random_encoders(folder, *sizes)
    window = replace(recipe.window, max_blocks=1)
    return replace(
        recipe,
        data=replace(recipe.data, held_out_fraction=0.0),
        robot=robot,
        window=window,
        video=replace(recipe.video, sizes=sizes[0], dtype="float32"),
        text=replace(recipe.text, sizes=sizes[1], dtype="float32", max_tokens=48),
        model=presets.wan22_5b(
            dim=24, layers=2, heads=2, ffn_dim=32, text_dim=TEXT_DIM, text_len=48, latent_channels=LATENTS,
            has_image=False, actions_per_block=8, max_blocks=1,
        ),
        train=replace(recipe.train, batch_size=2, num_steps=1, has_bf16=False),
    )  # fmt: skip


def gradients(recipe: Recipe) -> tuple[float, list[Tensor]]:
    """Return the loss and all gradients of a recipe's first step."""
    is_compiled = recipe.speed.compile != "off"
    bench = Workbench(replace(recipe, speed=replace(recipe.speed, compile="off")))
    net = compiled(bench.net, backend=COMPILER, is_strict=True) if is_compiled else bench.net
    clock = Clock()
    with closing(bench.examples(clock)) as examples:
        loss = flow_loss(net, next(examples), config=recipe.noise).total
    loss.backward()
    return loss.item(), [whole(p.grad).clone() for p in bench.net.parameters() if p.grad is not None]


def measure(folder: Path) -> dict[str, float]:
    """Return the largest relative difference by what was switched on."""
    recipe = recipe_in(folder)
    tricks = [*(trick for trick in TRICKS if trick.name not in LEFT_OUT), SHARED]
    recipe = with_tricks(recipe, tricks, tricks)
    prepare_features(recipe, tricks, say=lambda words: None)
    recipe = replace(recipe, speed=replace(recipe.speed, shard=None))
    wanted = gradients(official_baseline(recipe, tricks))
    scale = sum(g.square().sum().item() for g in wanted[1]) ** 0.5
    found: dict[str, float] = {}
    chosen: Sequence[tuple[Trick, ...]] = [
        *((trick,) for trick in tricks), *combinations(tricks, 2), tuple(tricks),
    ]  # fmt: skip
    if not os.environ.get("WAMLAB_ALL_PAIRS"):  # two seconds each that change the network's input only
        chosen = [some for some in chosen if {trick.name for trick in some} not in SLOW]
    for some in chosen:
        loss, own = gradients(with_tricks(recipe, some, tricks))
        assert len(own) == len(wanted[1])
        pairs = zip(own, wanted[1], strict=True)
        worst = max(((a - b).norm() / (b.norm() + 1e-3 * scale)).item() for a, b in pairs)
        found[" + ".join(trick.name for trick in some)] = max(abs(loss - wanted[0]) / abs(wanted[0]), worst)
    return found


def compile_rest(folder: Path) -> dict[str, list[float]]:
    """Return the losses of three steps, also with a compiled optimiser and compiled encoders: a minute of compiling."""
    recipe = recipe_in(folder)
    recipe = replace(recipe, train=replace(recipe.train, num_steps=3))
    options = {"none": {}, "optimizer": {"has_compiled_optimizer": True}, "encoders": {"has_compiled_encoders": True}}
    return {
        name: take_turn(Workbench(replace(recipe, speed=replace(recipe.speed, **option))), 1)["losses"]
        for name, option in options.items()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = compile_rest if sys.argv[2:] == ["rest"] else measure
    print(json.dumps(task(Path(sys.argv[1]))))
    leave_ranks()
