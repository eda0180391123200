"""Scores of a run: figures with intervals, episodes in closed loop, films, the page; parity of two runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Event

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from wamlab.checkpoint_folder import list_checkpoints
from wamlab.cli import main
from wamlab.data.views import canvas_of
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.run import Run, open_run, read_evaluations
from wamlab.recipes.build import Workbench
from wamlab.recipes.comparing import ParityOrder, compare_runs, curve_gap, overall
from wamlab.recipes.config import tiny
from wamlab.recipes.environments import make_env
from wamlab.recipes.episodes import PlayOrder, choose_films, play_tasks
from wamlab.recipes.fit import fit, start_run
from wamlab.recipes.history import SEEDS_APART, HistoryPolicy
from wamlab.recipes.imagine import decode_block, roll
from wamlab.recipes.look_ahead import LookAhead
from wamlab.recipes.open_loop import copied, read_clips
from wamlab.recipes.playing import going_on
from wamlab.recipes.policy import WamPolicy
from wamlab.recipes.scoring import ScoreOrder, load_scored, score_run
from wamlab.recipes.session import begin, draw_noise, plan_from
from wamlab.score.bootstrap import bootstrap_means
from wamlab.score.closed_loop import ClosedLoop, PlayedEpisode, play_closed_loop
from wamlab.score.open_loop import Truth, action_figures, hardest_constant, video_figures
from wamlab.score.parity import compare_errors, compare_means
from wamlab.score.success import observe
from wamlab.score.video import LUMA, SSIM_C1, SSIM_C2, measure_ssim
from wamlab.sim.experts import play_episodes
from wamlab.sim.vector import TabletopVector
from wamlab.train import step_generator
from wamlab.types import Observation

SEEDS = range(7_000, 7_006)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a network of two blocks for four steps: it has a history, and knows nothing."""
    folder = tmp_path_factory.mktemp("scored")
    root = write_dataset(play_episodes(("reach",), 20, seed=0, size=32), folder / "reach", robot_type="tabletop")
    recipe = tiny()
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=root, held_out_fraction=0.6, is_apart=False),
        robot=replace(recipe.robot, view_height_px=32, view_width_px=32),
        window=replace(recipe.window, max_blocks=2),
        model=replace(recipe.model, dim=32, layers=1, heads=2, ffn_dim=64, mlp_dim=32, max_blocks=2),
        train=replace(recipe.train, num_steps=4, batch_size=2),
        evaluation=replace(recipe.evaluation, every=2, num_clips=2, noise_levels=(0.3, 0.7)),
        checkpoint_every=2,
    )
    bench = Workbench(recipe)
    with start_run(bench, folder / "runs") as started:
        for _ in fit(bench, started):
            pass
    return open_run(started.folder)


@pytest.fixture(scope="module")
def policy(run: Run) -> HistoryPolicy:
    return load_scored(run)


def frames_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, (*shape, 3), dtype=np.uint8)


def test_ssim_is_what_its_paper_says_pixel_by_pixel() -> None:
    rng = np.random.default_rng(0)
    real = frames_of(rng, 1, 1, 14, 13)
    guess = (real * 0.7 + frames_of(rng, 1, 1, 14, 13) * 0.3).astype(np.uint8)
    weights = np.exp(-0.5 * (np.arange(-5, 6) / 1.5) ** 2)
    weights = np.outer(weights, weights) / weights.sum() ** 2
    x, y = (frames[0, 0] / 255 @ LUMA for frames in (guess, real))
    found = []
    for i in range(4):
        for j in range(3):
            a, b = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
            mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
            covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
            spread = (weights * (a - mean_a) ** 2).sum() + (weights * (b - mean_b) ** 2).sum()
            luminance = (2 * mean_a * mean_b + SSIM_C1) / (mean_a**2 + mean_b**2 + SSIM_C1)
            found.append(luminance * (2 * covariance + SSIM_C2) / (spread + SSIM_C2))
    assert measure_ssim(guess, real).item() == pytest.approx(np.mean(found), abs=1e-5)
    assert measure_ssim(real, real).item() == pytest.approx(1)
    assert measure_ssim(real[..., :4, :4, :], real[..., :4, :4, :]).item() == pytest.approx(1)  # below the window


def test_intervals_hold_the_truth_as_often_as_they_say_though_clips_of_an_episode_are_alike() -> None:
    rng = np.random.default_rng(0)
    episodes = np.repeat(np.arange(40), 5)
    num_right = num_right_if_apart = 0
    for _ in range(200):
        values = rng.normal(0, 1, 40)[episodes] + rng.normal(0, 0.2, 200)
        ones = np.ones_like(values)
        span = bootstrap_means(values, ones, episodes, num_resamples=300)[0]
        apart = bootstrap_means(values, ones, np.arange(200), num_resamples=300)[0]
        num_right += span.low < 0 < span.high
        num_right_if_apart += apart.low < 0 < apart.high
    assert num_right > 0.9 * 200
    assert num_right_if_apart < 0.75 * 200  # why whole episodes are drawn


def test_errors_count_joints_that_exist_only_and_perfect_predictions_have_none() -> None:
    rng = np.random.default_rng(1)
    mask = np.ones((6, 4, 3), bool)
    mask[..., 2] = False
    actions = rng.uniform(-1, 1, mask.shape).astype(np.float32)
    truth = Truth(actions, mask, frames_of(rng, 6, 5, 16, 16), list(range(6)), ["a"] * 6, ["r"] * 6)
    off = actions + np.array([0.1, 0.3, 9.0], np.float32)
    found = action_figures(off, truth)
    assert found.all.value == pytest.approx(0.2, abs=1e-6)
    assert [span.value for span in found.by_joint[:2]] == pytest.approx([0.1, 0.3], abs=1e-6)
    assert np.isnan(found.by_joint[2].value)
    assert action_figures(actions, truth).all.value == 0
    assert video_figures(truth.frames, truth).ssim.value == pytest.approx(1)
    errors = [action_figures(np.broadcast_to(c, actions.shape), truth).all.value for c in (-0.2, 0.2)]
    squared = np.square(hardest_constant(truth) - actions)[mask].mean()
    assert squared <= np.square(actions)[mask].mean()
    assert min(errors) > 0


def test_clips_are_one_an_episode_held_out_and_baselines_know_the_past_alone(policy: HistoryPolicy) -> None:
    bench = policy.bench
    held_out = read_clips(bench, 8, 3)
    assert len(set(held_out.truth.episodes)) == len(held_out.clips)
    assert set(held_out.truth.episodes) <= set(bench.parts[0].held_out.episodes)
    ticks = bench.recipe.window.actions_per_block
    for index, clip in enumerate(held_out.clips):
        for block in range(1, held_out.num_blocks):  # the action before a block is the last one of the block before
            before = held_out.repeated[index, block * ticks]
            np.testing.assert_allclose(before, clip.actions[block * ticks - 1], atol=1e-6)
    frames = copied(held_out, bench.recipe.window.frames_per_block)
    real = held_out.truth.frames
    assert (frames[:, 1:5] == real[:, :1]).all() and (frames[:, 5:9] == real[:, 4:5]).all()


def test_feeds_agree_on_the_first_block_and_part_where_they_see_something_else(policy: HistoryPolicy) -> None:
    clips = read_clips(policy.bench, 4, 3).clips
    found = {feed: roll(policy.bench, clips, feed) for feed in ("history", "newest", "own")}  # pyright: ignore
    ticks = policy.bench.recipe.window.actions_per_block
    for feed in ("newest", "own"):
        np.testing.assert_allclose(found[feed].actions[:, :ticks], found["history"].actions[:, :ticks], atol=1e-5)
        assert np.abs(found[feed].actions[:, ticks:] - found["history"].actions[:, ticks:]).max() > 1e-4
    assert max(np.abs(rolled.actions).max() for rolled in found.values()) <= 1  # what a robot would be told


def test_finished_episodes_are_neither_asked_nor_stepped(policy: HistoryPolicy) -> None:
    asked = []

    def counted(observation):
        asked.append(observation.session.tolist())
        return policy(observation)

    env = make_env(policy, "reach", 4)  # six episodes in groups of four
    policy.forget()
    played = play_closed_loop(env, counted, SEEDS, num_executed=2)
    assert sum(map(len, asked)) == sum(episode.num_calls for episode in played.episodes)
    for seed, episode in zip(SEEDS, played.episodes, strict=True):
        assert sum(seed in sessions for sessions in asked) == episode.num_calls == -(-episode.num_ticks // 2)
    assert len(played.latencies_s) == len(asked) == len(played.waits_s)


def test_an_episode_is_the_same_however_many_play_beside_it(policy: HistoryPolicy) -> None:
    order = PlayOrder(("reach",), num_episodes=3, seed=SEEDS[0])
    found = [play_tasks(policy, replace(order, num_envs=n))["reach"].episodes for n in (1, 3)]
    assert [e.num_ticks for e in found[0]] == [e.num_ticks for e in found[1]]
    assert [e.is_success for e in found[0]] == [e.is_success for e in found[1]]


def test_the_next_chunk_is_computed_while_the_last_is_played(policy: HistoryPolicy) -> None:
    is_asked = Event()

    class Waiting(TabletopVector):
        def chunk_step(self, actions, *, draw="last"):
            assert is_asked.wait(20), "nobody asked ahead while the chunk was played"
            is_asked.clear()
            return super().chunk_step(actions, draw=draw)

    plan = LookAhead(policy)

    def ahead(observation):
        is_asked.set()
        return plan(observation)

    policy.forget()
    played = play_closed_loop(Waiting(1, "reach", size=32), policy, [5], ahead=ahead)
    assert played.is_asynchronous and played.episodes[0].num_calls == len(played.latencies_s)


def test_planning_ahead_begins_with_the_real_frame_and_goes_on_from_predicted_ones(policy: HistoryPolicy) -> None:
    bench = policy.bench
    env = make_env(policy, "reach", 2)
    seen = observe(env.reset(seed=[1, 2])[0], env.instructions, np.array([0, 1]))
    ticks = bench.recipe.window.actions_per_block
    policy.forget()
    blocks = policy.plan_blocks(seen, 2)
    policy.forget()
    np.testing.assert_array_equal(policy(seen), blocks[:, :ticks])
    policy.forget()
    np.testing.assert_array_equal(LookAhead(policy)(seen), blocks[:, ticks:])
    policy.forget()
    np.testing.assert_array_equal(LookAhead(policy, 1)(seen), blocks[:, 1:2])  # fits one block: no frame is predicted
    darker = replace(seen, frames={camera: frames // 2 for camera, frames in seen.frames.items()})
    policy.forget()
    assert np.abs(policy.plan_blocks(darker, 2)[:, ticks:] - blocks[:, ticks:]).max() > 1e-4


def plan_anew(policy: HistoryPolicy, seen: Observation, call: int, num_blocks: int) -> np.ndarray:
    """Plan blocks from the newest frames in one batch, each session with noise of its own: the oracle of one block."""
    bench, robot = policy.bench, policy.bench.recipe.robot
    generators = [step_generator(policy.seed + n * SEEDS_APART, call) for n in seen.session.tolist()]
    frames, state, chunks = torch.from_numpy(canvas_of(seen.frames, robot)), seen.state, []
    for _ in range(num_blocks):
        session = begin(bench, frames, [robot.instruct(task) for task in seen.instructions])
        noise = [torch.cat(part) for part in zip(*(draw_noise(bench, frames[:1], g) for g in generators), strict=True)]
        model_state = torch.from_numpy(policy.normalizers.state_to_model(state))
        latents, actions = plan_from(bench, session, model_state, (noise[0], noise[1]))
        chunks.append(policy.normalizers.actions_to_robot(actions.numpy(), state))
        frames = decode_block(bench, session, latents)[:, -1]
    return np.concatenate(chunks, axis=1)


def test_recipes_of_one_block_get_the_bits_that_planning_from_the_newest_frame_gives(policy: HistoryPolicy) -> None:
    recipe = policy.bench.recipe
    window, model = replace(recipe.window, max_blocks=1), replace(recipe.model, max_blocks=1)
    short = HistoryPolicy(Workbench(replace(recipe, window=window, model=model)), policy.normalizers, seed=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in short.bench.net.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    env = make_env(short, "reach", 3)
    assert not env.has_films and make_env(policy, "reach", 1).has_films  # drawn for those who want them
    asked: list[tuple[Observation, np.ndarray]] = []
    for num_blocks, num_executed in ((1, 2), (2, None)):

        def noted(observation: Observation, num_blocks: int = num_blocks) -> np.ndarray:
            chunks = short.plan_blocks(observation, num_blocks)
            asked.append((observation, chunks))
            return chunks[:, : recipe.window.actions_per_block]

        short.forget()
        asked.clear()
        play_closed_loop(env, noted, range(3), num_executed=num_executed)
        assert len(asked) > 5 and not any(seen.films for seen, _ in asked)
        for call, (seen, actions) in enumerate(asked):
            np.testing.assert_array_equal(actions, plan_anew(short, seen, call, num_blocks))
    newest = WamPolicy(short.bench, short.normalizers)
    assert going_on(newest) is newest  # so `wamlab play` has the noise of its calls, as ever


def test_a_decoded_block_is_the_frames_that_were_encoded(policy: HistoryPolicy) -> None:
    clip = read_clips(policy.bench, 4, 2).clips[0]
    frames = torch.from_numpy(clip.frames[None])
    session = begin(policy.bench, frames[:, 0], [clip.instruction])
    latents, _ = policy.bench.encoder.encode_block(session.first, session.newest, frames[:, 1:5])
    error = decode_block(policy.bench, session, latents).float() - frames[:, 1:5].float()
    still = frames[:, :1].float() - frames[:, 1:5].float()
    assert error.square().mean() < 0.3 * still.square().mean()  # the codec keeps 48 of 192 coefficients


def test_films_show_failures_first_and_one_success_beside_them() -> None:
    def loop(task: str, successes: str) -> ClosedLoop:
        episodes = [PlayedEpisode(i, task, "", s == "1", 3, 1) for i, s in enumerate(successes)]
        return ClosedLoop(tuple(episodes), 4, False, (), ())

    played = {"reach": loop("reach", "01011"), "push": loop("push", "110")}
    chosen = [(e.task, e.seed, e.is_success) for e in choose_films(played, 4)]
    assert chosen == [("reach", 0, False), ("push", 2, False), ("reach", 2, False), ("reach", 1, True)]
    assert [e.is_success for e in choose_films(played, 2)] == [False, True]
    assert not choose_films(played, 0)


def test_a_score_chooses_by_held_out_loss_and_tells_its_story_in_one_page(run: Run, capsys) -> None:
    words = ["score", run.name, "--root", str(run.folder.parent), "--clips", "10", "--closed-loop", "--episodes", "3"]
    assert main([*words, "--executed", "2", "--videos", "2", "--json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    score = json.loads(printed[-1])
    assert score == {**json.loads((run.folder / "score.json").read_text()), "page": score["page"]}
    losses = {c["step"]: c["loss"]["value"] for c in score["checkpoints"]}
    assert set(losses) == {2, 4} and losses[score["step"]] == min(losses.values())
    assert score["has_history"] and {"history", "newest frame", "own frames"} <= score["actions"].keys()
    assert len(score["actions"]["history"]["by_tick"]) == score["num_blocks"] * 4
    assert set(score["loss_by_level"]) == {"0.3", "0.7", "mean"}
    modes = score["closed_loop"]["modes"]
    assert all(mode["num_executed"] == 2 and len(mode["episodes"]) == 3 for mode in modes.values())
    assert {c["step"] for c in score["closed_loop"]["by_checkpoint"]} == {2, 4}
    assert len(score["swing"]["evaluations"]) == len(read_evaluations(run))
    page = (run.folder / "score.html").read_text()
    films = score["closed_loop"]["films"]
    assert page.count("<video") == len(films) == 2 and page.count("data:image/png") == 3
    with av.open(str(run.folder / films[0]["file"])) as container:
        assert sum(1 for _ in container.decode(video=0)) == films[0]["ticks"] + 1 + 7


def test_a_score_without_its_dataset_says_what_is_missing(run: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        score_run(run, ScoreOrder(8, 2, data=tmp_path / "nowhere"))


@pytest.fixture(scope="module")
def worse(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run with noise on its action decoder."""
    folder = tmp_path_factory.mktemp("worse") / run.name
    shutil.copytree(run.folder, folder)
    for checkpoint in list_checkpoints(folder / "checkpoints"):
        for name in ("model", "ema"):
            weights = load_file(checkpoint / f"{name}.safetensors")
            generator = torch.Generator().manual_seed(0)
            for key, value in weights.items():
                if "action_decoder" in key:
                    weights[key] = value + 0.5 * torch.randn(value.shape, generator=generator)
            save_file(weights, checkpoint / f"{name}.safetensors")
    return open_run(folder)


def test_a_run_is_equivalent_to_itself_and_different_from_a_damaged_one(run: Run, worse: Run) -> None:
    order = ParityOrder(play=PlayOrder(("reach",), 4, SEEDS[0]), num_clips=12, margin=0.6)
    same = compare_runs([run], [run], order, say=lambda _: None)
    assert same["verdict"] == "equivalent" and same["claim"] == "these checkpoints"
    assert same["pairs"][0]["end_differently"] == 0 and same["curves"]["largest"] == 0
    other = compare_runs([run], [worse], replace(order, play=None), say=lambda _: None)
    assert other["verdict"] == "different" and other["parts"]["action error"]["difference"] > 0.05
    pairs = compare_runs([run, run], [run, run], replace(order, play=None), say=lambda _: None)
    assert pairs["claim"] == "recipes, by training seed" and pairs["verdict"] == "equivalent"
    assert "2 paired seeds" in pairs["parts"]["action error"]["sentence"]


def test_the_command_states_margins_and_sizes_first(run: Run, tmp_path: Path, capsys) -> None:
    words = ["parity", run.name, run.name, "--root", str(run.folder.parent), "--episodes", "0", "--clips", "6"]
    assert main([*words, "--out", str(tmp_path / "parity.json"), "--json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("margins: 0.1 of success, 5% of action error")
    assert "310 paired episodes" in printed[2]  # before anything is measured
    assert json.loads(printed[-1]) == json.loads((tmp_path / "parity.json").read_text())
    assert main(["parity", f"{run.name},{run.name}", run.name, "--root", str(run.folder.parent)]) == 2
    assert "make no pairs" in capsys.readouterr().err


def test_the_whole_differs_where_a_part_does_beyond_chance_and_equals_where_all_do() -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(0.9, 1.1, 100)
    equal = compare_errors(base, base * rng.uniform(0.999, 1.001, 100), margin=0.05)
    worse = compare_errors(base, 1.2 * base, margin=0.05)
    barely = compare_means(np.array([0.5, 0.6, 0.5, 0.7]), np.array([0.7, 0.65, 0.6, 0.85]), margin=0.02)
    assert barely.verdict == "different" and 0.05 / 3 < barely.p_different < 0.05
    assert overall([equal, equal], 0.05) == "equivalent"
    assert overall([equal, worse], 0.05) == "different"
    assert overall([equal, equal, barely], 0.05) == "not enough evidence"  # three looks share alpha


def test_a_gap_of_curves_is_found_where_it_is() -> None:
    steps = np.arange(100)
    base = np.exp(-steps / 50)[None].repeat(2, 0)
    gap = curve_gap(base, base * np.where(steps >= 90, 1.1, 1.0))
    assert gap["step"] == 100 and gap["largest"] == pytest.approx(gap["end"]) and 0.05 < gap["end"] < np.log(1.1)
