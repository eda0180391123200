"""The tuner finds what trying everything finds."""

import itertools
import json
import random
from collections.abc import Sequence

import pytest

from wamlab.errors import InputError
from wamlab.speed.activation_memory import PassMemory, StepMemory, Stretch
from wamlab.speed.memory_sizes import memories_at, memory_from_dict, memory_to_dict, with_held
from wamlab.speed.recompute_plan import POLICIES, RecomputePlan
from wamlab.speed.step_time import BlockTime, MicroBatchTime, times_at
from wamlab.speed.tune import search


def stretch(draw: random.Random, least: int, most: int) -> Stretch:
    change = draw.randint(least, most)
    return Stretch(max(change, 0) + draw.randint(0, 60), change)


def memory_of(draw: random.Random, num_blocks: int, policies: Sequence[str], size: int) -> StepMemory:
    """Return bytes without any regularity: blocks may give memory back forward and take it backward."""

    def some(least: int, most: int) -> dict[str, Stretch]:
        return {policy: stretch(draw, least, most) for policy in policies}

    def one() -> PassMemory:
        dropped = {policy: draw.randint(0, 8) for policy in policies}
        return PassMemory(
            stretch(draw, 0, 20), some(-5, 50), some(-20, 50), dropped, some(-50, 30), some(-60, 30), some(-60, 30)
        )

    held = [draw.randint(0, 50) for _ in range(3)]
    return StepMemory(size, num_blocks, held[0], held[1], 3, 20, held[2], one(), one())


def time_of(draw: random.Random, num_blocks: int, policies: Sequence[str], size: int) -> MicroBatchTime:
    def one() -> BlockTime:
        return BlockTime(*(draw.choice((draw.random(), float(draw.randint(1, 3)))) for _ in range(3)))

    def some() -> dict[str, BlockTime]:
        return {policy: one() for policy in policies}

    return MicroBatchTime(size, num_blocks, draw.random(), draw.random(), some(), some())


def front_of(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    for peak, seconds in sorted(points):
        if not found or seconds < found[-1][1] - 1e-9:
            found.append((peak, seconds))
    return found


def test_the_front_is_that_of_every_plan_of_every_micro_batch_tried() -> None:
    num_solved = 0
    for seed in range(40):
        draw = random.Random(seed)
        num_blocks, policies = draw.randint(2, 6), draw.sample(POLICIES, draw.randint(2, 4))
        memories = {size: memory_of(draw, num_blocks, policies, size) for size in (1, 2)}
        times = {size: time_of(draw, num_blocks, policies, size) for size in (1, 2)}
        points = []
        for size, plan in itertools.product((1, 2), map(RecomputePlan, itertools.product(policies, repeat=num_blocks))):
            number = 2 // size
            peak = memories[size].peak(plan, num_micro_batches=number)
            points.append((peak, times[size].step_s(plan, num_micro_batches=number)))
        found = search(memories, times, 2, policies)
        wanted = front_of(points)
        choices = found.front(tolerance=0)
        own = front_of([(choice.peak_bytes, choice.step_s) for choice in choices])
        assert [peak for peak, _ in own] == [peak for peak, _ in wanted], seed
        assert [s for _, s in own] == pytest.approx([s for _, s in wanted]), seed
        for choice in choices:
            number = choice.num_micro_batches
            assert choice.peak_bytes == memories[choice.micro_batch].peak(choice.plan, num_micro_batches=number)
            assert choice.step_s == times[choice.micro_batch].step_s(choice.plan, num_micro_batches=number)
        num_solved += len(found.solved)
    assert num_solved  # some need an order of their own


def regular(size: int, num_blocks: int) -> StepMemory:
    """Return bytes as blocks have them: what stays forward is given back backward."""
    kept = {"keep": 100 * size, "full": 4 * size, "matmuls": 40 * size}

    def one(gradient: int) -> PassMemory:
        forward = {p: Stretch(max(n, 20 * size) + 5, n) for p, n in kept.items()}
        backward = {p: Stretch(100 * size - n + 30, gradient - n) for p, n in kept.items()}
        tail = {p: Stretch(n + 9, n) for p, n in kept.items()}
        return PassMemory(Stretch(9, 5), forward, tail, dict.fromkeys(kept, 0), backward, backward, backward)

    return StepMemory(size, num_blocks, 10 * num_blocks, 20 * num_blocks, size, 10 * num_blocks, 7, one(10), one(0))


def timed(size: int, num_blocks: int, *, gain: int | float = 0.0) -> MicroBatchTime:
    times = {"keep": 3.0, "full": 4.0, "matmuls": 3.3}
    one = {p: BlockTime(size * s / 3, size * (s - 3), size * s / 3 * 2) for p, s in times.items()}
    lasts = {p: BlockTime(b.forward_s - gain, b.recompute_s, b.backward_s) for p, b in one.items()}
    return MicroBatchTime(size, num_blocks, 1.0, 0.5, one, lasts)


def test_of_plans_that_are_as_fast_within_the_tolerance_the_simplest_is_taken() -> None:
    memory, time = regular(2, 12), timed(2, 12)
    found = search({2: memory}, {2: time}, 2, ("keep", "full", "matmuls"))
    budget = (found.least_bytes + memory.peak(RecomputePlan.uniform("keep", 12))) / 2
    exact, simple = found.fastest(budget, tolerance=0), found.fastest(budget, tolerance=0.1)
    assert simple.plan.complexity < exact.plan.complexity
    assert exact.step_s < simple.step_s <= 1.1 * exact.step_s and simple.peak_bytes <= budget
    assert found.fastest().plan == RecomputePlan.uniform("keep", 12)


def test_a_budget_below_the_smallest_plan_is_refused_with_what_it_takes() -> None:
    found = search({1: regular(1, 4)}, {1: timed(1, 4)}, 1, ("keep", "full"))
    assert found.fastest(found.least_bytes).peak_bytes == found.least_bytes
    with pytest.raises(InputError, match="no plan fits"):
        found.fastest(found.least_bytes - 1)
    with pytest.raises(InputError, match="has no memory or time"):
        search({1: regular(1, 4)}, {1: timed(1, 4)}, 1, ("keep", "offload"))


def test_larger_micro_batches_win_where_memory_is_no_matter() -> None:
    sizes = (1, 2, 4)
    memories, times = ({s: of(s, 5) for s in sizes} for of in (regular, timed))
    found = search(memories, times, 4, ("keep", "full"))  # pyright: ignore[reportArgumentType]
    assert found.fastest().micro_batch == 4 and found.front()[0].micro_batch == 1
    steps = [choice.step_s for choice in found.front()]
    assert steps == sorted(steps, reverse=True)


def test_sizes_between_those_traced_lie_on_lines_and_survive_json() -> None:
    low, high = regular(1, 6), regular(9, 6)
    memories = memories_at([low, high], (1, 4, 9))
    plan = RecomputePlan.read("3 full, 3 keep")
    assert memories[4].peak(plan) == pytest.approx(regular(4, 6).peak(plan), rel=0.02)
    assert memories[4].peak(plan) >= regular(4, 6).peak(plan)
    assert memory_from_dict(json.loads(json.dumps(memory_to_dict(memories[4])))) == memories[4]
    with pytest.raises(InputError, match="lies outside"):
        memories_at([low, high], (10,))
    held = with_held(low, 1000, encode_bytes=10**6)
    assert held.peak(plan) == low.parameters + 1000 + low.optimizer + low.example + 10**6


def test_times_of_other_sizes_lie_on_lines() -> None:
    found = times_at([timed(2, 4), timed(6, 4)], (2, 4, 8))
    plan = RecomputePlan.read("4 full")
    assert found[4].step_s(plan) == pytest.approx(timed(4, 4).step_s(plan))
    assert found[8].step_s(plan) == pytest.approx(timed(8, 4).step_s(plan))
    alone = times_at([timed(2, 4)], (4,))[4]
    assert alone.block("full") == pytest.approx(2 * timed(2, 4).block("full"))
