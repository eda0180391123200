"""Recipes at published size: their numbers, and the same recipes with everything tiny, trained for two steps."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wamlab.cli import main
from wamlab.codec import clip_image, umt5, wan_vae
from wamlab.codec.clip_image import clip_sources
from wamlab.codec.native_weights import to_native
from wamlab.codec.pretrained import ClipConfig, Umt5Config, WanVaeConfig
from wamlab.codec.umt5 import umt5_sources
from wamlab.codec.wan_vae import wan_vae_sources
from wamlab.data.robot_files import read_robot_file
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.records import plain
from wamlab.lab.run import Run, open_run, read_evaluations, read_metrics
from wamlab.model.key_maps import ACTION_MODULES
from wamlab.model.lora import with_lora
from wamlab.model.sampler import SamplerConfig
from wamlab.model.wam import WorldActionModel
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe, recipe_from_dict
from wamlab.recipes.fit import fit, start_run
from wamlab.recipes.policy import load_policy
from wamlab.recipes.published import RECIPES, find_recipe
from wamlab.recipes.session import begin
from wamlab.sim.experts import play_episodes
from wamlab.types import Observation

SIZES = {  # network, trained
    "libero_5b_1gpu": (5_606_692_832, 5_606_692_832),
    "libero_5b_8gpu": (5_606_692_832, 5_606_692_832),
    "droid_5b_lora_1gpu": (5_044_677_856, 44_890_144),
    "droid_14b_8gpu": (16_484_292_448, 16_484_292_448),
    "yam_14b_lora": (16_503_461_728, 108_582_944),  # 19.2 M in adapters
}


@pytest.mark.parametrize("name", SIZES)
def test_published_recipes_have_the_published_numbers(name: str) -> None:
    """Build the configuration without any weights, and its network without memory (spec 1.1, 5)."""
    recipe = find_recipe(name)
    with torch.device("meta"):
        net = WorldActionModel(recipe.model)
    if recipe.train.lora is not None:
        with_lora(net, recipe.train.lora)
    parameters = list(net.parameters())
    trained = [p for p in parameters if p.requires_grad]
    assert (sum(p.numel() for p in parameters), sum(p.numel() for p in trained)) == SIZES[name]
    train = recipe.train
    assert (train.beta1, train.beta2, train.epsilon, train.weight_decay) == (0.95, 0.999, 1e-8, 1e-5)
    assert (train.warmup_fraction, train.max_gradient_norm) == (0.05, 1.0)
    assert train.learning_rate == (1e-5 if train.lora is None else 1e-4)
    height, width = recipe.robot.canvas_height_px, recipe.robot.canvas_width_px
    tokens = height * width // recipe.patch_px**2
    assert tokens == (880 if "14b" in name else 50)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_comes_back_from_json(name: str) -> None:
    recipe = RECIPES[name]()
    assert recipe.name == name
    assert recipe_from_dict(json.loads(json.dumps(plain(asdict(recipe))))) == recipe


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(play_episodes(("reach",), 4, seed=0, size=32), tmp_path_factory.mktemp("data") / "reach")


def random_weights(recipe: Recipe, is_kept: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    state = WorldActionModel(recipe.model).state_dict()
    drawn = {name: 0.05 * torch.randn(x.shape, generator=generator) for name, x in state.items()}
    return {name: x for name, x in drawn.items() if is_kept(name)}


def shrunk(recipe: Recipe, root: Path, folder: Path, version: str) -> Recipe:
    """Return a recipe with a tiny network, and tiny random encoders of the real libraries in native layout."""
    encoders = pytest.importorskip("test_wan_encoders", reason="the extra wan is not installed")
    torch.manual_seed(0)
    vae, text, image = encoders.tiny_vae(version), encoders.tiny_umt5(), encoders.tiny_clip()
    later = {"decoder_base_dim": 8} if version == "2.2" else {}
    sizes = {"vae": encoders.TINY_VAE | later, "umt5": encoders.TINY_UMT5, "clip": encoders.TINY_CLIP}
    for name, values in sizes.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    encoders.tiny_tokenizer().save_pretrained(str(folder / "tokenizer"))
    natives = {
        wan_vae.DREAMZERO_PREFIX: to_native(vae, wan_vae_sources(vae)),
        umt5.DREAMZERO_PREFIX: to_native(text, umt5_sources(text)),
        clip_image.DREAMZERO_PREFIX: to_native(image, clip_sources(image)),
    }
    bundle = {prefix + key: x.clone() for prefix, tensors in natives.items() for key, x in tensors.items()}
    save_file(bundle, folder / "encoders.safetensors")
    tabletop = read_robot_file("tabletop")
    path = folder / "encoders.safetensors"
    return replace(
        recipe,
        data=replace(recipe.data, root=root, num_threads=0, held_out_fraction=0.25),
        robot=tabletop.robot,
        window=tabletop.window,
        video=WanVaeConfig(version, path, wan_vae.DREAMZERO_PREFIX, folder / "vae.json"),
        text=Umt5Config(path, folder / "tokenizer", umt5.DREAMZERO_PREFIX, folder / "umt5.json", max_tokens=32),
        image=None if recipe.image is None else ClipConfig(path, clip_image.DREAMZERO_PREFIX, folder / "clip.json"),
        model=replace(
            recipe.model, dim=24, layers=2, heads=2, ffn_dim=32, freq_dim=16, mlp_dim=16, latent_channels=2,
            text_dim=16, text_len=32, image_dim=16, latents_per_block=1, actions_per_block=4, max_blocks=2,
            max_action_dim=4, max_state_dim=5,
        ),
        train=replace(recipe.train, num_steps=2, batch_size=2, num_micro_batches=1),
        sampler=SamplerConfig(num_steps=1, guidance_scale=5.0),
        evaluation=replace(recipe.evaluation, num_clips=2, noise_levels=(0.5,)),
        start=folder / "start.safetensors",
    )  # fmt: skip


def written_wan(recipe: Recipe) -> Recipe:
    """Write the recipe's start as Wan publishes 5B: without action modules and without an image path."""
    marks = (*ACTION_MODULES, "img_emb.", "k_img.", "v_img.")
    assert recipe.start is not None
    save_file(random_weights(recipe, lambda name: not any(mark in name for mark in marks)), recipe.start)
    return recipe


def written_bundle(recipe: Recipe) -> Recipe:
    """Write the recipe's start as DreamZero publishes its network."""
    assert recipe.start is not None
    save_file({f"action_head.model.{name}": x for name, x in random_weights(recipe).items()}, recipe.start)
    return recipe


def trained(recipe: Recipe, runs: Path) -> tuple[Workbench, Run]:
    bench = Workbench(recipe)
    with start_run(bench, runs) as run:
        for _ in fit(bench, run):
            pass
    return bench, open_run(run.folder)


def acts(run: Run) -> np.ndarray:
    frames = {name: np.full((1, 64, 64, 3), 90, np.uint8) for name in ("top", "wrist")}
    observed = Observation(frames, np.zeros((1, 5), np.float32), ["pick up the red cube"], np.zeros(1, np.int64))
    return load_policy(run)(observed)


def test_a_5b_recipe_trains_on_published_encoders(dataset: Path, tmp_path: Path) -> None:
    recipe = written_wan(shrunk(find_recipe("libero_5b_1gpu"), dataset, tmp_path, "2.2"))
    bench, run = trained(recipe, tmp_path / "runs")
    assert [np.isfinite(record["loss"]) for record in read_metrics(run)[0]] == [True, True]
    assert np.isfinite(read_evaluations(run)[-1]["held_out_loss"])
    assert {"image encoder", "start weights"} <= run.environment["fingerprints"].keys()
    assert recipe_from_dict(run.config) == recipe
    start = random_weights(recipe)["blocks.0.ffn.0.weight"]
    moved = (bench.net.state_dict()["blocks.0.ffn.0.weight"] - start).abs().max()
    assert 0 < moved < 1e-3
    assert recipe.start is not None
    recipe.start.unlink()  # a policy needs no start once every weight was trained
    assert acts(run).shape == (1, 4, 4)


def test_image_tokens_reach_training_and_sampling(dataset: Path, tmp_path: Path) -> None:
    bench = Workbench(written_wan(shrunk(find_recipe("libero_5b_8gpu"), dataset, tmp_path, "2.2")))
    clips = [bench.readers[0].read(index, seed=0) for index in (0, 20)]
    batch = bench.encoder(clips)
    assert batch.image is not None
    assert batch.image.shape == (2, 5, 16)
    assert not torch.equal(batch.image[0], batch.image[1])
    frames = torch.from_numpy(np.stack([clip.frames[0] for clip in clips]))
    tokens = bench.encoder.encode_image(frames)
    assert tokens is not None
    assert torch.equal(batch.image, tokens)
    session = begin(bench, frames, ["a", "b"])
    without = bench.net.start(bench.encoder.encode_text(["a", "b"]))
    tensors = [
        [x for x in vars(cross).values() if isinstance(x, Tensor)]
        for cross in (session.history.cross[0], without.cross[0])
    ]
    assert len(tensors[0]) > len(tensors[1])


def test_a_14b_recipe_trains_grey_conditioned_from_one_bundle(dataset: Path, tmp_path: Path) -> None:
    recipe = written_bundle(shrunk(find_recipe("droid_14b_8gpu"), dataset, tmp_path, "2.1"))
    assert recipe.condition == "grey"
    bench, run = trained(recipe, tmp_path / "runs")
    assert all(np.isfinite(record["loss"]) for record in read_metrics(run)[0])
    batch = bench.encoder([bench.readers[0].read(0, seed=0)])
    assert batch.condition is not None
    assert batch.condition.shape[2] == 4 + 2
    assert acts(run).shape == (1, 4, 4)


def test_an_adapter_run_stores_adapters_only_and_resumes_bit_for_bit(dataset: Path, tmp_path: Path) -> None:
    recipe = written_bundle(shrunk(find_recipe("yam_14b_lora"), dataset, tmp_path, "2.1"))
    recipe = replace(recipe, train=replace(recipe.train, num_steps=4, ema_decay=0.9), checkpoint_every=2)
    _, whole = trained(recipe, tmp_path / "whole")
    bench = Workbench(recipe)
    with pytest.raises(KeyboardInterrupt), start_run(bench, tmp_path / "runs") as run:
        for record in fit(bench, run):
            if record.step == 3:
                raise KeyboardInterrupt
    bench = Workbench(recipe)
    with start_run(bench, tmp_path / "runs", is_resumed=True) as run:
        assert [record.step for record in fit(bench, run)] == [3, 4]
    files = [of.checkpoints / "step_00000004" / "model.safetensors" for of in (whole, run)]
    assert files[0].read_bytes() == files[1].read_bytes()
    stored = load_file(files[0])
    assert stored.keys() == {n for n, p in bench.net.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in stored if "blocks" in name} == {"lora_A", "lora_B"}
    assert load_file(files[0].with_name("ema.safetensors")).keys() == stored.keys()
    np.testing.assert_array_equal(acts(whole), acts(run))
    assert recipe.start is not None
    other = {n: x + 1e-2 for n, x in random_weights(recipe).items()}
    save_file({f"action_head.model.{name}": x for name, x in other.items()}, recipe.start)
    with pytest.raises(InputError, match="was trained beside the frozen weights"):
        load_policy(run)


def test_a_missing_path_is_one_sentence(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "droid_5b_lora_1gpu", "--robot-file", "tabletop", "--data.root", str(dataset)]
    words += ["--runs", str(tmp_path / "runs"), "--video.path", str(tmp_path / "vae.pth"), "--device", "cpu"]
    assert main(words) == 2
    message = capsys.readouterr().err.strip()
    assert str(tmp_path / "vae.pth") in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
    with pytest.raises(InputError, match=r'video.version is "3"'):
        WanVaeConfig(version="3")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        _ = Umt5Config(sizes=tmp_path / "none.json").dim


def test_the_command_inspects_and_converts_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = find_recipe("tiny")
    source = tmp_path / "start.safetensors"
    save_file(random_weights(recipe), source)
    assert main(["weights", "inspect", str(source)]) == 0
    told = capsys.readouterr().out
    assert "layout wamlab" in told
    words = ["weights", "convert", str(source), str(tmp_path / "there"), "--layout", "diffusers"]
    assert main([*words, "--dtype", "bfloat16"]) == 0
    assert "as diffusers" in capsys.readouterr().out
    assert main(["weights", "inspect", str(tmp_path / "there")]) == 0
    again = capsys.readouterr().out
    assert "layout diffusers" in again
    assert "BF16" in again
    assert again.splitlines()[-1] == told.splitlines()[-1]  # the fingerprint outlives layout and type
    assert main(["weights", "inspect", str(tmp_path / "nothing")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert main(["weights", "convrt"]) == 2
    assert 'did you mean "weights convert"?' in capsys.readouterr().err
