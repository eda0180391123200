"""Latency against quality: the slow ways give the numbers of the fast ones, and every way is measured alike."""

from dataclasses import replace
from pathlib import Path

import pytest

from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.run import Run, open_run
from wamlab.model.sampler import SamplerConfig
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import tiny
from wamlab.recipes.fit import fit, start_run
from wamlab.recipes.latency import Way, latency_chart, measure_latency
from wamlab.sim.experts import play_episodes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("latency")
    root = write_dataset(play_episodes(("reach",), 4, seed=0, size=32), folder / "reach")
    recipe = tiny()
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=root, held_out_fraction=0.25, is_apart=False),
        robot=replace(recipe.robot, view_height_px=32, view_width_px=32),
        model=replace(recipe.model, dim=32, layers=2, heads=2, ffn_dim=64, mlp_dim=32),
        train=replace(recipe.train, num_steps=8, batch_size=2),
        evaluation=replace(recipe.evaluation, every=8, num_clips=2, noise_levels=(0.5,)),
        checkpoint_every=8,
    )
    bench = Workbench(recipe)
    with start_run(bench, folder / "runs") as started:
        for _ in fit(bench, started):
            pass
    return open_run(started.folder)


def test_what_saves_time_alone_changes_no_number_and_shares_its_quality(run: Run, tmp_path: Path) -> None:
    guided = SamplerConfig(num_steps=2, guidance_scale=3.0)
    ways = (
        Way("plain", SamplerConfig(num_steps=4), "nothing cached"),
        Way("cached", SamplerConfig(num_steps=4)),
        Way("one step", SamplerConfig(num_steps=1)),
        Way("guided, two calls", guided, "two calls"),
        Way("guided", guided),
    )
    moved = Path(run.config["data"]["root"]).rename(tmp_path / "moved")
    points = measure_latency(run, ways, root=moved, num_clips=3, num_episodes=2, num_rounds=2)
    assert [point.way for point in points] == list(ways)
    assert max(point.difference for point in points) <= 1e-5
    plain, cached, one, *guided_points = points
    assert plain.speedups == (1.0, 1.0) and len(cached.speedups) == 2
    assert plain.action_error == cached.action_error != one.action_error
    assert len({point.action_error for point in guided_points}) == 1
    assert all(point.success is not None and point.success.num_episodes == 2 for point in points)
    assert one.latency_ms < plain.latency_ms  # one evaluation of a network against four and their encodings
    chart = latency_chart(points)
    assert "Euler" in chart.text and "guided" in chart.text and "ms a chunk" in chart.svg
    assert points[0].row()["way"] == "plain" and 0 <= points[0].row()["success"] <= 1
    with pytest.raises(InputError, match="at least one way"):
        measure_latency(run, ())


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(InputError, match='no form "quick": give one of as served'):
        Way("x", SamplerConfig(), "quick")
