"""The world model as an environment: resumable, batched, counted noise, judged, and good for post-training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_session import opened, recipe_of
from torch import Tensor

from wamlab.checkpoint import write_checkpoint
from wamlab.data.clips import split_episodes
from wamlab.data.lerobot import open_dataset
from wamlab.data.normalize import Normalizers, Quantiles
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.records import write_json
from wamlab.lab.run import create_run, open_run, read_evaluations, read_metrics
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe
from wamlab.recipes.fit import normalizers_name
from wamlab.recipes.imagined_parts import Keyframes, fit_world, goal_judge, read_endings, world_bench
from wamlab.recipes.imagined_world import WamWorld
from wamlab.recipes.policy import WamPolicy
from wamlab.recipes.rl_config import ImagineConfig, RlEvaluation, rl_tabletop_grpo
from wamlab.recipes.rl_imagined import HEAD_FILE, WORLD_FILE, ImaginedBench
from wamlab.recipes.rl_run import open_bench, post_train, start_rl
from wamlab.rl.play import PlayConfig, play
from wamlab.rl.schedule import ScheduleConfig
from wamlab.rl.segments import Asked, Group, Planned, Setting, noise_generator
from wamlab.score.success_head import Endings, SuccessHead, measure_head, read_head, train_head, write_head
from wamlab.sim.experts import play_episodes
from wamlab.sim.imagined import ImaginedVector, moved_pose
from wamlab.sim.vector import TabletopVector
from wamlab.train import make_optimizer
from wamlab.types import Env

NUM_EPISODES = 60


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("imagined") / "reach"
    write_dataset(play_episodes(("reach",), NUM_EPISODES, seed=0, size=32), root, robot_type="tabletop")
    return root


def normalizers_of() -> Normalizers:
    one = np.ones(4)
    return Normalizers(Quantiles(-one, one), Quantiles(np.zeros(5), np.ones(5)), (), 4, 5)


def never(newest: Tensor, goals: Sequence, firsts: Sequence, instructions: Sequence[str]) -> Tensor:
    return torch.full((len(newest),), 0.1)


@pytest.fixture(scope="module")
def world(root: Path) -> WamWorld:
    """A world of three blocks, so that histories grow and then slide."""
    bench = opened(Workbench(recipe_of(root)))
    return WamWorld(bench, normalizers_of(), never, moved_pose)


@pytest.fixture(scope="module")
def starts(root: Path, world: WamWorld) -> Keyframes:
    return Keyframes(open_dataset(root), range(NUM_EPISODES), world.bench.recipe.robot, 0.5)


def chunks(number: int, num_envs: int) -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.uniform(-1, 1, (num_envs, 4, 4)) for _ in range(number)]


def bits_of(seen: Mapping) -> tuple:
    return seen["agent_pos"].tobytes(), *(frames.tobytes() for frames in seen["pixels"].values())


def test_it_is_an_environment_and_the_same_seed_is_the_same_dream(world: WamWorld, starts: Keyframes) -> None:
    env, again = (ImaginedVector(1, world, starts) for _ in range(2))
    assert isinstance(env, Env) and env.is_done.all()
    first, _ = env.reset(seed=5)
    assert bits_of(first) == bits_of(again.reset(seed=[5])[0])
    real = starts(5)
    assert first["pixels"]["top"].tobytes() == real.frames["top"].tobytes()
    assert env.instructions == [real.instruction]
    ends = []
    for actions in chunks(4, 1):
        seen, rewards, terminated, truncated, infos = env.chunk_step(actions)
        ends.append(bits_of(seen))
        assert ends[-1] == bits_of(again.chunk_step(actions)[0])
        assert rewards.shape == (1, 4) and rewards[0, -1] == pytest.approx(0.1) and infos["num_ticks"] == [4]
        assert not terminated.any() and not truncated.any()
    assert len(set(ends)) == 4
    again.reset(seed=6)
    assert bits_of(again.chunk_step(chunks(1, 1)[0])[0]) != ends[0]


def test_a_dream_goes_on_from_its_snapshot_bit_for_bit_also_after_its_window_slid(
    world: WamWorld, starts: Keyframes
) -> None:
    for num_before in (1, 2, 4):  # three blocks fit a window
        env, other = ImaginedVector(1, world, starts), ImaginedVector(1, world, starts)
        env.reset(seed=8)
        other.reset(seed=1)
        played = chunks(num_before + 3, 1)
        for actions in played[:num_before]:
            env.chunk_step(actions)
        other.restore(0, env.snapshot(0))
        assert bits_of(other.observe()) == bits_of(env.observe())
        for actions in played[num_before:]:
            assert bits_of(env.chunk_step(actions)[0]) == bits_of(other.chunk_step(actions)[0])
        assert env._minds[0].session.history.num_frames == other._minds[0].session.history.num_frames > 1


def test_a_batch_dreams_what_each_dreams_alone_to_a_level_of_colour(world: WamWorld, starts: Keyframes) -> None:
    """Sums of other shapes are rounded otherwise: a level of 255 in fewer than a hundredth of the values."""
    single = [ImaginedVector(1, world, starts) for _ in range(3)]
    for number, env in enumerate(single):
        env.reset(seed=20 + number)
    single[1].chunk_step(chunks(1, 1)[0])  # ages differ
    batch = [ImaginedVector(1, world, starts) for _ in range(3)]
    for number, env in enumerate(batch):
        env.reset(seed=20 + number)
    batch[1].chunk_step(chunks(1, 1)[0])
    for actions in chunks(2, 3):
        together = [result[0] for result in ImaginedVector.chunk_steps(batch, [a[None] for a in actions])]
        for env, actions_of, seen in zip(single, actions, together, strict=True):
            alone = env.chunk_step(actions_of[None])[0]
            np.testing.assert_allclose(alone["agent_pos"], seen["agent_pos"], atol=1e-6)
            for camera, frames in alone["pixels"].items():
                far = np.abs(frames.astype(int) - seen["pixels"][camera].astype(int))
                assert far.max() <= 1 and (far > 0).mean() < 0.01


def test_the_integrated_pose_is_the_tables_as_long_as_nothing_is_held() -> None:
    table = TabletopVector(4, "reach", size=32, cameras=())
    state = table.reset(seed=3)[0]["agent_pos"]
    for actions in chunks(5, 4):
        live = ~table.is_done
        actions[..., 3] = -1
        wanted = table.chunk_step(actions)[0]["agent_pos"]
        state = moved_pose(state, actions)
        assert live.any()
        np.testing.assert_allclose(state[~table.is_done], wanted[~table.is_done], atol=1e-5)


class Wanderer:
    """Plans counted noise."""

    def __call__(self, asked: Asked) -> Planned:
        drawn = [noise_generator(key).uniform(-1, 1, (4, 4)) for key in asked.keys]
        return Planned(np.stack(drawn))


def test_the_rollout_divides_and_resumes_dreams_and_exact_ones_are_bit_equal(
    world: WamWorld, starts: Keyframes
) -> None:
    groups = [Group(n, "imagined", seed=40 + n, cap=4) for n in range(2)]
    setting = Setting(seed=1, is_exact=True, has_frames=True)

    restored: list[dict] = []

    class Restoring(ImaginedVector):
        def restore(self, row: int, snapshot: dict, /) -> None:
            restored.append(snapshot)
            super().restore(row, snapshot)

    def env(task: str) -> ImaginedVector:
        return Restoring(1, world, starts, max_ticks=16)

    found = []
    for config in (
        PlayConfig("fifo", 3, num_slots=1),
        PlayConfig("context", 3, 1, 2, ScheduleConfig(segment_chunks=1, tail_chunks=1)),
    ):
        rollout = play(groups, setting, Wanderer(), env, config=config)
        segments = {s.key: s for played in rollout for s in played.segments}
        found.append({k: [v.tobytes() for v in s.chunks.values()] for k, s in segments.items()})
        assert all(s.num_chunks == 4 for s in segments.values())
    assert found[0] == found[1]
    assert restored and {len(snapshot["state"]) for snapshot in restored} == {5}
    calls = world_calls(world, groups, env)
    assert max(calls) == 4  # all four episodes in one call of the network


def world_calls(world: WamWorld, groups: list[Group], env: object) -> list[int]:
    """Play inexactly; return how many episodes each step of the world had."""
    sizes: list[int] = []
    step = world.step

    def counted(minds: Sequence, *rest: object) -> object:
        sizes.append(len(minds))
        return step(minds, *rest)  # pyright: ignore[reportArgumentType]

    vars(world)["step"] = counted
    try:
        list(play(groups, Setting(seed=1), Wanderer(), env, config=PlayConfig("fifo", 2, num_slots=4)))  # pyright: ignore[reportArgumentType]
    finally:
        del vars(world)["step"]
    return sizes


def test_odd_actions_seeds_snapshots_and_judges_are_refused(world: WamWorld, starts: Keyframes) -> None:
    env = ImaginedVector(2, world, starts)
    with pytest.raises(InputError, match="not begun"):
        env.observe()
    with pytest.raises(InputError, match="numbers from 0 on"):
        env.reset(seed=[1])
    env.reset(seed=0)
    with pytest.raises(InputError, match="NaN"):
        env.chunk_step(np.full((2, 4, 4), np.nan))
    with pytest.raises(InputError, match="this world steps by 4"):
        env.chunk_step(np.zeros((2, 3, 4)))
    with pytest.raises(InputError, match="shape"):
        env.chunk_step(np.zeros((1, 4, 4)))
    with pytest.raises(InputError, match="lacks mind"):
        env.restore(0, {n: v for n, v in env.snapshot(0).items() if n != "mind"})
    with pytest.raises(InputError, match="threshold"):
        ImaginedVector(1, world, starts, threshold=0.0)
    with pytest.raises(InputError, match="keyframes that have one"):
        frames = torch.zeros(1, 32, 64, 3, dtype=torch.uint8)
        goal_judge(world.bench.encoder)(frames, [None], [frames[0]], ["go"])
    with pytest.raises(InputError, match="both kinds"):
        train_head(SuccessHead(32, 64, 8), Endings(frames, torch.zeros(1, 8), torch.ones(1, dtype=torch.bool)))
    with pytest.raises(InputError, match=r"imagine\.judge"):
        ImagineConfig(judge="jury")
    with pytest.raises(InputError, match='env is "dream"'):
        replace(rl_tabletop_grpo(), env="dream")


def test_likeness_to_the_goal_is_1_at_the_goal_and_0_at_the_start(world: WamWorld, starts: Keyframes) -> None:
    minds = world.begin([starts(4)])
    first, goal = minds[0].first, minds[0].goal
    assert goal is not None
    judge = goal_judge(world.bench.encoder)
    assert judge(goal[None], [goal], [first], ["go"]).item() == pytest.approx(1)
    assert judge(first[None], [goal], [first], ["go"]).item() == pytest.approx(0, abs=1e-6)


def test_a_success_head_knows_ends_of_held_out_episodes_better_than_chance(
    world: WamWorld, root: Path, tmp_path: Path
) -> None:
    dataset, bench = open_dataset(root), world.bench
    ours, others = split_episodes(dataset, 0.4, 0)
    learnt, held_out = (read_endings(dataset, own, bench.recipe.robot, bench.encoder) for own in (ours, others))
    head = SuccessHead(32, 64, bench.recipe.text.dim)
    losses = train_head(head, learnt, num_steps=120, batch_size=32)
    found = measure_head(head, held_out)
    assert np.mean(losses[-10:]) < 0.75 * losses[0]
    assert found["balanced"] > 0.62, found  # of 0.5 by chance
    write_head(head, tmp_path / "head.safetensors")
    again = read_head(SuccessHead(32, 64, bench.recipe.text.dim), tmp_path / "head.safetensors")
    assert measure_head(again, held_out) == found
    with pytest.raises(InputError, match="holds no success head"):
        read_head(SuccessHead(64, 64, bench.recipe.text.dim), tmp_path / "head.safetensors")


def start_recipe(root: Path) -> Recipe:
    recipe = recipe_of(root)
    return replace(
        recipe,
        window=replace(recipe.window, max_blocks=1),
        model=replace(recipe.model, max_blocks=1, dim=32, heads=2, layers=1),
    )


def test_a_policy_is_post_trained_in_imagination_and_measured_on_the_table(root: Path, tmp_path: Path) -> None:
    bench = opened(Workbench(start_recipe(root)))
    with create_run(tmp_path, "start", bench.recipe) as made:
        write_json(made.folder / normalizers_name(0), normalizers_of().to_dict())
        write_checkpoint(made.checkpoints, 1, bench.net, make_optimizer(bench.net, bench.recipe.train), None)
    start = open_run(made.folder)
    recipe = rl_tabletop_grpo()
    recipe = replace(
        recipe,
        env="imagined",
        imagine=ImagineConfig(num_world_steps=2, num_head_episodes=8, num_head_steps=4, max_chunks=3),
        num_groups=2,
        play=PlayConfig(num_members=2, num_slots=4),
        train=replace(recipe.train, num_steps=1, batch_size=2, num_micro_batches=2),
        evaluation=RlEvaluation(every=1, num_episodes=2),
    )
    rl = open_bench(recipe, start)
    assert isinstance(rl, ImaginedBench)
    before = {n: p.detach().clone() for n, p in rl.net.named_parameters()}
    with start_rl(rl, start, tmp_path) as run:
        (record,) = post_train(rl, run)
    world = {n: p.clone() for n, p in rl.world.bench.net.named_parameters()}
    assert np.isfinite(record.loss) and any(not torch.equal(before[n], p) for n, p in rl.net.named_parameters())
    assert any(not torch.equal(before[n], p) for n, p in world.items())  # taught, then frozen
    assert not any(p.requires_grad for p in rl.world.bench.net.parameters())
    figures = read_metrics(run)[0][0]["rl"]
    assert figures["num_episodes"] == 4 and figures["ratio_error"] < 1e-3
    assert [len(e["won"]) for e in read_evaluations(run)] == [2, 2]
    assert (run.folder / WORLD_FILE).exists() and (run.folder / HEAD_FILE).exists()
    again = open_bench(recipe, start)
    assert isinstance(again, ImaginedBench)
    again.folder = run.folder
    assert all(torch.equal(world[n], p) for n, p in again.world.bench.net.named_parameters())
    group = again.played_groups(0)[0]
    assert group.task == "imagined" and isinstance(again.make_env("reach seen"), TabletopVector)


def test_a_world_learns_from_its_lessons(root: Path) -> None:
    bench = opened(Workbench(start_recipe(root)))
    before = fit_world(world_copy(bench), 4, seed=9)  # the same samples and noise, before and after
    fit_world(bench, 40, batch_size=8)
    after = fit_world(bench, 4, seed=9)
    assert all(ours < theirs for ours, theirs in zip(after, before, strict=True))
    assert np.mean(after) < 0.96 * np.mean(before)


def world_copy(bench: Workbench) -> Workbench:
    """Return a bench with a network of its own."""
    return world_bench(WamPolicy(bench, normalizers_of()))
