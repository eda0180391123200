"""Scheduling: every episode is played once, under every rule, whatever dies; the twin keeps time."""

import numpy as np
import pytest

from wamlab.errors import InputError
from wamlab.rl.jobs import Job, WorkerLimits, jobs_of
from wamlab.rl.length_models import LENGTH_MODELS, Lengths, draw_lengths
from wamlab.rl.rules import RULES
from wamlab.rl.schedule import ScheduleConfig, Scheduler
from wamlab.rl.service import SERVICES, Service, choose_batch, fit_service
from wamlab.rl.simulate import least_makespan_s, simulate

STILL = Service(fixed_s=0.1, row_s=0.0, env_s=0.0, move_s=0.0)


def lengths_of(rows: list[list[int]], cap: int) -> Lengths:
    lengths = np.array(rows)
    return Lengths(np.zeros(len(rows), int), np.full(len(rows), cap), lengths, lengths < cap)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_episode_is_played_whole_and_once(rule) -> None:
    lengths = draw_lengths(LENGTH_MODELS["RoboTwin-50"], 10, 8, seed=3)
    timeline = simulate(lengths, rule, SERVICES["balanced"], num_workers=3)
    assert timeline.finish_s.keys() == {(g, m) for g in range(10) for m in range(8)}
    assert timeline.num_chunks == lengths.lengths.sum()
    assert timeline.makespan_s >= least_makespan_s(lengths, SERVICES["balanced"], 3, 8)
    assert 0 < timeline.utilisation <= 1


@pytest.mark.parametrize("rule", ["fifo", "rounds", "longest group", "context"])
def test_episodes_of_a_dead_worker_are_played_by_the_others(rule: str) -> None:
    lengths = draw_lengths(LENGTH_MODELS["LIBERO-10"], 6, 8, seed=0)
    whole = simulate(lengths, RULES[rule], SERVICES["balanced"], num_workers=3)
    hurt = simulate(lengths, RULES[rule], SERVICES["balanced"], num_workers=3, deaths_s={1: whole.makespan_s / 2})
    assert hurt.finish_s.keys() == whole.finish_s.keys()
    assert whole.makespan_s < hurt.makespan_s < 2 * whole.makespan_s
    assert hurt.num_chunks > whole.num_chunks  # what the dead one had not handed back is played again


def test_the_same_seed_gives_the_same_timeline_and_another_a_different_one() -> None:
    lengths = draw_lengths(LENGTH_MODELS["LIBERO-10"], 4, 8, seed=0)
    first, again, other = (simulate(lengths, RULES["context"], SERVICES["balanced"], seed=s) for s in (1, 1, 2))
    assert first == again and first.makespan_s != other.makespan_s


def test_padded_batches_last_until_the_cap_and_others_until_the_last_episode() -> None:
    lengths = lengths_of([[2, 3], [4, 20]], cap=20)
    limits = [WorkerLimits(2)]
    padded = simulate(lengths, RULES["padded"], STILL, workers=limits)
    static = simulate(lengths, RULES["static"], STILL, workers=limits)
    assert padded.busy_s[0] == pytest.approx(2 * 20 * 0.1)  # two batches to the cap
    assert static.makespan_s == pytest.approx((3 + 20) * 0.1)  # the second slot starts the long one at chunk 3


def test_the_known_lengths_are_scheduled_without_a_gap() -> None:
    timeline = simulate(
        lengths_of([[4] * 3, [4] * 3, [8] * 3], cap=8), RULES["oracle"], STILL, workers=[WorkerLimits(1)] * 3
    )
    assert timeline.makespan_s == pytest.approx(48 / 3 * 0.1)


def test_context_is_never_slower_than_the_best_simple_rule_on_any_model() -> None:
    for model in LENGTH_MODELS.values():
        drawn = [draw_lengths(model, 24, 8, seed=seed) for seed in range(2)]
        times_s = {
            name: [simulate(x, RULES[name], SERVICES["compute-bound"], seed=i).makespan_s for i, x in enumerate(drawn)]
            for name in ("static", "fifo", "rounds", "context")
        }
        mean_s = {name: np.mean(np.log(values)) for name, values in times_s.items()}
        assert mean_s["context"] <= min(mean_s.values()) + 0.01, model.name  # a percent: noise of two draws


def test_memory_is_reserved_to_the_end_of_segments_and_never_exceeded() -> None:
    jobs = jobs_of([16] * 3, 4, state_bytes=10, chunk_bytes=1)
    scheduler = Scheduler(jobs, [WorkerLimits(8, memory_bytes=60)], RULES["rounds"], ScheduleConfig(segment_chunks=8))
    orders = scheduler.fill(0)
    assert len(orders) == 3  # 3 * (10 + 8) fits, a fourth does not
    for order in orders:
        scheduler.end(0, order, 8, is_done=False)
    assert len(scheduler.fill(0)) == 3  # who waited has played nothing yet


def test_an_episode_that_fits_nowhere_is_told() -> None:
    with pytest.raises(InputError, match="need more memory"):
        limits = [WorkerLimits(8, memory_bytes=5)]
        simulate(lengths_of([[3, 3]], 8), RULES["fifo"], STILL, workers=limits, sizes={"state_bytes": 10})


def test_episodes_return_to_the_worker_that_holds_their_state() -> None:
    lengths = draw_lengths(LENGTH_MODELS["LIBERO-10"], 8, 8, seed=0)
    timeline = simulate(lengths, RULES["context"], SERVICES["balanced"], num_workers=4)
    num_segments = len(timeline.bars)
    assert timeline.num_moves < 0.5 * num_segments  # 0.75 if chance decided
    stay = simulate(
        lengths, RULES["context"], SERVICES["balanced"], num_workers=4, config=ScheduleConfig(can_move=False)
    )
    assert stay.num_moves == 0
    few = simulate(lengths, RULES["context"], SERVICES["balanced"], num_workers=4, config=ScheduleConfig(max_moves=1))
    assert 0 < few.num_moves <= 64


def test_a_segment_played_twice_counts_once_and_the_first_wins() -> None:
    scheduler = Scheduler([Job(0, 0, 8)], [WorkerLimits(1)] * 2, RULES["rounds"])
    (order,) = scheduler.fill(0)
    scheduler.lose(0, is_dead=False)
    (copy,) = scheduler.fill(1)
    assert copy.key == order.key and copy.from_chunk == 0
    assert scheduler.end(1, copy, 8, is_done=True, is_success=True)
    assert not scheduler.end(0, order, 8, is_done=True, is_success=True)
    assert scheduler.is_finished and scheduler.groups[0].success_lengths == [8]


def test_slow_and_silent_workers_are_stragglers() -> None:
    scheduler = Scheduler(jobs_of([8] * 4, 8), [WorkerLimits(1)] * 4, RULES["rounds"], ScheduleConfig(silent_s=5.0))
    for worker, chunk_s in enumerate((1.0, 1.05, 0.95, 1.6)):
        scheduler.fill(worker)
        scheduler.hear(worker, 10.0, chunk_s)
    assert scheduler.stragglers(11.0) == [3]
    scheduler.hear(3, 12.0, 1.1)
    assert scheduler.stragglers(12.0) == []
    for worker in (0, 1, 3):
        scheduler.hear(worker, 17.0)
    assert scheduler.stragglers(17.0) == [2]


def test_the_longest_waiting_is_served_now_and_then() -> None:
    jobs = [Job(0, 0, 4), *(Job(1, m, 400) for m in range(3))]  # the short one has least left and waits to the end
    for oldest_every, is_served in ((0, False), (4, True)):
        config = ScheduleConfig(segment_chunks=2, tail_chunks=2, oldest_every=oldest_every)
        scheduler = Scheduler(jobs_of([4], 1) + jobs[1:], [WorkerLimits(1)], RULES["context"], config)
        served = set()
        for _ in range(12):
            (order,) = scheduler.fill(0)
            served.add(order.group)
            scheduler.end(0, order, order.from_chunk + order.max_chunks, is_done=False)
        assert (0 in served) == is_served
        jobs = [Job(0, 0, 4), *(Job(1, m, 400) for m in range(3))]


def test_upcoming_names_the_next_episodes_in_order() -> None:
    scheduler = Scheduler(jobs_of([10, 30, 20], 2), [WorkerLimits(1)], RULES["context"])
    assert scheduler.upcoming(3) == [(1, 0), (1, 1), (2, 0)]
    assert [order.key for order in scheduler.fill(0)] == [(1, 0)]
    assert scheduler.upcoming(1) == [(1, 1)]


def test_a_cost_line_is_found_again_and_the_best_batch_with_it() -> None:
    fitted = fit_service({b: 0.2 + 0.03 * b for b in (1, 2, 4, 8)})
    assert fitted.fixed_s == pytest.approx(0.2) and fitted.row_s == pytest.approx(0.03)
    measured_s = {1: 1.0, 2: 1.1, 4: 1.5, 8: 3.1}  # more than linear from 4 on
    assert choose_batch(measured_s) == 4
    assert choose_batch(measured_s, row_bytes=10, memory_bytes=25) == 2
    with pytest.raises(InputError, match="no measured batch"):
        choose_batch(measured_s, row_bytes=10, memory_bytes=5)
    with pytest.raises(InputError, match="two batch sizes"):
        fit_service({4: 1.0})


def test_drawn_lengths_keep_the_published_means_and_limits() -> None:
    for model in LENGTH_MODELS.values():
        drawn = draw_lengths(model, 2000, 8, seed=0)
        assert (drawn.lengths <= drawn.caps[:, None]).all() and (drawn.lengths >= 1).all()
        assert (
            drawn.lengths[~drawn.is_success] == np.broadcast_to(drawn.caps[:, None], (2000, 8))[~drawn.is_success]
        ).all()
        assert drawn.is_success.mean() == pytest.approx(model.success, abs=0.03)
        ratio = (drawn.lengths * model.chunk_ticks / np.asarray(model.means)[drawn.tasks][:, None])[drawn.is_success]
        assert ratio.mean() == pytest.approx(1.0, abs=0.08)
