"""Advantages: golden numbers, groups without signal, weights of lengths, and GAE against plain sums."""

import pytest
import torch

from wamlab.errors import InputError
from wamlab.rl.advantage import (
    DAPO,
    DR_GRPO,
    FLOW_GRPO,
    GRPO,
    SIMPLE_VLA,
    GroupConfig,
    chunk_advantages,
    episode_weights,
    generalized_advantages,
    group_advantages,
)

REWARDS = torch.tensor([[1, 0, 0, 1, 1, 0, 0, 0]], dtype=torch.float64)


def test_grpo_has_the_golden_advantages() -> None:
    found = group_advantages(REWARDS, GRPO).advantage[0]
    assert found.tolist() == pytest.approx([{1: 1.2076, 0: -0.7246}[int(r)] for r in REWARDS[0]], abs=5e-5)


def test_the_population_s_spread_differs_and_no_spread_leaves_the_difference() -> None:
    population = group_advantages(REWARDS, GroupConfig(ddof=0)).advantage[0]
    assert population[:2].tolist() == pytest.approx([1.290992, -0.774595], abs=1e-5)
    assert group_advantages(REWARDS, DR_GRPO).advantage[0, :2].tolist() == [0.625, -0.375]


def test_one_spread_for_all_groups_waits_for_all_of_them() -> None:
    rewards = torch.cat([REWARDS, REWARDS.flip(1) * 3])
    found = group_advantages(rewards, FLOW_GRPO).advantage
    assert found[0, 0].item() == pytest.approx(0.625 / (rewards.numpy().std() + 1e-4), abs=1e-9)
    assert not FLOW_GRPO.is_order_free
    assert GRPO.is_order_free


def test_a_group_without_spread_teaches_nothing_and_is_counted() -> None:
    found = group_advantages(torch.tensor([[1.0] * 4, [0.0, 1.0, 1.0, 1.0], [0.1] * 4]), GRPO)
    assert found.is_flat.tolist() == [True, False, True]
    assert found.advantage.any(dim=1).tolist() == [False, True, False]


def test_groups_too_easy_or_too_hard_are_dropped() -> None:
    rewards = torch.zeros(3, 20)
    rewards[0, :1], rewards[1, :2], rewards[2, :19] = 1, 1, 1
    found = group_advantages(rewards, SIMPLE_VLA)
    assert found.is_kept.tolist() == [False, True, False]
    assert found.advantage.any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("scale", ["group", "all"])
def test_advantages_sum_to_zero_and_do_not_depend_on_the_rewards_unit(scale: str) -> None:
    config, rewards = GroupConfig(scale=scale, epsilon=0.0), torch.rand(5, 8, dtype=torch.float64)
    found = group_advantages(rewards, config).advantage
    assert found.sum(dim=1).abs().max() < 1e-12
    assert torch.allclose(group_advantages(100 * rewards - 7, config).advantage, found)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(InputError, match="a group of 1 has no spread with ddof 1: play at least 2 a group"):
        group_advantages(torch.ones(3, 1), GRPO)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": "batch"}, "group, all, none"),
        ({"ddof": 2}, "ddof is 2"),
        ({"keep_from": 1.0, "keep_to": 0.0}, "above"),
    ],
)
def test_a_wrong_config_is_refused(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        GroupConfig(**change)


def test_weights_make_the_three_means() -> None:
    lengths, cap = torch.tensor([2, 5, 1]), 6
    losses = [torch.rand(n, dtype=torch.float64) for n in lengths.tolist()]
    wanted = {
        "chunk": torch.cat(losses).mean(),
        "episode": torch.stack([own.mean() for own in losses]).mean(),
        "constant": torch.cat(losses).sum() / (3 * cap),
    }
    for name, expected in wanted.items():
        weights, parts = episode_weights(lengths, cap, name)
        total = sum(weight * own.sum() for weight, own in zip(weights, losses, strict=True))
        assert (total / parts.sum()).item() == pytest.approx(expected.item(), abs=1e-12)
    assert (GRPO.length_weighting, DAPO.length_weighting, DR_GRPO.length_weighting) == ("episode", "chunk", "constant")


def test_an_episode_longer_than_its_cap_is_refused() -> None:
    with pytest.raises(InputError, match="episodes have 1 to 6 chunks, not 2 to 7"):
        episode_weights(torch.tensor([2, 7]), 6, "chunk")


def test_gae_with_full_traces_is_the_discounted_sum_minus_the_value() -> None:
    rewards, values = torch.rand(3, 6, dtype=torch.float64), torch.rand(3, 7, dtype=torch.float64)
    is_done = torch.zeros(3, 6, dtype=torch.bool)
    is_done[0, 5] = is_done[1, 2] = True  # the second row holds two episodes, the third is cut off at the end
    advantages, targets = generalized_advantages(rewards, values, is_done, discount=0.9, trace=1.0)
    for row in range(3):
        for chunk in range(6):
            total, factor = 0.0, 1.0
            for later in range(chunk, 6):
                total += factor * rewards[row, later].item()
                factor *= 0.9
                if is_done[row, later]:
                    break
            else:
                total += factor * values[row, 6].item()
            assert targets[row, chunk].item() == pytest.approx(total, abs=1e-12)
            assert advantages[row, chunk].item() == pytest.approx(total - values[row, chunk].item(), abs=1e-12)


def test_gae_without_traces_is_one_step_s_surprise() -> None:
    rewards, values = torch.rand(2, 3, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)
    is_done = torch.tensor([[False, False, True]] * 2)
    advantages, _ = generalized_advantages(rewards, values, is_done, discount=0.9, trace=0.0)
    assert torch.allclose(advantages[:, 0], rewards[:, 0] + 0.9 * values[:, 1] - values[:, 0])
    assert torch.allclose(advantages[:, 2], rewards[:, 2] - values[:, 2])


def test_chunks_are_compared_with_their_siblings_chunks_of_the_same_number() -> None:
    """Two members of two chunks, a third of three: discounted rewards to come less the mean of that number."""
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.5, 0.5, 2.0], dtype=torch.float64)
    episode = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    found = chunk_advantages(rewards, episode, discount=0.5, config=DR_GRPO)
    returns = torch.tensor([0.5, 1.0, 0.0, 0.0, 1.25, 1.5, 2.0], dtype=torch.float64)
    means = torch.tensor([1.75 / 3, 2.5 / 3], dtype=torch.float64)
    wanted = torch.cat([returns[:2] - means, returns[2:4] - means, returns[4:6] - means, torch.zeros(1)])
    torch.testing.assert_close(found, wanted)
    scaled = chunk_advantages(rewards, episode, discount=0.5, config=GRPO)
    torch.testing.assert_close(scaled, wanted / (wanted.std() + 1e-6))
    shifted = rewards + torch.tensor([7.0, 0, 7, 0, 7, 0, 0], dtype=torch.float64)  # what all start with says nothing
    torch.testing.assert_close(chunk_advantages(shifted, episode, discount=0.5, config=DR_GRPO), wanted)
