"""Experts of the tabletop: they succeed where chance does not, and record what learning needs."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from wamlab.sim.experts import (
    FAILURES,
    Style,
    expert_action,
    expert_with,
    measure_actor,
    play_episodes,
    play_expert,
    random_actor,
)
from wamlab.sim.scene import FAMILIES, SPLITS
from wamlab.sim.tabletop import TabletopEnv
from wamlab.types import Episode, InputError

# Ticks to success, 10th, 50th and 90th percentile of 200 seeds with default noise, measured 2026-12-01.
LENGTHS = {"reach": (8, 13, 19), "push": (20, 26, 33), "pick_place": (24, 31, 38), "stack": (42, 55, 70)}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_succeed_in_the_time_that_the_benchmark_was_calibrated_to(family: str) -> None:
    outcome = measure_actor(expert_with(), family, range(60))
    assert outcome.rate >= 0.98
    np.testing.assert_allclose(np.percentile(outcome.ticks, [10, 50, 90]), LENGTHS[family], rtol=0.2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", SPLITS[1:])
def test_experts_succeed_on_every_split(family: str, split: str) -> None:
    assert measure_actor(expert_with(), family, range(12), split).rate >= 0.9


@pytest.mark.parametrize(("family", "num_seeds"), [("reach", 150), ("push", 40), ("pick_place", 20), ("stack", 5)])
def test_chance_hardly_ever_succeeds(family: str, num_seeds: int) -> None:
    assert measure_actor(random_actor(), family, range(num_seeds)).rate <= 0.05


def test_going_to_any_object_without_reading_is_worth_its_chance_only() -> None:
    def deaf(tables: Any, row: int) -> np.ndarray:
        x, y, _, _ = tables.state.gripper[row]
        thing_x, thing_y, _ = tables.state.objects[row, 0]
        return np.array([*np.clip(10 * np.array([thing_x - x, thing_y - y]), -1, 1), 0.0, -1.0])

    assert 0.15 < measure_actor(deaf, "reach", range(150)).rate < 0.45  # three or four objects


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_episode_holds_still_after_success(family: str) -> None:
    episode = play_expert(family, 3, size=32, style=Style(tail_ticks=6))
    success, reward = episode.signals["next.success"], episode.signals["next.reward"]
    first = int(success.argmax())
    assert success[first:].all()
    assert episode.num_ticks == first + 1 + 6
    assert reward.sum() == reward[first] == 1.0
    assert np.flatnonzero(episode.signals["next.done"]).tolist() == [episode.num_ticks - 1]
    assert np.abs(episode.action[first + 1 :, :2]).max() < 0.5
    assert {name: film.shape for name, film in episode.frames.items()} == dict.fromkeys(
        ("top", "wrist"), (episode.num_ticks, 32, 32, 3)
    )
    assert episode.state.dtype == episode.action.dtype == np.float32


def test_labels_are_intentions_and_disturbances_are_recorded_beside_them() -> None:
    env = TabletopEnv("reach", size=32)
    episode = play_expert(env, 5, style=Style(noise=0.3))
    env.reset(seed=5)
    assert env.tables is not None
    for state, label, executed in zip(episode.state, episode.action, episode.signals["executed_action"], strict=True):
        np.testing.assert_array_equal(env.observe()["agent_pos"], state)
        np.testing.assert_array_equal(expert_action(env.tables), label)
        env.step(executed)
    assert not np.array_equal(episode.action, episode.signals["executed_action"])
    noisy = play_expert(env, 5, style=Style(noise=0.3, is_label_clean=False))
    np.testing.assert_array_equal(noisy.action, episode.signals["executed_action"])


def test_a_reach_turns_nothing_and_keeps_the_gripper_open() -> None:
    actions = play_expert("reach", 0, size=32).action
    assert (actions[:, 2:] == (0.0, -1.0)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_failures_fail(family: str) -> None:
    for failure in FAILURES[family]:
        for seed in range(4):
            episode = play_expert(family, seed, size=32, cameras=("top",), style=Style(failure=failure))
            assert not episode.signals["next.success"].any(), (failure, seed)
            assert episode.num_ticks > 8


def test_hesitation_makes_episodes_longer() -> None:
    brisk, slow = (
        sum(play_expert("pick_place", seed, size=16, style=Style(hesitation=h)).num_ticks for seed in range(4))
        for h in (0.0, 0.2)
    )
    assert slow > 1.2 * brisk


def test_episodes_are_the_same_whoever_plays_them() -> None:
    options: dict[str, Any] = {"seed": 1, "failure_share": 0.3, "size": 32}
    whole = list(play_episodes(FAMILIES, 6, **options))
    parts = [*play_episodes(FAMILIES, 2, **options), *play_episodes(FAMILIES, 4, first=2, **options)]
    for one, other in zip(whole, parts, strict=True):
        assert_same_episode(one, other)
    assert len({episode.instruction for episode in whole}) > 3
    (other_seed,) = islice(play_episodes(FAMILIES, 1, seed=2, size=32), 1)
    assert other_seed.num_ticks != whole[0].num_ticks or not np.array_equal(other_seed.state, whole[0].state)


def assert_same_episode(one: Episode, other: Episode) -> None:
    assert one.instruction == other.instruction
    np.testing.assert_array_equal(one.action, other.action)
    np.testing.assert_array_equal(one.state, other.state)
    for camera in one.frames:
        np.testing.assert_array_equal(one.frames[camera], other.frames[camera])


def test_bad_wishes_are_named() -> None:
    with pytest.raises(InputError, match="no failure 'near_miss'"):
        play_expert("stack", 0, style=Style(failure="near_miss"))
    with pytest.raises(InputError, match="out of range"):
        Style(noise=-1.0)
    with pytest.raises(InputError, match="at least one family"):
        next(play_episodes((), 1))
    with pytest.raises(InputError, match="without action noise"):
        play_expert(TabletopEnv(action_noise=0.1), 0)
