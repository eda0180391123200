"""Steps with a loss that is no number, or with an exploded gradient: left out by rule, bounded, counted, resumed."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_train import CONFIG, batches, start

from wamlab.checkpoint import load_checkpoint, write_checkpoint
from wamlab.errors import InputError
from wamlab.flow import flow_loss
from wamlab.speed.step_rule import NUM_NEEDED, NUM_REMEMBERED, StepRule
from wamlab.train import TrainConfig, noised_examples, train


def with_damage(first: int, damage: dict[int, float]):
    """Yield the batches after ``first``, some with an action multiplied."""
    for step, batch in enumerate(batches(first), first + 1):
        if step in damage:
            batch.actions[0, 0, 0] *= damage[step]
        yield batch


def trained(config: TrainConfig, damage: dict[int, float], parts: Any = None, first: int = 0, rule: Any = None):
    """Train to the end; return the parts and the records."""
    net, optimizer, ema = parts or start(config)
    examples = noised_examples(with_damage(first, damage), seed=0, first_step=first)
    loss = partial(flow_loss, net)
    steps = train(loss, examples, optimizer, config, first_step=first, ema=ema, rule=rule)
    return SimpleNamespace(net=net, optimizer=optimizer, ema=ema, records=list(steps))


def state_of(parts: Any) -> list[torch.Tensor]:
    kept = [value for state in parts.optimizer.state.values() for value in state.values()]
    return [*parts.net.parameters(), *parts.ema.average.values(), *kept, torch.get_rng_state()]


@pytest.mark.parametrize(("factor", "rule"), [(1e38, {"on_nan": "skip"}), (1e4, {"max_norm_ratio": 20.0})])
def test_a_step_that_is_left_out_changes_nothing_but_its_count(factor: float, rule: dict) -> None:
    config = replace(CONFIG, num_steps=NUM_NEEDED + 1, has_bf16=False, warmup_fraction=0.0, **rule)
    before = trained(replace(config, num_steps=NUM_NEEDED), {})
    known = StepRule(config.on_nan, config.max_skipped, config.max_norm_ratio)
    known.recall(vars(record) for record in before.records)
    kept = [tensor.clone() for tensor in state_of(before)]
    parts = before.net, before.optimizer, before.ema
    with pytest.warns(UserWarning, match=f"step {NUM_NEEDED + 1} is left out: the "):
        after = trained(config, {NUM_NEEDED + 1: factor}, parts, NUM_NEEDED, known)
    assert [record.num_skipped for record in after.records] == [1]
    assert all(torch.equal(a, b) for a, b in zip(kept, state_of(after), strict=True))
    assert all(p.grad is None for p in after.net.parameters())


@pytest.mark.filterwarnings("ignore:step .* is left out")
def test_a_run_with_left_out_steps_goes_on_bit_for_bit(tmp_path: Path) -> None:
    damage = {5: 1e38, 24: 1e4, 30: 1e38}
    config = replace(CONFIG, num_steps=32, has_bf16=False, on_nan="skip", max_norm_ratio=20.0)
    whole = trained(config, damage)
    assert [r.step for r in whole.records if not math.isfinite(r.loss)] == [5, 30]
    assert whole.records[-1].num_skipped == 3
    first = start(config)
    examples = noised_examples(with_damage(0, damage), seed=0)
    steps = train(partial(flow_loss, first[0]), examples, first[1], config, ema=first[2])
    records = [next(steps) for _ in range(23)]
    write_checkpoint(tmp_path, 23, *first)
    second = start(config)
    assert load_checkpoint(tmp_path / "step_00000023", *second) == 23
    rule = StepRule(config.on_nan, config.max_skipped, config.max_norm_ratio)
    rule.recall(vars(record) for record in records)
    rest = trained(config, damage, second, 23, rule)
    told = [[(r.num_skipped, repr(r.loss), repr(r.gradient_norm)) for r in part] for part in (records, rest.records)]
    assert told[0] + told[1] == [(r.num_skipped, repr(r.loss), repr(r.gradient_norm)) for r in whole.records]
    assert all(torch.equal(a, b) for a, b in zip(state_of(whole)[:-1], state_of(rest)[:-1], strict=True))


def test_so_many_are_left_out_and_no_more() -> None:
    rule = StepRule("skip", max_skipped=2)
    assert rule.judge(1, math.nan, 1.0) and rule.judge(2, 1.0, math.inf) and not rule.judge(3, 1.0, 1.0)
    with pytest.raises(FloatingPointError, match=r"step 4: the loss is nan .* number 3 of the latest 4 steps"):
        rule.judge(4, math.nan, 1.0)
    rule = StepRule("skip", max_skipped=1)
    for step in range(3 * NUM_REMEMBERED):  # far from one another they may go on without end
        assert bool(rule.judge(step, math.nan if step % NUM_REMEMBERED == 0 else 1.0, 1.0)) == (
            step % NUM_REMEMBERED == 0
        )


def test_norms_are_held_against_the_median_of_those_that_counted() -> None:
    rule = StepRule(max_norm_ratio=10.0)
    assert not any(rule.judge(step, 1.0, 1e6 if step == 3 else 1.0) for step in range(NUM_NEEDED))
    assert not rule.judge(20, 1.0, 9.9) and rule.judge(21, 1.0, 10.1) and rule.num_skipped == 1
    assert not any(rule.judge(22 + step, 1.0, 1.02**step) for step in range(80))  # a slow rise is none


@pytest.mark.parametrize("wrong", [{"on_nan": "ignore"}, {"max_norm_ratio": 0.5}, {"max_skipped": -1}])
def test_impossible_rules_are_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match=r"train\."):
        TrainConfig(**wrong)
