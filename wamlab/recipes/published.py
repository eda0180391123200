"""Recipes at published size, with the hyper-parameters of DreamZero and RLinf; and all recipes by name.

They are data: nothing is read or allocated until a run is built from them. ``train.batch_size`` is that of one process;
an ``8gpu`` recipe's global batch is eight times as large.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wamlab.codec import clip_image, umt5, wan_vae
from wamlab.codec.pretrained import ClipConfig, Umt5Config, WanVaeConfig
from wamlab.data.robot_files import read_robot_file
from wamlab.errors import InputError
from wamlab.model import presets
from wamlab.model.lora import LoraConfig
from wamlab.model.sampler import SamplerConfig
from wamlab.recipes.config import DataConfig, EvaluationConfig, Recipe, tiny, tiny_long, tiny_video
from wamlab.recipes.small import small_5b
from wamlab.train import TrainConfig

WAN_5B = Path("weights/Wan2.2-TI2V-5B")  # folders as they are published
WAN_14B = Path("weights/Wan2.1-I2V-14B-480P")
TEXT_NAME, TOKENIZER_NAME = "models_t5_umt5-xxl-enc-bf16.pth", "google/umt5-xxl"
CLIP_NAME = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
LORA_RATE = 1e-4
# As the reference samples: 8 of 16 steps evaluate the network.
SAMPLER = SamplerConfig(num_steps=16, solver="unipc", num_evaluations=8, guidance_scale=5.0, has_integer_time=True)


def libero_5b_8gpu() -> Recipe:
    """Return the whole Wan2.2-TI2V-5B on LIBERO, 256 samples a step, as RLinf trains it (its steps: 18 000 to 50 000).

    Its canvas of 256 x 512 px is halved to 160 x 320 inside RLinf's model; here each view has its final size at once.
    """
    libero = read_robot_file("libero")
    return Recipe(
        name="libero_5b_8gpu",
        data=DataConfig(root=Path("datasets/libero_spatial"), num_threads=8),
        robot=replace(libero.robot, view_height_px=160, view_width_px=160),
        window=libero.window,
        video=WanVaeConfig(version="2.2", path=WAN_5B / "Wan2.2_VAE.pth"),
        text=Umt5Config(path=WAN_5B / TEXT_NAME, tokenizer=WAN_5B / TOKENIZER_NAME),
        image=ClipConfig(path=WAN_14B / CLIP_NAME),  # Wan2.2-TI2V-5B comes without one
        start=WAN_5B,
        model=presets.wan22_5b(actions_per_block=libero.window.actions_per_block),
        train=TrainConfig(num_steps=50_000, batch_size=32),
        sampler=SAMPLER,
        evaluation=EvaluationConfig(every=1000),
        checkpoint_every=1000,
    )


def libero_5b_1gpu() -> Recipe:
    """Return ``libero_5b_8gpu`` with the same 256 samples a step on one GPU, 32 at a time."""
    recipe = libero_5b_8gpu()
    return replace(recipe, name="libero_5b_1gpu", train=replace(recipe.train, batch_size=256, num_micro_batches=8))


def droid_14b_8gpu() -> Recipe:
    """Return DreamZero-DROID, every weight trained on, a sample a GPU and step, as RLinf does (for 2000 steps)."""
    droid = read_robot_file("droid")
    return _on_bundle(
        Recipe(
            name="droid_14b_8gpu",
            data=DataConfig(root=Path("datasets/droid"), num_threads=4),
            robot=droid.robot,
            window=droid.window,
            video=WanVaeConfig(version="2.1"),
            text=Umt5Config(),
            image=ClipConfig(),
            model=presets.wan21_14b(),
            condition="grey",
            train=TrainConfig(num_steps=2000, batch_size=1),
            sampler=SAMPLER,
            evaluation=EvaluationConfig(every=500),
            checkpoint_every=500,
        ),
        Path("weights/DreamZero-DROID"),
    )


def yam_14b_lora() -> Recipe:
    """Return adapters beside DreamZero-AgiBot for two YAM arms, 4 samples a GPU and step, as in DreamZero's script."""
    recipe, yam = droid_14b_8gpu(), read_robot_file("yam")
    recipe = replace(
        recipe,
        name="yam_14b_lora",
        data=replace(recipe.data, root=Path("datasets/yam")),
        robot=yam.robot,
        window=yam.window,
        train=TrainConfig(num_steps=100_000, batch_size=4, learning_rate=LORA_RATE, lora=LoraConfig()),
        evaluation=EvaluationConfig(every=1000),
        checkpoint_every=1000,
    )
    return _on_bundle(recipe, Path("weights/DreamZero-AgiBot"))


def droid_5b_lora_1gpu() -> Recipe:
    """Return adapters and action modules beside a frozen Wan2.2-TI2V-5B on DROID, for one GPU.

    It has no image path: Wan2.2's checkpoint has none to freeze, and the clean first frame conditions every block.
    """
    droid, recipe = read_robot_file("droid"), libero_5b_8gpu()
    return replace(
        recipe,
        name="droid_5b_lora_1gpu",
        data=DataConfig(root=Path("datasets/droid"), num_threads=8),
        robot=replace(droid.robot, view_height_px=80, view_width_px=160),
        window=droid.window,
        image=None,
        model=presets.wan22_5b(has_image=False),
        train=TrainConfig(num_steps=20_000, batch_size=32, learning_rate=LORA_RATE, lora=LoraConfig()),
    )


def _on_bundle(recipe: Recipe, bundle: Path) -> Recipe:
    """Return a recipe that reads network and encoders from a DreamZero checkpoint; the tokenizer is Wan's."""
    return replace(
        recipe,
        start=bundle,
        video=WanVaeConfig(version="2.1", path=bundle, prefix=wan_vae.DREAMZERO_PREFIX),
        text=Umt5Config(path=bundle, prefix=umt5.DREAMZERO_PREFIX, tokenizer=WAN_14B / TOKENIZER_NAME),
        image=ClipConfig(path=bundle, prefix=clip_image.DREAMZERO_PREFIX),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    recipe.__name__: recipe
    for recipe in (
        tiny, tiny_long, tiny_video, libero_5b_1gpu, libero_5b_8gpu, droid_5b_lora_1gpu, droid_14b_8gpu, yam_14b_lora,
        small_5b,
    )
}  # fmt: skip


def find_recipe(name: str) -> Recipe:
    """Return a recipe by name; an unknown one raises with the nearest name."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(RECIPES)}"
        raise InputError(f'there is no recipe "{name}": {hint}')
    return RECIPES[name]()
