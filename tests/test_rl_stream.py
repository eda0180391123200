"""Learning from groups as they finish is learning from all of them at once, in whatever order they come."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from small_policy import SDE, SmallNet
from test_rl_recipe import small, start  # noqa: F401
from test_rl_update import CAP, GROUPS, MEMBERS, episodes
from torch import Tensor, nn

from wamlab.errors import InputError
from wamlab.lab.run import Run, read_metrics
from wamlab.recipes.rl_config import RlRecipe, rl_tabletop_grpo
from wamlab.recipes.rl_run import open_bench, post_train, start_rl
from wamlab.rl.advantage import DAPO, DR_GRPO, GRPO, SIMPLE_VLA, GroupConfig
from wamlab.rl.objectives import policy_loss
from wamlab.rl.stream import StreamedGroups, in_number_order
from wamlab.rl.update import joined
from wamlab.train import TrainConfig, train
from wamlab.types import Loss


class Kept(torch.optim.SGD):
    """Keeps the gradients of its one step."""

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.kept = [p.grad.clone() for p in self.param_groups[0]["params"] if p.grad is not None]


def gradient(
    net: nn.Module, loss: Loss, example: object, num_parts: int, scale: Callable[[Any], float] | None
) -> tuple[list[Tensor], float]:
    """Let the one training loop come to its optimiser; return the gradients there and the loss."""
    config = TrainConfig(
        num_steps=1, batch_size=num_parts, num_micro_batches=num_parts, max_gradient_norm=1e9, has_bf16=False
    )
    optimizer = Kept([p for p in net.parameters() if p.requires_grad], lr=1.0)
    (record,) = train(loss, [example], optimizer, config, scale=scale)
    return optimizer.kept, record.loss


def stepped(small_net: SmallNet, example: object, num_parts: int) -> tuple[list[Tensor], float]:
    """Return the small network's gradients."""
    net = deepcopy(small_net)
    scale = StreamedGroups.factor if isinstance(example, StreamedGroups) else None
    return gradient(net, partial(policy_loss, net, SDE), example, num_parts, scale)


def far(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference relative to the largest entry."""
    largest = max(g.abs().max().item() for g in wanted)
    assert largest > 1e-4 and len(found) == len(wanted)
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)) / largest


@pytest.mark.parametrize("config", [GRPO, DAPO, DR_GRPO, SIMPLE_VLA], ids=["GRPO", "DAPO", "Dr. GRPO", "with filter"])
def test_a_stream_in_any_order_and_any_parts_takes_the_step_of_the_joined_batch(config: GroupConfig) -> None:
    net = SmallNet()
    groups = list(episodes(net, 0, config))
    wanted, loss = stepped(net, joined(groups, 0), 1)
    for number, order in enumerate(list(permutations(range(GROUPS)))[::4]):
        parts = 1 + number % 3
        stream = StreamedGroups([groups[i] for i in order], GROUPS, 0, parts_a_group=parts)
        found, found_loss = stepped(net, stream, len(stream))
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert far(found, wanted) < 1e-13
        assert stream.num_flat == 1 and stream.num_samples == sum(len(group.example) for group in groups)


def test_a_fixed_divisor_would_be_another_step_where_lengths_decide_it() -> None:
    """The law above can fail: DAPO's divisor is no constant of the recipe."""
    groups = list(episodes(SmallNet(), 0, DAPO))
    assert sum(group.divisor for group in groups) not in (GROUPS * MEMBERS, GROUPS * MEMBERS * CAP)


def test_groups_of_another_policy_and_streams_that_end_early_or_late_are_refused() -> None:
    net = SmallNet()
    groups = list(episodes(net, 0, GRPO))
    with pytest.raises(RuntimeError, match="ended after 3 of 4"):
        stepped(net, StreamedGroups(groups[:3], GROUPS, 0), GROUPS)
    with pytest.raises(RuntimeError, match="more than 3 groups"):
        stepped(net, StreamedGroups(groups, 3, 0), 3)
    with pytest.raises(RuntimeError, match="twice"):
        stepped(net, StreamedGroups([groups[0], groups[0]], 2, 0), 2)
    with pytest.raises(RuntimeError, match="staleness"):
        stepped(net, StreamedGroups(groups, GROUPS, 1), GROUPS)
    with pytest.raises(InputError, match="one at a time"):
        stepped(net, StreamedGroups(groups, GROUPS, 0), 2)
    with pytest.raises(InputError, match="at least 2 groups"):
        StreamedGroups(groups[:1], 1, 0)
    flat = [replace(group, divisor=0.0) for group in groups]
    with pytest.raises(InputError, match="no group was kept"):
        stepped(net, StreamedGroups(flat, GROUPS, 0), GROUPS)


def test_in_number_order_the_bits_are_those_of_any_arrival() -> None:
    net = SmallNet()
    groups = list(episodes(net, 0, DAPO))
    ends = [stepped(net, StreamedGroups(in_number_order(own), GROUPS, 0), GROUPS)[0] for own in (groups, groups[::-1])]
    assert all(map(torch.equal, *ends))
    with pytest.raises(RuntimeError, match="group 1 never came"):
        list(in_number_order([groups[0], groups[2]]))


def test_the_real_network_learns_the_same_from_a_stream_to_a_millionth(start: Run) -> None:  # noqa: F811
    """In float32, DAPO's divisor by number of chunks, groups in both orders; relative to the largest entry."""
    recipe = replace(small(rl_tabletop_grpo()), num_groups=3)
    bench = open_bench(recipe, start)
    wanted, _ = gradient(bench.net, bench.loss, bench.update_from(0), 1, bench.scale)
    groups = bench.groups_learnt
    stream = bench.stream_from(0)
    for example in (stream, StreamedGroups(groups[::-1], 3, 0, parts_a_group=2)):
        found, _ = gradient(bench.net, bench.loss, example, len(example), bench.scale)
        assert far(found, wanted) < 1e-6


def test_while_a_stream_is_learnt_from_the_rest_is_still_played(start: Run) -> None:  # noqa: F811
    recipe: RlRecipe = replace(small(rl_tabletop_grpo()), num_groups=3)
    recipe = replace(recipe, play=replace(recipe.play, num_slots=2, rule="fifo"))
    bench = open_bench(recipe, start)
    stream = bench.stream_from(0)
    bench.loss(stream[0:1]).total.backward()
    assert "success" not in bench.notes and len(bench.groups_learnt) == 1
    with pytest.raises(RuntimeError, match="took 1 of 3"):
        bench.scale(stream)


def test_streamed_or_not_a_run_ends_alike_and_counts_the_chunks(start: Run, tmp_path: Path) -> None:  # noqa: F811
    ends: list[tuple[nn.Module, list[dict]]] = []
    for is_streamed in (True, False):
        recipe = replace(small(rl_tabletop_grpo(), num_steps=2), num_epochs=2, is_streamed=is_streamed)
        bench = open_bench(recipe, start)
        with start_rl(bench, start, tmp_path / str(is_streamed)) as run:
            list(post_train(bench, run))
        ends.append((bench.net, read_metrics(run)[0]))
    (streamed, records), (waited, others) = ends
    for a, b in zip(streamed.parameters(), waited.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    assert records[0]["num_samples"] == others[0]["num_samples"] > 4
