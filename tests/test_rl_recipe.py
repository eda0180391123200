"""Post-training of a real network on the tabletop: ratios of 1, one update an iteration, exact resume, plain runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from wamlab.checkpoint import write_checkpoint
from wamlab.cli import main
from wamlab.data.normalize import Normalizers, Quantiles
from wamlab.errors import InputError
from wamlab.lab.records import write_json
from wamlab.lab.run import Run, create_run, open_run, read_evaluations, read_metrics
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import tiny
from wamlab.recipes.fit import normalizers_name
from wamlab.recipes.policy import load_policy
from wamlab.recipes.rl import RlBench
from wamlab.recipes.rl_config import ExploreConfig, RlEvaluation, RlRecipe, rl_tabletop_grpo, rl_tabletop_nft
from wamlab.recipes.rl_examples import RewardConfig
from wamlab.recipes.rl_policy import acting_dims, chain_from
from wamlab.recipes.rl_run import open_bench, post_train, start_rl, summarize_rl
from wamlab.rl.advantage import SIMPLE_VLA
from wamlab.rl.chain import velocities
from wamlab.rl.play import PlayConfig
from wamlab.rl.segments import Asked, noise_generator
from wamlab.train import make_optimizer
from wamlab.types import Observation


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run folder as training leaves it, of a network of a few thousand weights that was never trained."""
    recipe = tiny()
    recipe = replace(
        recipe,
        robot=replace(recipe.robot, view_height_px=32, view_width_px=32),
        model=replace(recipe.model, dim=32, layers=1, heads=2, ffn_dim=64, mlp_dim=32),
        sampler=replace(recipe.sampler, num_steps=2),
    )
    bench = Workbench(recipe)
    for p in bench.net.parameters():  # heads start at zero
        if not p.any():
            nn.init.normal_(p, std=0.05)
    low, high = np.array([-1.0, -1.0, 0.0, -1.0]), np.array([1.0, 1.0, 0.0, -1.0])
    state = Quantiles(np.zeros(5), np.ones(5))
    normalizers = Normalizers(Quantiles(low, high), state, (), 4, 5)
    root = tmp_path_factory.mktemp("start")
    with create_run(root, "start", recipe) as run:
        write_json(run.folder / normalizers_name(0), normalizers.to_dict())
        write_checkpoint(run.checkpoints, 1, bench.net, make_optimizer(bench.net, recipe.train), None)
    return open_run(run.folder)


def small(recipe: RlRecipe, num_steps: int = 2) -> RlRecipe:
    return replace(
        recipe,
        num_groups=2,
        reward=RewardConfig("progress"),
        play=PlayConfig(num_members=2, num_slots=4),
        train=replace(recipe.train, num_steps=num_steps, batch_size=4, num_micro_batches=2, learning_rate=1e-3),
        evaluation=RlEvaluation(every=2, num_episodes=2),
        checkpoint_every=1,
    )


RECIPES = {
    "grpo, two epochs": replace(rl_tabletop_grpo(), num_epochs=2, explore=ExploreConfig(0.1)),
    "nft": replace(rl_tabletop_nft(), num_draws=2),
}


@pytest.mark.parametrize("name", RECIPES)
def test_an_iteration_learns_from_its_own_episodes_and_resumes_bit_for_bit(
    name: str, start: Run, tmp_path: Path
) -> None:
    recipe = small(RECIPES[name], num_steps=4 if "two" in name else 2)
    ends = []
    for interrupted in (False, True):
        root = tmp_path / str(interrupted)
        bench = open_bench(recipe, start)
        before = {n: p.detach().clone() for n, p in bench.net.named_parameters()}
        with start_rl(bench, start, root) as run:
            for record in post_train(bench, run):
                assert np.isfinite([record.loss, record.gradient_norm]).all() and record.gradient_norm > 0
                if interrupted:
                    break
        if interrupted:
            bench = open_bench(recipe, start)
            with start_rl(bench, start, root, is_resumed=True) as run:
                assert len(list(post_train(bench, run))) == recipe.num_iterations - 1
        assert any(not torch.equal(before[n], p) for n, p in bench.net.named_parameters())
        ends.append((bench, run))
    (whole, first), (resumed, second) = ends
    assert all(torch.equal(a, b) for a, b in zip(whole.net.parameters(), resumed.net.parameters(), strict=True))
    records, others = (read_metrics(run)[0] for run in (first, second))
    assert [r["rl"]["success"] for r in records] == [r["rl"]["success"] for r in others]
    assert [r["loss"] for r in records] == [r["loss"] for r in others]
    for record in records:
        figures = record["rl"]
        assert figures["num_episodes"] == 4 and 0 <= figures["num_flat"] < 2
        assert 4 <= figures["num_chunks"] <= 40 and figures["ratio_error"] < 1e-4
    evaluations = read_evaluations(first)
    assert evaluations[0]["step"] == 0 and evaluations[-1]["step"] == recipe.train.num_steps
    assert len(evaluations[0]["won"]) == 2
    assert set(summarize_rl(first)["after"]) == {"success", "low", "high"}


def test_the_trainer_sees_bit_for_bit_what_the_rollout_saw(start: Run) -> None:
    recipe = replace(small(rl_tabletop_grpo()), explore=ExploreConfig(0.1))
    bench = open_bench(recipe, start)
    chunks = next(bench.play(0)).segments[0].chunks
    chain = chain_from(chunks, bench.device)
    with torch.no_grad():
        _, found = velocities(bench.net, chain.batch, chain.seen)
    levels = chain.seen.action_noise_level, chain.next_action_level
    step = bench.sde(0.1)(chain.batch.state, chain.seen.actions, found, *levels)
    noise = (chain.next_actions - step.mean) / step.std
    drawn = [noise_generator([0, 0, 0, 0, 1], 1 + k).standard_normal((4, 4), dtype=np.float32) for k in (0, 1)]
    np.testing.assert_allclose(noise[1].numpy(), drawn, atol=1e-4)  # of member 0's second chunk, by its counter alone
    assert step.std[0, :, 0, 0].tolist() == pytest.approx([0.1, 0.204], abs=2e-3)


def test_noise_depends_on_the_episode_and_not_on_who_is_played_beside_it(start: Run) -> None:
    policy = open_bench(small(rl_tabletop_grpo()), start).policy(0.1)
    generator = np.random.default_rng(0)
    frames = {name: generator.integers(0, 255, (3, 32, 32, 3), dtype=np.uint8) for name in ("top", "wrist")}
    state = generator.random((3, 5)).astype(np.float32)
    keys = np.array([[0, 1, 2, 3, 4], [0, 1, 2, 4, 4], [0, 1, 2, 3, 5]], np.uint64)
    words = ["reach the red circle", "reach the blue square now", "reach the red circle"]
    observation = Observation(frames, state, words, np.arange(3))
    together = policy(Asked(observation, keys, [{}] * 3, 0))
    for row in range(3):
        own = slice(row, row + 1)
        alone = Observation({n: f[own] for n, f in frames.items()}, state[own], words[own], np.arange(1))
        single = policy(Asked(alone, keys[own], [{}], 0))
        np.testing.assert_allclose(single.actions[0], together.actions[row], atol=1e-5)
        np.testing.assert_allclose(single.kept["seen_actions"][0], together.kept["seen_actions"][row], atol=1e-5)
    starts = together.kept["seen_actions"][:, 0]
    assert len({s.tobytes() for s in starts}) == 3


def test_only_dimensions_that_move_the_robot_count(start: Run) -> None:
    assert acting_dims(open_bench(small(rl_tabletop_grpo()), start).start.normalizers).tolist() == [1, 1, 0, 0]


def test_a_group_that_always_fails_is_flat_and_an_iteration_of_such_is_refused(start: Run) -> None:
    recipe = replace(small(rl_tabletop_grpo()), reward=RewardConfig("success"), group=SIMPLE_VLA)
    bench = RlBench(recipe, load_policy(start))
    group = bench.finish(next(bench.play(0)), 0)
    assert group.is_flat and not group.divisor and not group.example.weight.any()
    with pytest.raises(InputError, match="no group was kept"):
        bench.update_from(0)


def test_the_command_post_trains_a_run_that_plays(start: Run, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(start.folder.parent)
    words = ["--start", "start", "--runs", root, "--num-groups", "2", "--reward.kind", "progress"]
    words += ["--train.num-steps", "1", "--evaluation.num-episodes", "2", "--play.num-members", "2"]
    assert main(["rl", "rl_tabletop_grpo", *words]) == 0
    assert "of held-out scenes" in capsys.readouterr().out
    assert main(["play", "rl", "--root", root, "--episodes", "2"]) == 0
    assert main(["rl", "rl_tabletop_gpro"]) == 2
    assert 'did you mean "rl_tabletop_grpo"' in capsys.readouterr().err
    assert main(["rl", "rl_tabletop_grpo", *words, "--resume", "--explore.noise-scale", "0.3"]) == 2
    assert "explore.noise_scale (was 0.15, now 0.3)" in capsys.readouterr().err


def test_the_simulator_ranks_rules_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--lengths", "RoboTwin-50", "--groups", "8", "--seeds", "1"]) == 0
    printed = capsys.readouterr().out
    assert all(rule in printed for rule in ("padded", "static", "context", "oracle"))
    assert main(["simulate", "--rule", "contxt"]) == 2
    assert "static" in capsys.readouterr().err
