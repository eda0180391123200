"""Several datasets in one run: shares, robots of different widths, exact resume, ranks, what is refused."""

import itertools
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from test_loader import assert_same
from test_recipes import small, train_words

from wamlab.cli import main
from wamlab.data.loader import load_clips
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.run import open_run, read_metrics
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe, recipe_from_dict
from wamlab.recipes.fit import fit, start_run
from wamlab.recipes.order import with_robot
from wamlab.recipes.policy import load_policy
from wamlab.sim.experts import play_episodes


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Return the tabletop's own recordings, and a third as many of a robot without its last joint."""
    folder = tmp_path_factory.mktemp("mixed")
    whole = list(play_episodes(("reach",), 8, seed=0, size=32))
    fewer = [replace(episode, action=episode.action[:, :-1]) for episode in whole[:4]]
    return write_dataset(whole, folder / "whole"), write_dataset(fewer, folder / "fewer")


def recipe_of(roots: tuple[Path, ...], **data) -> Recipe:
    recipe = small(roots[0])
    return replace(recipe, data=replace(recipe.data, roots=roots, is_apart=False, **data))


def story(recipe: Recipe, runs: Path, num_steps: int, *, is_resumed: bool = False) -> list[tuple[float, float]]:
    bench = Workbench(recipe)
    with start_run(bench, runs, is_resumed=is_resumed) as run:
        list(islice(fit(bench, run), num_steps))
    return [(record["loss"], record["gradient_norm"]) for record in read_metrics(run)[0]]


@pytest.mark.parametrize(("weights", "shares"), [((1.0, 3.0), (0.25, 0.75)), ((), None)])
def test_datasets_give_their_shares_and_each_robot_its_mask(roots, weights, shares):
    bench = Workbench(recipe_of(roots, weights=weights))
    source, sizes = bench.source[0], [part.training.num_samples for part in bench.parts]
    stream = load_clips(source, batch_size=8, seed=0, num_threads=0)
    widths = Counter(
        int(clip.action_mask[0].sum()) for clip in itertools.chain(*islice(stream, source.num_samples // 8))
    )
    dim = bench.recipe.model.max_action_dim
    assert widths.keys() == {dim, dim - 1}
    wanted = np.array(shares or sizes) / sum(shares or sizes)
    assert widths[dim] / widths.total() == pytest.approx(wanted[0], abs=0.03)
    assert {int(bench.held_out.read(i, 0).action_mask[0].sum()) for i in range(bench.held_out.num_samples)} == {
        dim,
        dim - 1,
    }


def test_a_mixed_run_goes_on_bit_for_bit_and_makes_a_policy_for_each_robot(roots, tmp_path):
    recipe = recipe_of(roots, weights=(1.0, 2.0), cache_gib=0.001)
    whole = story(recipe, tmp_path / "whole", 6)
    story(recipe, tmp_path / "parts", 5)
    assert story(recipe, tmp_path / "parts", 2, is_resumed=True) == whole
    (folder,) = (tmp_path / "whole").iterdir()
    run = open_run(folder)
    assert recipe_from_dict(run.config) == recipe
    dims = [int(load_policy(run, part=part).normalizers.action_mask.sum()) for part in (0, 1)]
    assert dims[1] == dims[0] - 1
    with pytest.raises(InputError, match="trained on 2 datasets"):
        load_policy(run, part=2)
    other = recipe_of(roots, weights=(1.0, 3.0))
    with pytest.raises(InputError, match=r"data\.weights"):
        start_run(
            Workbench(replace(other, train=replace(other.train, num_steps=9))), run.folder.parent, is_resumed=True
        )


@pytest.mark.parametrize("pool", [1, 3])
def test_ranks_of_a_mixture_share_what_one_would_see_and_go_on_anywhere(roots, pool):
    recipe = recipe_of(roots, weights=(1.0, 2.0))

    def clips(num: int, **options) -> list[list]:
        stream = load_clips(Workbench(recipe).source[0], seed=3, pool=pool, **options)
        batches = list(islice(stream, num))
        stream.close()
        return batches

    whole = clips(9, batch_size=4)
    ranks = [clips(4, batch_size=2, start_batch=5, num_threads=4, rank=rank, world_size=2) for rank in (0, 1)]
    for batch, *own in zip(whole[5:], *ranks, strict=True):
        for ours, theirs in zip(itertools.chain(*own), batch, strict=True):
            assert_same(ours, theirs)


def test_each_dataset_may_have_a_robot_of_its_own(roots, tmp_path):
    files = []
    for name, prompt in (("one", "One arm: {task}"), ("two", "Another arm: {task}")):
        files.append(tmp_path / f"{name}.toml")
        files[-1].write_text(
            f'cameras = ["top", "wrist"]\nview_height_px = 32\nview_width_px = 32\nprompt = "{prompt}"\n'
            "crop_fraction = 1.0\n[window]\n"
            "frame_stride = 1\nlatents_per_block = 1\nactions_per_block = 4\nmax_blocks = 1\n"
        )
    named = with_robot(small(roots[0]), ",".join(map(str, files)))
    with pytest.raises(InputError, match="2 robots and one dataset"):
        _ = Workbench(named).parts
    recipe = replace(named, data=replace(named.data, roots=roots))
    told = {instruction.split(":")[0] for part in Workbench(recipe).parts for instruction in part.training.instructions}
    assert told == {"One arm", "Another arm"}
    assert recipe.data.robots[0] == recipe.robot
    files[1].write_text(files[1].read_text().replace("max_blocks = 1", "max_blocks = 2"))
    with pytest.raises(InputError, match="differ in \\[window\\]"):
        with_robot(small(roots[0]), ",".join(map(str, files)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"weights": (1.0, 2.0, 3.0)}, r"data\.weights has 3 entries for 2 of data\.roots"),
        ({"weights": (1.0, 0.0)}, r"data\.weights are \(1\.0, 0\.0\)"),
        ({"balance": 2.0}, r"data\.balance is 2\.0"),
    ],
)
def test_wrong_shares_are_refused(roots, data, message):
    with pytest.raises(InputError, match=message):
        recipe_of(roots, **data)


def test_the_command_mixes_datasets_and_says_what_it_cannot(roots, tmp_path, capsys):
    words = [*train_words(roots[0], tmp_path / "runs"), "--data.roots", *map(str, roots), "--data.weights", "1", "2"]
    sizes = ["--train.batch-size", "2", "--evaluation.num-clips", "2"]
    assert main([*words, "--features.mode", "cached"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("this run mixes 2: give features.mode online")
    assert not (tmp_path / "runs").exists()
    assert main([*words, *sizes]) == 0


def test_robots_of_other_canvases_are_refused(roots):
    recipe = small(roots[0])
    other = replace(recipe.robot, view_height_px=64)
    with pytest.raises(InputError, match=r"data\.robots 1 has canvas_height_px 64, robot 32"):
        replace(recipe, data=replace(recipe.data, roots=roots, robots=(recipe.robot, other)))
