"""A recipe is tuned in one line, from what was kept of an earlier call where there is any."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from random_search import blocks_of  # pyright: ignore[reportMissingImports]

from wamlab.errors import InputError
from wamlab.recipes.config import Recipe, tiny
from wamlab.recipes.tune import tune_recipe, tuned, tuned_table
from wamlab.recipes.tune_models import Models, Place, cache_path, write_models
from wamlab.recipes.tune_order import parse_budget
from wamlab.recipes.tune_parts import list_sizes, sample_of
from wamlab.speed.recompute_plan import RecomputePlan

GIB = 2**30


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Return a recipe of 12 blocks and 8 samples a step whose memory and times were found before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = tiny()
    small = replace(
        small, model=replace(small.model, layers=12), train=replace(small.train, batch_size=8), device="cpu"
    )
    memories, times = blocks_of(12, (1, 2, 4, 8))
    place = Place.of(small, "cpu")
    models = Models(tuple(memories.values()), tuple(times.values()), 0.01, place.policies)
    write_models(cache_path(small, place), small, place, models)
    return small


def test_a_tuned_recipe_says_how_its_step_is_computed(recipe: Recipe) -> None:
    found = tune_recipe(recipe, 12 * GIB, "cpu")
    assert found.choice.peak_bytes <= 12 * GIB < found.front[-1].peak_bytes
    assert {policy for policy, _ in found.choice.plan.runs} - {"keep", "full"} or len(found.choice.plan.runs) > 1
    assert found.all_or_nothing is not None and found.choice.step_s < found.all_or_nothing.step_s
    assert sum(found.seconds.values()) == pytest.approx(found.choice.step_s)
    assert sum(found.memory_bytes.values()) == found.choice.peak_bytes
    assert json.loads(json.dumps(found.to_dict()))["choice"]["plan"] == str(found.choice.plan)
    assert f"> {found.choice.num_micro_batches:>5}x" in tuned_table(found)
    run = tuned(recipe, budget_gib=12, device="cpu")
    assert RecomputePlan.read(run.speed.recompute) == found.choice.plan
    assert run.train.num_micro_batches * found.choice.micro_batch == run.train.batch_size
    assert asdict(replace(run, speed=recipe.speed, train=recipe.train)) == asdict(recipe)


def test_no_limit_keeps_everything_and_too_little_is_refused(recipe: Recipe) -> None:
    assert tune_recipe(recipe, None, "cpu").choice.plan == RecomputePlan.uniform("keep", 12)
    with pytest.raises(InputError, match=r"no plan fits 1\.00 GiB"):
        tune_recipe(recipe, GIB, "cpu")
    with pytest.raises(InputError, match="more than 0"):
        tune_recipe(recipe, 0, "cpu")


def test_what_was_kept_of_another_recipe_is_not_taken(recipe: Recipe) -> None:
    place = Place.of(recipe, "cpu")
    path = cache_path(recipe, place)
    assert path.exists() and cache_path(replace(recipe, name="other"), place) == path
    wider = replace(recipe, model=replace(recipe.model, ffn_dim=64))
    assert not cache_path(wider, place).exists()
    assert not cache_path(replace(recipe, train=replace(recipe.train, batch_size=16)), place).exists()
    assert not cache_path(recipe, Place.of(recipe, "8xH100")).exists()


def test_budgets_are_read_with_their_unit() -> None:
    assert parse_budget("70GiB") == parse_budget(" 70 ") == 70 * GIB
    assert parse_budget("80 GB") == 80 * 10**9 and parse_budget("1.5MiB") == 3 * 2**19
    for wrong in ("", "GiB", "70 pounds", "-1GiB", "0"):
        with pytest.raises(InputError, match="no budget of memory"):
            parse_budget(wrong)


def test_micro_batches_divide_the_batch_and_a_sample_has_the_shapes_of_training() -> None:
    assert list_sizes(32) == [1, 2, 4, 8, 16, 32]
    many = list_sizes(5040)
    assert len(many) == 8 and many[0] == 1 and many[-1] == 5040 and all(5040 % size == 0 for size in many)
    batch = sample_of(tiny()).batch
    assert batch.latents.shape == (1, 2, 48, 8, 16) and batch.condition is not None
