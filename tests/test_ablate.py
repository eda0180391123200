"""Tricks one by one: what each switches, that none changes a loss, and an ablation from beginning to end."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wamlab.cli import main
from wamlab.codec.clips import ClipEncoder
from wamlab.codec.plain import PlainClipEncoder
from wamlab.codec.text import HashTextEncoder
from wamlab.codec.video import DctCodec, to_video
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.ablation import FULL, OFFICIAL, ablation_table, factors, read_ablation, write_figures
from wamlab.recipes.ablate import AblationConfig, judge_losses, list_variants, run_turn
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe, tiny
from wamlab.recipes.small import make_small_5b, small_5b
from wamlab.recipes.tricks import TRICKS, choose_tricks, find_tricks, fsdp2_base, official_baseline, with_tricks
from wamlab.sim.experts import play_episodes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(play_episodes(("reach",), 3, seed=0, size=64), tmp_path_factory.mktemp("data") / "reach")


def small(dataset: Path) -> Recipe:
    """Return a network of the published form on the embedded codec: what a machine without the extra wan can run."""
    recipe = tiny()
    model = replace(recipe.model, dim=24, layers=2, heads=2, ffn_dim=32, video_spread=0.0, position_scale=0.0)
    model = replace(model, drops_noisy_first=False)
    return replace(
        recipe,
        data=replace(recipe.data, root=dataset, held_out_fraction=0.34),
        model=model,
        train=replace(recipe.train, batch_size=2, num_steps=3),
        features=replace(recipe.features, num_variants=1, root=dataset.parent / "features"),
    )


def test_baselines_lack_what_they_are_said_to_lack() -> None:
    official, base = official_baseline(small_5b()).speed, fsdp2_base(small_5b())
    assert (official.is_plain, official.recompute, official.compile) == (True, "all", "off")
    assert (official.is_encode_batched, official.has_dead_encode, official.has_text_cache) == (False, True, False)
    assert official.shard is not None
    assert (official.shard.units, official.shard.is_offloaded) == ("whole", True)
    assert official_baseline(small_5b()).data.num_threads == 0
    assert (base.speed.shard, base.speed.is_plain, base.speed.is_optimizer_fused) == (None, True, False)
    assert base.data.num_threads == 1


def test_all_tricks_are_the_recipe_with_each_switched_on_and_its_own_choices_kept() -> None:
    recipe = replace(small_5b(), data=replace(small_5b().data, num_threads=3))
    full = with_tricks(recipe, TRICKS)
    assert full.data.num_threads == 3
    assert full.speed.compile == "blocks"
    assert full.features.mode == "cached"
    assert with_tricks(full, ()) == official_baseline(recipe)


def test_each_step_of_the_chain_switches_one_trick() -> None:
    recipe = small_5b()
    tricks, left_out = choose_tricks(recipe, CPU)
    assert set(left_out) == {"FSDP2 for ZeRO-2 offload", "CUDA graph"}
    variants = list_variants(recipe, tricks, AblationConfig())
    assert len(variants) == 1 + 1 + len(tricks) + len(tricks) - 1
    names = [OFFICIAL, *(f"+ {trick.name}" for trick in tricks[:-1]), FULL]
    for before, after, trick in zip(names[:-1], names[1:], tricks, strict=True):
        assert (
            with_tricks(variants[after], [t for t in tricks if f"{t.name}" in _names_of(names, before)], tricks)
            == (variants[before])
        )
        assert variants[before] != variants[after], trick.name


def _names_of(names: list[str], until: str) -> set[str]:
    return {name.removeprefix("+ ") for name in names[1 : names.index(until) + 1]}


def test_tricks_without_effect_are_left_out_with_the_reason(dataset: Path) -> None:
    _, left_out = choose_tricks(tiny(), CPU)
    assert left_out["lean network"] == "the recipe's network has no published form"
    assert left_out["batched encoding"] == "the embedded codec has nothing to save"
    assert "FSDP2 for ZeRO-2 offload" not in choose_tricks(tiny(), CPU, 2)[1]
    with pytest.raises(InputError, match='did you mean "compiled blocks"'):
        find_tricks(["compiled block"])


def test_the_plain_encoder_makes_the_same_features_by_more_passes() -> None:
    class Counting(DctCodec):
        num_passes = num_clips = 0

        def encode_video(self, video: torch.Tensor) -> torch.Tensor:
            self.num_passes += 1
            self.num_clips += len(video)
            return super().encode_video(video)

        def encode(self, frames: torch.Tensor) -> torch.Tensor:
            return self.encode_video(to_video(frames))

    frames = torch.randint(0, 256, (3, 5, 32, 32, 3), dtype=torch.uint8)
    counts, found = {}, {}
    for name, kind in (("ours", ClipEncoder), ("plain", PlainClipEncoder)):
        codec = Counting()
        found[name] = kind(codec, HashTextEncoder()).encode_window(frames)["latents"]
        counts[name] = (codec.num_passes, codec.num_clips)
    assert counts == {"ours": (1, 3), "plain": (6, 6)}
    torch.testing.assert_close(found["ours"], found["plain"], rtol=1e-6, atol=1e-6)


def test_the_small_5b_has_real_encoders_in_proportion_and_every_waste_gives_the_same_batch(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="the extra wan is not installed: pip install -e '.[wan]'")
    pytest.importorskip("transformers", reason="the extra wan is not installed: pip install -e '.[wan]'")
    from wamlab.recipes.plan import encoder_costs, network_flops

    recipe = small_5b()
    network = network_flops(recipe, is_published=True).executed()
    make_small_5b(tmp_path / "home")
    recipe = small_5b(tmp_path / "home")
    video, text, _ = encoder_costs(recipe)
    assert video.flops / network == pytest.approx(6.0 / 30.2, rel=0.15)
    assert text.flops / network == pytest.approx(4.8 / 30.2, rel=0.15)
    lean, wasteful = Workbench(recipe), Workbench(official_baseline(recipe))
    clips = [lean.source[0].read(index, 0) for index in (0, 9)]
    batches = [bench.encoder(clips) for bench in (lean, wasteful)]
    text_len = batches[0].text.shape[1]
    assert batches[1].text.shape[1] <= recipe.text.max_tokens
    torch.testing.assert_close(batches[0].latents, batches[1].latents, rtol=2e-2, atol=2e-2)  # bf16
    torch.testing.assert_close(batches[0].text, batches[1].text[:, :text_len], rtol=5e-2, atol=5e-2)
    assert not batches[1].text[:, text_len:].any()


def test_an_ablation_runs_to_its_table_and_goes_on_where_it_was(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "ablation"
    words = ["ablate", "tiny", "--data.root", str(dataset), "--train.batch-size", "2", "--folder", str(folder)]
    words += ["--data.held-out-fraction", "0.34", "--features.root", str(tmp_path / "features"), "--rounds", "1"]
    words += ["--tricks", "asynchronous loading", "stored features", "--steps", "2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "without lean network: the recipe's network has no published form" in said
    result = read_ablation(folder)
    assert [len(turns) for turns in result["turns"].values()] == [1] * 5
    assert not result["failures"]
    rows = {row["variant"]: row for row in ablation_table(result)}
    assert all(row["loss differs by"] < 1e-5 for row in rows.values())  # float32
    assert {row["quality"] for row in rows.values()} == {"equivalent"}
    assert set(factors(result)) == {"asynchronous loading", "stored features"}
    assert all(value is not None for both in factors(result).values() for value in both.values())
    assert "plotly" in write_figures(folder).read_text("utf-8").lower()
    before = json.loads((folder / "ablation.json").read_text())["turns"]
    assert main(words) == 0
    assert read_ablation(folder)["turns"] == before
    assert main([*words, "--train.seed", "1"]) == 2
    assert "other variants" in capsys.readouterr().err


def test_losses_are_judged_against_the_official_ones_within_a_margin() -> None:
    losses = [3.0, 2.5, 2.7, 2.2]
    turns = {
        "official baseline": [{"losses": losses}],
        "rounds otherwise": [{"losses": [loss * (1 + 1e-6 * (-1) ** i) for i, loss in enumerate(losses)]}],
        "learns worse": [{"losses": [1.05 * loss for loss in losses]}],
        "wavers": [{"losses": [3.2, 2.3, 2.9, 2.1]}],
        "has no turn yet": [],
        "explodes": [{"losses": [3.0, float("nan"), 2.7, 2.2]}],
    }
    found = judge_losses(turns)
    assert list(found.values()) == ["equivalent", "equivalent", "different", "not enough evidence", "different"]
    assert judge_losses({"official baseline": []}) == {}


def test_a_turn_that_fails_says_why(dataset: Path, tmp_path: Path) -> None:
    recipe = small(dataset)
    with pytest.raises(RuntimeError, match="nowhere"):
        run_turn(replace(recipe, data=replace(recipe.data, root=Path("datasets/nowhere"))), tmp_path)


def test_every_trick_and_all_together_train_to_the_same_losses(dataset: Path, tmp_path: Path) -> None:
    from wamlab.recipes.ablate import prepare_features
    from wamlab.recipes.ablate_turn import take_turn

    recipe = small(dataset)
    tricks = [trick for trick in choose_tricks(recipe, CPU)[0] if trick.name != "compiled blocks"]  # test_compile
    prepare_features(with_tricks(recipe, tricks, tricks), tricks, say=lambda words: None)
    wanted = take_turn(Workbench(official_baseline(recipe, tricks)), 1)["losses"]
    for number, trick in enumerate(tricks):
        for chosen in ([trick], tricks, [t for i, t in enumerate(tricks) if i != number]):
            losses = take_turn(Workbench(with_tricks(recipe, chosen, tricks)), 1)["losses"]
            assert losses == pytest.approx(wanted, rel=1e-5), [t.name for t in chosen]


@pytest.mark.skipif(
    "WAMLAB_DEEPSPEED_PYTHON" not in os.environ,
    reason="DeepSpeed has an environment of its own: python -m venv V && V/bin/pip install -e . deepspeed; "
    "export WAMLAB_DEEPSPEED_PYTHON=V/bin/python  (needs g++)",
)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_deepspeed_itself_has_the_official_baselines_losses(
    num_processes: int, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Path(__file__).parents[1] / "experiments" / "bench" / "end_to_end_parts"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(parts), str(Path(__file__).parents[1])]))
    settings = AblationConfig(num_steps=2, num_warmup=1, num_processes=num_processes)
    recipe = small(dataset)  # in float32, since where it has bfloat16 it has no float32 weights
    recipe = replace(recipe, train=replace(recipe.train, optimizer="adamw", has_bf16=False))
    recipe = official_baseline(recipe, choose_tricks(recipe, CPU, num_processes)[0])
    ours = run_turn(recipe, tmp_path, settings)
    python = os.environ["WAMLAB_DEEPSPEED_PYTHON"]
    theirs = run_turn(recipe, tmp_path, settings, module="deepspeed_turn", python=python)
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=1e-4)
