"""Where a run's policy is played: the tabletop or a public simulator, if it shows and takes what the robot does."""

import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wamlab.cli import main
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.run import Run, open_run
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import tiny
from wamlab.recipes.environments import check_fit, make_env, tasks_of
from wamlab.recipes.episodes import PlayOrder, play_tasks
from wamlab.recipes.fit import fit, start_run
from wamlab.recipes.playing import play_task
from wamlab.recipes.policy import load_policy
from wamlab.recipes.scoring import load_scored
from wamlab.sim.adapters import INSTALL, make_adapted
from wamlab.sim.experts import play_episodes
from wamlab.sim.vector import TabletopVector
from wamlab.types import Episode

MODULES = {"pusht": "gym_pusht", "metaworld:reach-v3": "metaworld", "libero:libero_spatial/0": "libero"}


def trained(folder: Path, root: Path, cameras: tuple[str, ...], max_blocks: int = 1) -> Run:
    """Train the smallest recipe of some cameras for two steps."""
    recipe = tiny()
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=root, held_out_fraction=0.5, is_apart=False),
        robot=replace(recipe.robot, cameras=cameras, view_height_px=32, view_width_px=32),
        window=replace(recipe.window, max_blocks=max_blocks),
        model=replace(recipe.model, dim=32, layers=1, heads=2, ffn_dim=64, mlp_dim=32, max_blocks=max_blocks),
        train=replace(recipe.train, num_steps=2, batch_size=2),
        evaluation=replace(recipe.evaluation, every=2, num_clips=2, noise_levels=(0.5,)),
        checkpoint_every=2,
    )
    bench = Workbench(recipe)
    with start_run(bench, folder / "runs") as started:
        for _ in fit(bench, started):
            pass
    return open_run(started.folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("environments")
    root = write_dataset(play_episodes(("reach",), 8, seed=0, size=32), folder / "reach", robot_type="tabletop")
    return trained(folder, root, ("top", "wrist"))


def test_words_of_environments_become_tasks_and_unknown_ones_are_refused() -> None:
    assert tasks_of("tabletop", ["reach", "push"]) == ("reach", "push")
    assert PlayOrder(env="metaworld:reach-v3").tasks == ("metaworld:reach-v3",)
    with pytest.raises(InputError, match="no environment 'isaac': give tabletop, pusht, metaworld:TASK"):
        tasks_of("isaac", ["reach"])
    with pytest.raises(InputError, match="there is no family"):
        PlayOrder(("fold",))
    with pytest.raises(InputError, match="leave out --family, or --env pusht"):
        tasks_of("pusht", ["push"])


def test_the_tabletop_by_name_is_the_one_by_default(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["play", run.name, "--root", str(run.folder.parent), "--episodes", "2"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert main([*words, "--env", "tabletop"]) == 0
    assert printed.split(",")[0] == capsys.readouterr().out.split(",")[0]  # but for the latency


def test_cameras_states_and_actions_that_do_not_fit_are_told_of_both_sides(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(run)
    check_fit(policy, "reach")
    robot = policy.bench.recipe.robot
    foreign = load_policy(run)
    recipe = foreign.bench.recipe
    vars(foreign.bench)["recipe"] = replace(recipe, robot=replace(robot, cameras=("top", "ceiling")))
    with pytest.raises(
        InputError, match=r"reach shows cameras top, wrist.* 5 states .* robot has cameras top, ceiling"
    ):
        check_fit(foreign, "reach")
    narrow = policy.normalizers
    monkeypatch.setattr(type(narrow), "num_actions", 7)
    with pytest.raises(InputError, match=r"takes 4 actions; the run's robot has .* 5 states and 7 actions"):
        play_task(policy, "push", [0])


@pytest.mark.parametrize("task", MODULES)
def test_a_simulator_that_is_not_installed_is_named_with_its_install_command(
    run: Run, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(MODULES[task]) is not None:
        pytest.skip(f"{MODULES[task]} is installed")
    for command in (["play"], ["score", "--closed-loop"]):
        assert main([*command, run.name, "--root", str(run.folder.parent), "--episodes", "1", "--env", task]) == 2
        assert f"is not installed: {INSTALL[task.partition(':')[0]]}" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("task", MODULES)
def test_an_installed_simulator_refuses_the_tabletops_robot_and_names_both(
    run: Run, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = task.partition(":")[0]
    pytest.importorskip(MODULES[task], reason=INSTALL[simulator])
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", "egl"))
    with pytest.raises(InputError, match=rf"^{task} shows cameras .* robot has cameras top, wrist, 5 states") as told:
        check_fit(load_policy(run), task)
    if simulator == "libero":  # what the robot file of that name has
        assert "shows cameras image, wrist_image, 8 states and takes 7 actions" in str(told.value)


def pusht_episodes(num_episodes: int, num_ticks: int = 12) -> Iterator[Episode]:
    """Play random targets on PushT."""
    env = make_adapted("pusht", size=32, has_films=True)
    for seed in range(num_episodes):
        raw, _ = env.reset(seed=[seed])
        rng, frames, states, actions = np.random.default_rng(seed), [raw["pixels"]["top"][0]], [], []
        for _ in range(num_ticks):
            actions.append((raw["agent_pos"][0] + rng.uniform(-60, 60, 2)).clip(0, 512).astype(np.float32))
            states.append(raw["agent_pos"][0])
            raw, *_, infos = env.chunk_step(actions[-1][None, None])
            frames.append(infos["films"][0]["top"][-1])
        yield Episode({"top": np.stack(frames[:-1])}, np.stack(states), np.stack(actions), env.instructions[0], 10.0)
    env.close()


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("max_blocks", [1, 2])
def test_a_recipe_trained_on_pusht_is_scored_there(
    tmp_path: Path, max_blocks: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gym_pusht", reason=INSTALL["pusht"])
    from wamlab.sim.adapters import PushT

    monkeypatch.setattr(PushT, "max_ticks", 24)
    root = write_dataset(pusht_episodes(8), tmp_path / "pusht", robot_type="pusht")
    run = trained(tmp_path, root, ("top",), max_blocks)
    words = [run.name, "--root", str(run.folder.parent), "--episodes", "2", "--env", "pusht"]
    assert main(["play", *words]) == 0
    assert "pusht: 0% of 2" in capsys.readouterr().out
    assert main(["score", *words, "--closed-loop", "--clips", "4", "--blocks", "1", "--videos", "1"]) == 0
    played = json.loads((run.folder / "score.json").read_text())["closed_loop"]
    assert all(mode["by_task"][0]["task"] == "pusht" for mode in played["modes"].values())
    assert [episode["num_ticks"] for episode in played["modes"]["synchronous"]["episodes"]] == [24, 24]
    assert played["latency"]["chunk_ms"] == 400.0 and (run.folder / played["films"][0]["file"]).is_file()
    alone = play_tasks(load_scored(run), PlayOrder(num_episodes=2, env="pusht", num_envs=1))["pusht"]
    assert alone.num_successes == 0 and make_env(load_scored(run), "pusht", 1).has_films == (max_blocks > 1)
    with pytest.raises(InputError, match=r"reach shows cameras top, wrist.* robot has cameras top, 2 states"):
        check_fit(load_policy(run), "reach")


def test_the_tabletops_films_are_the_frames_of_executed_ticks() -> None:
    rng, envs = (
        np.random.default_rng(0),
        [TabletopVector(2, "reach", size=32, has_films=is_on) for is_on in (False, True)],
    )
    for env in envs:
        env.reset(seed=[0, 1])
    num_short = 0
    while not envs[0].is_done.all():
        actions = 0.2 * rng.uniform(-1, 1, (2, 7, 4)).astype(np.float32)
        was_done = envs[0].is_done
        *_, infos = envs[0].chunk_step(actions, draw="all")
        raw, *_, filmed = envs[1].chunk_step(actions)
        assert "films" not in infos and was_done.tolist() == [not len(film["top"]) for film in filmed["films"]]
        for row, film in enumerate(filmed["films"]):
            count = infos["num_ticks"][row]
            num_short += count < 7
            for camera, frames in film.items():
                np.testing.assert_array_equal(frames, infos["pixels"][camera][row, :count])
                if count:
                    np.testing.assert_array_equal(frames[-1], raw["pixels"][camera][row])
    assert num_short
