"""One update an iteration: any order of groups, any split, one training loop; stale groups are refused."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import permutations

import pytest
import torch
from small_policy import DOUBLE, SDE, SmallNet, batch_of, example_of, play
from torch import Tensor

from wamlab.errors import InputError
from wamlab.rl.advantage import DAPO, DR_GRPO, FLOW_GRPO, GRPO, SIMPLE_VLA, GroupConfig
from wamlab.rl.objectives import PolicyConfig, policy_loss
from wamlab.rl.update import (
    FinishedGroup,
    GradientSum,
    GroupStream,
    check_ratios,
    finish_group,
    iterations,
    joined,
    known_divisor,
)
from wamlab.train import TrainConfig, make_optimizer, train

GROUPS, MEMBERS, CAP = 4, 4, 5


def episodes(
    net: SmallNet, version: int, config: GroupConfig, order: list[int] | None = None
) -> Iterator[FinishedGroup]:
    """Play groups of episodes of 1 to 5 chunks, in the given order; who moves further than half of a group succeeds."""
    for number in order or range(GROUPS):
        generator = torch.Generator().manual_seed(number)
        lengths = torch.randint(1, CAP + 1, (MEMBERS,), generator=generator)
        episode = torch.arange(MEMBERS).repeat_interleave(lengths)
        task = 1.0 if number % 2 else -1.0
        batch = batch_of(torch.tensor([[task, 1.0]], dtype=DOUBLE).expand(len(episode), 2))
        chain = play(net, batch, seed=100 * version + number)
        moved = chain.batch.actions[..., 0].mean(dim=1) * task
        means = torch.zeros(MEMBERS, dtype=DOUBLE).index_add(0, episode, moved) / lengths
        rewards = (means > means.median()).to(DOUBLE) * (number != 3)  # nobody solves group 3

        def build(advantage: Tensor, weight: Tensor, chain=chain):
            return replace(example_of(chain, advantage), weight=weight)

        yield finish_group(number, version, rewards, episode, build, cap=CAP, config=config)


def summed(net: SmallNet, groups: list[FinishedGroup], chunks_per_call: int | None = None) -> dict[str, Tensor]:
    net.zero_grad()
    total = GradientSum(partial(policy_loss, net, SDE), policy_version=0)
    for group in groups:
        total.add(group, chunks_per_call=chunks_per_call)
    total.finish(net.parameters())
    assert total.num_groups == len(groups)
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def close(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float) -> bool:
    assert first.keys() == second.keys()
    assert max(g.abs().max().item() for g in first.values()) > 1e-2
    return all((first[name] - second[name]).abs().max().item() < tolerance for name in first)


@pytest.mark.parametrize("config", [GRPO, DAPO, DR_GRPO, SIMPLE_VLA], ids=["GRPO", "DAPO", "Dr. GRPO", "with filter"])
def test_any_order_of_groups_gives_the_gradient_of_the_whole_batch(config: GroupConfig) -> None:
    net = SmallNet()
    groups = list(episodes(net, 0, config))
    assert [group.is_flat for group in groups] == [False, False, False, True]
    wanted = summed(net, groups)
    for order in permutations(range(GROUPS)):
        assert close(summed(net, [groups[i] for i in order], chunks_per_call=3), wanted, 1e-13)
    net.zero_grad()
    policy_loss(net, SDE, joined(groups[::-1], 0)).total.backward()
    assert close({n: p.grad for n, p in net.named_parameters() if p.grad is not None}, wanted, 1e-13)


def test_a_dropped_group_changes_nothing_and_a_mean_of_means_is_another_update() -> None:
    net = SmallNet()
    groups = list(episodes(net, 0, SIMPLE_VLA))
    assert close(summed(net, groups), summed(net, groups[:3]), 1e-15)
    assert not groups[3].example.weight.any()  # nor would a KL term count it
    means = [
        replace(g, example=replace(g.example, weight=g.example.weight / max(g.divisor, 1)), divisor=1.0) for g in groups
    ]
    assert not close(summed(net, means[:3]), summed(net, groups), 1e-4)


def test_joined_groups_are_bit_for_bit_the_same_in_any_order() -> None:
    net = SmallNet()
    groups = list(episodes(net, 0, DAPO))
    losses = [policy_loss(net, SDE, joined(own, 0)).total for own in (groups, groups[::-1])]
    assert torch.equal(*losses)


@pytest.mark.parametrize("config", [GRPO, DR_GRPO], ids=["GRPO", "Dr. GRPO"])
def test_the_training_loop_takes_groups_as_they_finish(config: GroupConfig) -> None:
    """A stream in any order and the joined batch make the same step of the one training loop."""
    start = SmallNet()
    divisor = known_divisor(GROUPS, MEMBERS, CAP, config)
    weights = []
    for kind in ("stream", "stream backwards", "joined"):
        net = deepcopy(start)
        settings = TrainConfig(num_steps=1, batch_size=GROUPS, num_micro_batches=GROUPS, learning_rate=1e-2)
        order = list(range(GROUPS))[:: -1 if kind == "stream backwards" else 1]
        source = iterations(
            lambda version, net=net, order=order: episodes(net, version, config, order), GROUPS, divisor
        )
        if kind == "joined":
            source = [joined(list(episodes(net, 0, config)), 0)]
        (record,) = train(partial(policy_loss, net, SDE), source, make_optimizer(net, settings), settings)
        weights.append((dict(net.named_parameters()), record.gradient_norm, record.loss))
    for other in weights[1:]:
        assert other[1:] == pytest.approx(weights[0][1:], rel=1e-6)
        assert all(torch.allclose(p, other[0][n], atol=1e-7) for n, p in weights[0][0].items())
    assert not torch.allclose(weights[0][0]["out.weight"], start.out.weight, atol=1e-4)


def test_success_rises_in_the_training_loop() -> None:
    net = SmallNet(width=16)
    settings = TrainConfig(num_steps=15, batch_size=GROUPS, num_micro_batches=GROUPS, learning_rate=3e-2)
    goodness = torch.zeros(15)

    def groups(version: int) -> Iterator[FinishedGroup]:
        for group in episodes(net, version, DR_GRPO):
            batch = group.example.chain.batch
            goodness[version] += (batch.actions[..., 0] * batch.state[:, :, 0]).mean().item() / GROUPS
            yield group

    divisor = known_divisor(GROUPS, MEMBERS, CAP, DR_GRPO)
    loss = partial(policy_loss, net, SDE)
    records = list(train(loss, iterations(groups, GROUPS, divisor), make_optimizer(net, settings), settings))
    assert len(records) == 15
    assert goodness[-3:].mean() > goodness[:3].mean() + 0.3


def test_stale_repeated_and_missing_groups_are_refused() -> None:
    net = SmallNet()
    groups = list(episodes(net, 0, DR_GRPO))
    with pytest.raises(RuntimeError, match="group 0 was played by policy 0, but policy 1 is to learn"):
        GradientSum(partial(policy_loss, net, SDE), policy_version=1).add(groups[0])
    with pytest.raises(RuntimeError, match="staleness must be 0"):
        joined(groups, 1)
    with pytest.raises(RuntimeError, match="staleness must be 0"):
        GroupStream(groups, GROUPS, 1.0, 1)[0:1]
    stream = GroupStream([groups[0], groups[0]], GROUPS, 1.0, 0)
    _ = stream[0:1]
    with pytest.raises(RuntimeError, match="group 0 has come twice"):
        _ = stream[1:2]
    stream = GroupStream(groups[:1], GROUPS, 1.0, 0)
    _ = stream[0:1]
    with pytest.raises(RuntimeError, match="ended after 1 of 4 groups"):
        _ = stream[1:2]
    with pytest.raises(InputError, match="num_micro_batches"):
        _ = GroupStream(groups, GROUPS, 1.0, 0)[0:2]
    total = GradientSum(partial(policy_loss, net, SDE), policy_version=0)
    with pytest.raises(InputError, match="no group was kept"):
        total.finish(net.parameters())
    total.add(groups[0])
    total.finish(net.parameters())
    with pytest.raises(RuntimeError, match="is finished"):
        total.add(groups[1])


def test_what_needs_all_groups_is_refused_before_it_is_wrong() -> None:
    with pytest.raises(InputError, match='scale "all" wait'):
        next(episodes(SmallNet(), 0, FLOW_GRPO))
    for config in (DAPO, SIMPLE_VLA, GroupConfig(keep_from=0.1)):
        with pytest.raises(InputError, match="known at the end only"):
            known_divisor(4, 4, 5, config)
    with pytest.raises(InputError, match="at least 2"):
        next(iterations(lambda version: [], 1, 1.0))


def test_a_trainer_that_is_not_the_rollout_is_noticed() -> None:
    net = SmallNet()
    example = joined(list(episodes(net, 0, GRPO)), 0)
    check_ratios(policy_loss(net, SDE, example))
    chain = example.chain
    other = replace(chain, batch=replace(chain.batch, state=chain.batch.state + 0.3))
    with pytest.raises(RuntimeError, match="not the rollout's"):
        check_ratios(policy_loss(net, SDE, replace(example, chain=other), PolicyConfig()))
