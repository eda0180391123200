"""A 5 B run in small: every part real, each of a size in proportion to its operations, so that a CPU can compare.

The published network computes 30.2 TFLOP a sample forward and backward, its autoencoder 6.0 a pass, its text encoder
4.8 at 512 tokens. Here these are 0.27, 0.060 and 0.044. Random weights cost what trained ones do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from wamlab.codec.native_weights import import_library, to_native
from wamlab.codec.pretrained import Umt5Config, WanVaeConfig
from wamlab.codec.umt5 import umt5_sources
from wamlab.codec.wan_vae import VERSIONS, wan_vae_sources
from wamlab.data.robot import RobotConfig
from wamlab.data.windows import WindowConfig
from wamlab.data.write import write_dataset
from wamlab.model import presets
from wamlab.recipes.config import DataConfig, EvaluationConfig, FeatureConfig, Recipe
from wamlab.sim.experts import Style, play_episodes
from wamlab.train import TrainConfig, has_native_bf16

CODEC = Path(__file__).parents[1] / "codec"
HOME = Path("datasets/small_5b")
SIDE_PX = 160  # of each of two cameras
VAE_SIZES, TEXT_SIZES = (CODEC / f"small_{name}.json" for name in ("vae", "umt5"))
NUM_EPISODES, TAIL_TICKS = 4, 24
PROMPT = (  # as long as published ones
    "A multi-view video shows that a robot {task}. The video is split into two views: the left view shows the exterior "
    "camera, the right view the wrist camera. The robot {task}"
)
WORDS = ["move", "the", "gripper", "to", "red", "green", "blue", "cube", "ball", "block"]


def small_5b(home: Path = HOME) -> Recipe:
    """Return Wan2.2-5B's shape at a width of 384: 1,000 tokens a sample, two cameras of 160 px, 33 frames.

    ``make_small_5b`` writes what it reads: a dataset, and random encoders of the real libraries. These compute in bf16
    where this machine does; elsewhere that would take 90 times as long as float32.
    """
    dtype = "bfloat16" if has_native_bf16("cuda" if torch.cuda.is_available() else "cpu") else "float32"
    window = WindowConfig(frame_stride=1, latents_per_block=2, actions_per_block=8, max_blocks=4)
    return Recipe(
        name="small_5b",
        data=DataConfig(root=home / "data", held_out_fraction=0.25, cache_gib=0.0),
        robot=RobotConfig(
            cameras=("top", "wrist"), layout="row", view_height_px=SIDE_PX, view_width_px=SIDE_PX,
            crop_fraction=1.0, has_color_jitter=False, max_action_dim=32, max_state_dim=64, prompt=PROMPT,
        ),
        window=window,
        video=WanVaeConfig("2.2", home / "vae.safetensors", sizes=VAE_SIZES, dtype=dtype),
        text=Umt5Config(home / "text.safetensors", home / "tokenizer", sizes=TEXT_SIZES, dtype=dtype),
        model=presets.wan22_5b(
            dim=384, layers=16, heads=6, ffn_dim=1792, text_dim=512, has_image=False,
            actions_per_block=8, max_blocks=4,
        ),
        train=TrainConfig(num_steps=1000, batch_size=4, learning_rate=1e-3, warmup_fraction=0.001),
        evaluation=EvaluationConfig(every=1000, num_clips=2),
        features=FeatureConfig(root=home / "features", num_variants=1),
    )  # fmt: skip


def make_small_5b(home: Path = HOME) -> None:
    """Write the dataset and the random encoders that ``small_5b`` reads, unless they are there; needs the extra wan."""
    if (home / "vae.safetensors").exists():
        return
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "data").exists():
        style = Style(tail_ticks=TAIL_TICKS)
        episodes = play_episodes(("reach",), NUM_EPISODES, seed=0, style=style, size=(SIDE_PX, SIDE_PX))
        write_dataset(episodes, home / "data", robot_type="tabletop")
    write_random_encoders(home, VAE_SIZES, TEXT_SIZES)


def write_random_encoders(home: Path, vae_sizes: Path, text_sizes: Path) -> None:
    """Write ``vae.safetensors``, ``text.safetensors`` and a tokenizer of the real libraries, of sizes from JSON files.

    The weights are random, the same for the same sizes; needs the extra wan.
    """
    _write_tokenizer(home / "tokenizer")
    torch.manual_seed(0)
    transformers, diffusers = import_library("transformers"), import_library("diffusers")
    text = transformers.UMT5EncoderModel(transformers.UMT5Config(**json.loads(text_sizes.read_text("utf-8"))))
    vae = diffusers.AutoencoderKLWan(**(VERSIONS["2.2"] | json.loads(vae_sizes.read_text("utf-8"))))
    for name, module, sources in (("text", text, umt5_sources(text)), ("vae", vae, wan_vae_sources(vae))):
        tensors = {key: tensor.clone().contiguous() for key, tensor in to_native(module, sources).items()}
        partial = home / f"{name}.partial"
        save_file(tensors, partial)
        partial.rename(home / f"{name}.safetensors")


def _write_tokenizer(folder: Path) -> None:
    tokenizers: Any = import_library("tokenizers")
    places = {token: place for place, token in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(places, unk_token="<unk>"))  # nosec B106
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", places["</s>"])]
    )
    kind = import_library("transformers").PreTrainedTokenizerFast
    kind(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>").save_pretrained(  # nosec B106
        str(folder)
    )
