"""Played episodes: the same whatever the rule, the places, the segments, and whoever goes on from where."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from network_player import NetworkHands
from players import EXACT, Forgetful, SmallHands, all_bits, bits_of, groups_of, make_seen_table, make_table

from wamlab.errors import InputError
from wamlab.rl.play import PlayConfig, play
from wamlab.rl.records import forget_before
from wamlab.rl.schedule import ScheduleConfig
from wamlab.rl.segments import Group, Planned
from wamlab.rl.store import StoreConfig

ONE_AFTER_ANOTHER = PlayConfig(rule="fifo", num_members=3, num_slots=1)
Bits = dict[tuple[int, int], tuple]


@pytest.fixture(scope="module")
def alone() -> Bits:
    """Return four groups, an episode at a time."""
    return all_bits(list(play(groups_of(4), EXACT, SmallHands(), make_table, config=ONE_AFTER_ANOTHER)))


def config_of(rule: str, num_slots: int, num_workers: int, segment_chunks: int, **others) -> PlayConfig:
    schedule = ScheduleConfig(segment_chunks=segment_chunks, tail_chunks=1)
    return PlayConfig(rule, 3, num_slots, num_workers, schedule, **others)


@pytest.mark.parametrize(
    "config",
    [
        config_of("context", 4, 1, 2),
        config_of("rounds", 2, 3, 1),
        config_of("longest group", 3, 2, 3),
        config_of("static", 4, 2, 8),
        config_of("padded", 4, 1, 8),
        config_of("context", 2, 2, 2, memory_bytes=30, state_bytes=10, chunk_bytes=1),
    ],
    ids=lambda c: f"{c.rule}-{c.num_slots}x{c.num_workers}-{c.schedule.segment_chunks}",
)
def test_trajectories_are_bit_equal_whoever_plays_them_when(config: PlayConfig, alone: Bits) -> None:
    groups = groups_of(4)
    rollout = play(groups, EXACT, SmallHands(), make_table, config=config)
    together = list(rollout)
    assert all_bits(together) == alone
    assert {played.group for played in together} == set(groups)
    timeline = rollout.timeline
    assert timeline.finish_s.keys() == {(g, m) for g in range(4) for m in range(3)}
    assert timeline.num_chunks == sum(s.num_chunks for played in together for s in played.segments)
    if config.num_workers > 1 and config.rule == "context":
        assert timeline.num_moves > 0


def test_the_real_network_plays_the_same_in_any_company() -> None:
    groups, hands = groups_of(2, cap=4), NetworkHands()
    alone = list(play(groups, EXACT, hands, make_seen_table, config=ONE_AFTER_ANOTHER))
    others = list(play(groups, EXACT, hands, make_seen_table, config=config_of("context", 3, 2, 1)))
    assert all_bits(others) == all_bits(alone)
    batched = list(
        play(groups, replace(EXACT, is_exact=False), hands, make_seen_table, config=config_of("fifo", 6, 1, 8))
    )
    first = {s.key: s.chunks["actions"][0] for p in alone for s in p.segments}
    for played in batched:
        for segment in played.segments:  # one call for all: equal to rounding until that moves something
            np.testing.assert_allclose(segment.chunks["actions"][0], first[segment.key], atol=1e-5)


def test_members_differ_and_iterations_and_seeds_too() -> None:
    (played,) = play(groups_of(1), EXACT, SmallHands(), make_table, config=ONE_AFTER_ANOTHER)
    assert len({bits_of(segment)[1:] for segment in played.segments}) == 3
    assert len({segment.chunks["state"][0].tobytes() for segment in played.segments}) == 1  # they start alike
    for other in (replace(EXACT, seed=4), replace(EXACT, iteration=3)):
        (changed,) = play(groups_of(1), other, SmallHands(), make_table, config=ONE_AFTER_ANOTHER)
        assert bits_of(changed.segments[0]) != bits_of(played.segments[0])


def test_a_trajectory_holds_a_row_for_every_chunk() -> None:
    setting = replace(EXACT, has_frames=True)
    (played,) = play([Group(0, "reach", 5, cap=12)], setting, SmallHands(), make_seen_table, config=ONE_AFTER_ANOTHER)
    for segment in played.segments:
        n = segment.num_chunks
        assert segment.is_done and segment.num_ticks == segment.chunks["num_ticks"].sum() <= 40
        assert segment.chunks["frames.top"].shape == (n, 32, 32, 3)
        assert segment.chunks["actions"].shape == segment.chunks["noise"].shape == (n, 4, 4)
        assert segment.chunks["rewards"].shape == (n, 4) and segment.chunks["state"].shape == (n, 5)
        assert segment.chunks["rewards"].any() == segment.is_success
        assert n == 10 or segment.chunks["num_ticks"][-1] <= 4  # 40 ticks are the table's limit


def test_environments_without_snapshots_are_replayed(alone: Bits) -> None:
    rollout = play(groups_of(4), EXACT, SmallHands(), Forgetful, config=config_of("context", 1, 3, 1))
    assert all_bits(list(rollout)) == alone
    assert rollout.timeline.num_moves > 0


def test_finished_episodes_cost_nothing_but_under_the_padded_rule() -> None:
    calls: dict[str, int] = {}
    for rule in ("padded", "context"):
        hands, number = SmallHands(), [0]

        def counted(asked, hands=hands, number=number) -> Planned:
            number[0] += len(asked.keys)
            return hands(asked)

        list(play([Group(0, "reach", 8, cap=30)], EXACT, counted, make_table, config=config_of(rule, 3, 1, 8)))
        calls[rule] = number[0]
    assert calls["padded"] == 90 and calls["context"] <= 30  # the table ends at 10 chunks


def test_a_rollout_goes_on_from_its_store(tmp_path: Path, alone: Bits) -> None:
    groups, config = groups_of(4), config_of("context", 4, 1, 2)
    store = StoreConfig(disk_folder=tmp_path, device="cpu", device_bytes=5000).open()
    first = play(groups, EXACT, SmallHands(), make_table, config=config, store=store)
    played = next(first)
    first.close()
    num_before = first.timeline.num_chunks
    again = play(groups, EXACT, SmallHands(), make_table, config=config, store=StoreConfig(tmp_path).open())
    resumed = list(again)
    assert all_bits(resumed) == alone
    assert all_bits([played]).items() <= all_bits(resumed).items()  # finished ones are told again
    total = sum(segment.num_chunks for group in resumed for segment in group.segments)
    assert total - num_before <= again.timeline.num_chunks < total
    assert again.timeline.num_chunks - (total - num_before) <= 4 * 2  # what had not reached its segment's end
    assert forget_before(store, 3) > 0 and not list(store)


def test_a_store_of_other_weights_is_refused(tmp_path: Path) -> None:
    config = config_of("context", 4, 1, 2)
    store = StoreConfig(disk_folder=tmp_path).open()
    next(play(groups_of(2), EXACT, SmallHands(), make_table, config=config, store=store))
    for other in (replace(EXACT, policy_version=1), replace(EXACT, sampler="other")):
        with pytest.raises(InputError, match="use a store of its own"):
            play(groups_of(2), other, SmallHands(1), make_table, config=config, store=store)


def test_wrong_input_is_told() -> None:
    with pytest.raises(InputError, match=r"play\.rule"):
        PlayConfig(rule="oracle")
    with pytest.raises(InputError, match="same number"):
        play([*groups_of(1), *groups_of(1)], EXACT, SmallHands(), make_table)
    with pytest.raises(InputError, match="need more memory"):
        list(play(groups_of(1), EXACT, SmallHands(), make_table, config=PlayConfig(memory_bytes=1, state_bytes=2)))
    with pytest.raises(InputError, match="choose other names"):
        list(play(groups_of(1), EXACT, lambda a: Planned(np.zeros((len(a.keys), 4, 4)), {"state": np.zeros(8)}),
                  make_table))  # fmt: skip
