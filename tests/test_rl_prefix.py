"""Siblings share what they have seen alike: same bits as without, and less work."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from wamlab.data.normalize import Normalizers, Quantiles
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import tiny
from wamlab.recipes.rl_policy import ChainPolicy
from wamlab.rl.flow_policy import FlowSde
from wamlab.rl.play import PlayConfig, play
from wamlab.rl.segments import Asked, Group, Planned, Setting
from wamlab.sim.vector import TabletopVector
from wamlab.types import Observation

SETTING = Setting(sampler="test", is_exact=True)
GROUPS = [Group(0, "reach", seed=5, cap=2), Group(1, "push", seed=6, cap=3)]
NUM_MEMBERS = 4


def make_table(task: str) -> TabletopVector:
    return TabletopVector(1, task, size=(32, 32), cameras=("top", "wrist"))


def policy_of(bench: Workbench, *, is_shared: bool) -> ChainPolicy:
    one = np.ones(4)
    normalizers = Normalizers(Quantiles(-one, one), Quantiles(np.zeros(5), np.ones(5)), (), 4, 5)
    return ChainPolicy(bench, normalizers, FlowSde(level_cap=0.5), is_prefix_shared=is_shared)


@pytest.fixture
def bench() -> Workbench:
    recipe = tiny()
    recipe = replace(
        recipe,
        robot=replace(recipe.robot, view_height_px=32, view_width_px=32),
        model=replace(recipe.model, dim=32, layers=2, heads=2, ffn_dim=64, mlp_dim=32),
        sampler=replace(recipe.sampler, num_steps=2),
    )
    torch.manual_seed(0)
    bench = Workbench(recipe)
    for p in bench.net.parameters():  # heads start at zero
        if not p.any():
            nn.init.normal_(p, std=0.05)
    return bench


def bits_of(policy: ChainPolicy, setting: Setting) -> dict[tuple[int, int], dict[str, bytes]]:
    config = PlayConfig(num_members=NUM_MEMBERS, num_slots=4)
    played = play(GROUPS, setting, policy, make_table, config=config)
    segments = [segment for group in played for segment in group.segments]
    return {s.key: {name: np.ascontiguousarray(v).tobytes() for name, v in s.chunks.items()} for s in segments}


def test_one_episode_at_a_time_shared_prefixes_change_no_bit(bench: Workbench) -> None:
    shared, apart = policy_of(bench, is_shared=True), policy_of(bench, is_shared=False)
    assert bits_of(shared, SETTING) == bits_of(apart, SETTING)
    counts, whole = shared.prefixes.counts, apart.prefixes.counts
    assert (counts.num_chunks, counts.num_firsts) == (whole.num_chunks, whole.num_firsts) == (20, 8)
    assert counts.num_frames == whole.num_frames - 2 * (NUM_MEMBERS - 1) and counts.num_texts == 2
    assert counts.shared_firsts == (NUM_MEMBERS - 1) / NUM_MEMBERS and whole.num_texts == 20


def test_together_shared_prefixes_change_no_more_than_rounding_does(bench: Workbench) -> None:
    asked: list[Asked] = []
    policy = policy_of(bench, is_shared=False)

    def listening(question: Asked) -> Planned:
        asked.append(question)
        return policy(question)

    play_setting = replace(SETTING, is_exact=False)
    list(play(GROUPS, play_setting, listening, make_table, config=PlayConfig(num_members=3, num_slots=4)))
    mixed = [question for question in asked if 0 < sum(not key[4] for key in question.keys.tolist()) < 4]
    assert mixed  # beginners beside others
    shared = policy_of(bench, is_shared=True)
    for question in asked:
        ours, theirs = shared(question), policy(question)
        for name, value in theirs.kept.items():
            np.testing.assert_allclose(ours.kept[name], value, atol=2e-5, err_msg=name)
    assert shared.prefixes.counts.num_frames == policy.prefixes.counts.num_frames / 2 - 2 * 2


def question_of(instruction: str, shade: int, *, chunk: int = 0) -> Asked:
    frames = {name: np.full((1, 32, 32, 3), shade, np.uint8) for name in ("top", "wrist")}
    observation = Observation(frames, np.zeros((1, 5), np.float32), [instruction], np.zeros(1, int))
    return Asked(observation, np.array([[0, 0, 0, 0, chunk]], np.uint64), [{}], 0)


def test_only_what_is_seen_alike_is_shared_and_new_weights_are_noticed(bench: Workbench) -> None:
    shared, apart = (policy_of(bench, is_shared=is_shared) for is_shared in (True, False))
    questions = [question_of(text, shade) for text in ("reach", "push") for shade in (9, 200)]
    questions += [question_of("reach", 9, chunk=1)]

    def agree() -> bool:
        pairs = [(shared(question).kept, apart(question).kept) for question in questions]
        return all(np.array_equal(ours[name], theirs[name]) for ours, theirs in pairs for name in theirs)

    assert agree() and agree()
    assert shared.prefixes.counts.num_frames == 4 + 2
    with torch.no_grad():
        for parameter in bench.net.parameters():
            parameter.mul_(1.1)
    assert agree()
    assert shared.prefixes.counts.num_frames == 4 + 2 + 5


def test_first_frames_leave_when_there_is_no_room_for_all(bench: Workbench) -> None:
    shared = policy_of(bench, is_shared=True)
    shared(question_of("reach", 0))
    _, history = shared.prefixes(question_of("reach", 0))
    shared.prefixes.most_bytes = 2 * (history.num_bytes + history.context_bytes)
    for shade in (1, 0, 2, 0, 1):  # 1 leaves for 2, as 0 was used later
        shared(question_of("reach", shade))
    assert shared.prefixes.counts.num_frames == 4
