"""Steps that fit: one that runs out of memory is taken again as if nothing had happened, and every move is told."""

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_device import ReplayDevice  # pyright: ignore[reportMissingImports]
from squeezed import (  # pyright: ignore[reportMissingImports]
    BATCH,
    CONFIG,
    NUM_BLOCKS,
    Scripted,
    Small,
    Trial,
    examples,
    peaks_of_rungs,
    squeezed,
)
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.records import read_lines
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe, tiny
from wamlab.recipes.guarded import MEMORY_MOVES, guarded, rungs_of
from wamlab.sim.experts import play_episodes
from wamlab.speed.choice import StepChoice
from wamlab.speed.clock import Clock
from wamlab.speed.config import SpeedConfig
from wamlab.speed.graph import captured
from wamlab.speed.guard import Guard
from wamlab.speed.ladder import GIB, Ladder, Shape, plain_rungs, thinned
from wamlab.speed.live_memory import LiveMemory
from wamlab.speed.recompute import plan_of
from wamlab.speed.recompute_plan import RecomputePlan
from wamlab.train import make_optimizer, train
from wamlab.types import LossTerms

RUNGS = plain_rungs(BATCH, NUM_BLOCKS)
PLANS = RUNGS[:4]  # of one size of micro-batch: the numbers are equal bit for bit
LAW = Path(__file__).with_name("fit_in_law.py")


@pytest.fixture(scope="module")
def peaks() -> Iterator[list[int]]:
    """Return the peak of every rung; what lives by then need not be looked at after every failure."""
    found = peaks_of_rungs()
    gc.collect()
    gc.freeze()
    yield found
    gc.unfreeze()


def assert_equal(found: Trial, wanted: Trial) -> None:
    assert found.losses == wanted.losses
    assert found.norms == wanted.norms
    assert all(torch.equal(a, b) for a, b in zip(found.weights, wanted.weights, strict=True))


def assert_close(found: Trial, wanted: Trial) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_step_that_fails_is_taken_again_bit_for_bit_random_numbers_included(
    peaks: list[int], place: str, dropout: float
) -> None:
    """A fault once in step 2 costs a rung and no number."""
    wanted = Trial(dropout=dropout, is_guarded=False).run()

    def disturb(step: int, now: str, memory: LiveMemory) -> None:
        if (step, now) == (2, place):
            memory.budget_bytes = max(memory.live_bytes, round(1.1 * peaks[3]))

    found = Trial(rungs=PLANS, dropout=dropout, disturb=disturb).run()
    assert found.num_failures and {move.step for move in found.moves[1:]} == {2}
    assert_equal(found, wanted)


def test_smaller_micro_batches_change_rounding_only(peaks: list[int]) -> None:
    found = Trial(round(1.01 * peaks[-1])).run()
    assert found.moves[-1].after == "1 samples at a time, 2 full"
    assert_close(found, Trial(is_guarded=False).run())


def test_runs_on_a_device_that_is_squeezed_at_random_end_like_one_that_is_not(peaks: list[int]) -> None:
    """``WAMLAB_SQUEEZES=200`` runs as many of them."""
    wanted = Trial(is_guarded=False).run()
    number = int(os.environ.get("WAMLAB_SQUEEZES", "40"))
    num_failures = num_ups = 0
    for seed in range(number):
        found = squeezed(seed, peaks)
        num_failures += found.num_failures
        num_ups += sum("room" in move.reason for move in found.moves)
        if all(move.after.startswith(f"{BATCH} ") for move in found.moves):
            assert_equal(found, wanted)
        assert_close(found, wanted)
    assert num_failures > number and num_ups > number / 4  # so that something was tried
    print(f"{number} runs: {num_failures} failures, {num_ups} trials upwards")


def test_each_shape_has_its_own_place(peaks: list[int]) -> None:
    """Long examples that need a lean rung do not slow the short ones, and meet no failure twice."""
    budget = round(1.02 * peaks_of_rungs(lengths=(64,))[3])
    assert budget > peaks[0]
    found = Trial(budget, lengths=(32, 64), rungs=PLANS, options={"budget_bytes": budget}).run()
    ends = {move.shape: move.after for move in found.moves}
    assert len(ends) == 2
    assert ends["4x32x16"] == f"{BATCH} samples at a time, 2 keep"
    assert ends["4x64x16"] != ends["4x32x16"]
    assert all(move.step == 2 for move in found.moves[1:])
    assert_equal(found, Trial(lengths=(32, 64), is_guarded=False).run())


def test_a_new_shape_begins_where_smaller_ones_stand() -> None:
    ladder = Ladder(RUNGS)
    small, large, smaller = (Shape(((size,),), size) for size in (10, 20, 5))
    for rung in range(3):
        ladder.fail(small, rung)
    assert [ladder.rung(shape) for shape in (small, large, smaller)] == [3, 3, 0]


def test_the_ladder_begins_with_the_fastest_rung_that_is_predicted_to_fit() -> None:
    rungs = [replace(rung, peak_bytes=peak) for rung, peak in zip(RUNGS, (60, 50, 40, 30, 20, 10), strict=True)]
    shape = Shape(((1,),), 1)
    for budget, first in ((None, 0), (60, 0), (59, 1), (10, 5), (9, 5)):
        assert Ladder(rungs, budget_bytes=budget).rung(shape) == first


def test_it_goes_up_again_once_there_is_room_and_stays(peaks: list[int]) -> None:
    """Others take memory in steps 2 to 9."""

    def disturb(step: int, place: str, memory: LiveMemory) -> None:
        if place == "forward":
            memory.budget_bytes = round(1.05 * peaks[3]) if 2 <= step < 10 else None

    config = replace(CONFIG, num_steps=24)
    found = Trial(rungs=PLANS, config=config, disturb=disturb, options={"patience": 2}).run()
    assert found.moves[-1].after == f"{BATCH} samples at a time, 2 keep"
    assert found.moves[-1].step < 24
    assert_equal(found, Trial(config=config, is_guarded=False).run())


def test_trials_are_bounded_whatever_memory_does() -> None:
    """No pattern of failures makes a shape move for ever, and room that comes late is not used after too many."""
    draw, shape = random.Random(0), Shape(((1,),), 1)
    for max_failures in (1, 3):
        for chance in (0.02, 0.2, 0.7):
            ladder = Ladder(RUNGS, patience=2, max_failures=max_failures)
            num_moves, last_move, rung = 0, 0, ladder.rung(shape)
            for step in range(5000):
                is_lean = rung == len(RUNGS) - 1
                before = rung
                if draw.random() < chance and not is_lean:
                    rung = ladder.fail(shape, rung) or 0
                else:
                    rung = ladder.fit(shape, rung, 1)
                if rung != before:
                    num_moves, last_move = num_moves + 1, step
            assert num_moves <= (2 * max_failures + 1) * len(RUNGS)
            assert last_move < 4500 or chance == 0.02
    ladder = Ladder(RUNGS[:2], patience=1, max_failures=2)
    steps = []
    for step in range(200):  # the first rung never fits
        if ladder.rung(shape) == 0:
            steps.append(step)
            ladder.fail(shape, 0)
        ladder.fit(shape, 1, 1)
    assert steps == [0, 2]


def test_a_rung_is_tried_only_where_the_peak_expected_there_fits() -> None:
    rungs = [replace(rung, peak_bytes=peak) for rung, peak in zip(RUNGS[:3], (100, 60, 30), strict=True)]
    shape = Shape(((1,),), 1)
    ladder = Ladder(rungs, budget_bytes=50, patience=1)
    assert ladder.rung(shape) == 2
    assert [ladder.fit(shape, 2, 25) for _ in range(5)] == [2] * 5  # 25 + 60 - 30 is too much
    assert ladder.fit(Shape(((2,),), 2), 2, 15) == 1  # and 15 + 60 - 30 is not


def test_a_budget_that_no_rung_keeps_is_refused_in_one_sentence_and_changes_no_weight(peaks: list[int]) -> None:
    known: list[Any] = []

    def disturb(step: int, place: str, memory: LiveMemory) -> None:
        if step == 2 and not known:
            known.extend(p.clone() for p in trial.weights)
            memory.budget_bytes = round(0.9 * peaks[-1])

    trial = Trial(disturb=disturb)
    sentence = (
        "step 2 fits in none of 6 ways: even 1 samples at a time, 2 full took .* GiB of unknown; give a larger "
        "speed.budget_gib, more processes, or a smaller train.batch_size, window or network"
    )
    with pytest.raises(InputError, match=sentence):
        trial.run()
    assert all(torch.equal(a, b) for a, b in zip(trial.weights, known, strict=True))
    assert all(p.grad is None for p in trial.net.parameters())


def test_a_peak_over_the_budget_moves_down_where_nothing_fails(peaks: list[int]) -> None:
    """The budget is a wish that the device does not know."""
    found = Trial(rungs=PLANS, options={"budget_bytes": round(1.01 * peaks[2])}).run()
    reasons = [move.reason for move in found.moves[1:]]
    assert reasons and set(reasons) == {"the measured peak is over the budget"}
    assert found.peak_bytes <= 1.01 * peaks[2]
    assert_equal(found, Trial(is_guarded=False).run())


def test_an_update_that_fails_before_it_writes_is_taken_again(peaks: list[int]) -> None:
    """The averages of the first update come into being one by one: there is room for some of them only."""
    is_tight = [True]

    def disturb(step: int, place: str, memory: LiveMemory) -> None:
        if place == "update" and is_tight:
            memory.budget_bytes = memory.live_bytes + 10_000
        elif place == "forward" and memory.budget_bytes is not None:
            is_tight.clear()
            memory.budget_bytes = None

    found = Trial(rungs=PLANS, disturb=disturb).run()
    assert found.num_failures == 1 and found.moves[1].step == 1
    assert_equal(found, Trial(is_guarded=False).run())


def muon(net: Any, config: Any) -> Optimizer:
    return make_optimizer(net, replace(config, optimizer="muon"))


def listed(net: Any, config: Any) -> AdamW:
    """Return an optimiser that takes memory for a while in every update."""
    return AdamW(net.parameters(), lr=config.learning_rate, foreach=True, fused=False)


@pytest.mark.parametrize("make", [listed, muon])
def test_an_update_without_room_for_what_it_takes_does_not_begin(make: Any) -> None:
    known: list[Any] = []

    def disturb(step: int, place: str, memory: LiveMemory) -> None:
        if (step, place) == (4, "update"):
            known[:] = [p.clone() for p in trial.weights]
            memory.budget_bytes = memory.live_bytes + 100

    trial = Trial(make=make, disturb=disturb)
    with pytest.raises(InputError, match="step 4 fits in none of 6 ways"):
        trial.run()
    assert all(torch.equal(a, b) for a, b in zip(trial.weights, known, strict=True))


def test_a_first_update_that_fails_while_it_writes_ends_the_run_and_says_so() -> None:
    def disturb(step: int, place: str, memory: LiveMemory) -> None:
        if place == "update":
            size = sum(p.numel() * p.element_size() for p in trial.weights)
            memory.budget_bytes = memory.live_bytes + 2 * size + 1000

    trial = Trial(make=listed, disturb=disturb)
    with pytest.raises(InputError, match=r"step 1 ran out of memory while the weights were being written"):
        trial.run()


def test_errors_that_are_not_of_memory_pass() -> None:
    def disturb(step: int, place: str, memory: LiveMemory) -> None:
        if (step, place) == (2, "backward"):
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        Trial(disturb=disturb).run()


def test_a_long_front_becomes_a_ladder_of_few_rungs() -> None:
    plan = RecomputePlan.uniform("keep", 2)
    front = [StepChoice(1, 4, plan, 1000 + 10 * place, 1.0 - 0.001 * place) for place in range(100)]
    rungs = thinned(front, kept=front[50])
    assert rungs[0] == front[-1] and rungs[-1] == front[0] and front[50] in rungs
    assert len(rungs) < 20
    assert all(a.peak_bytes > b.peak_bytes and a.step_s < b.step_s for a, b in pairwise(rungs))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"recompute": "some"}, "is no part of a recompute plan"),
        ({"recompute": "2 full, 3 nothing"}, 'has the policy "nothing"'),
        ({"budget_gib": 1.0}, 'needs speed.recompute "tuned"'),
        ({"recompute": "tuned", "budget_gib": -1.0}, "speed.budget_gib is -1.0"),
        ({"recompute": "tuned", "has_compiled_optimizer": True}, "has_compiled_optimizer hides"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SpeedConfig(**wrong)
    assert SpeedConfig(recompute="12 full, 28 keep").recompute == "12 full, 28 keep"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    root = tmp_path_factory.mktemp("data") / "reach"
    write_dataset(play_episodes(("reach",), 4, seed=0, size=32), root)
    recipe = tiny()
    return replace(
        recipe,
        name="small",
        data=replace(recipe.data, root=root, held_out_fraction=0.25),
        robot=replace(recipe.robot, view_height_px=32, view_width_px=32),
        model=replace(recipe.model, dim=32, layers=2, heads=2, ffn_dim=64, mlp_dim=32),
        train=replace(recipe.train, num_steps=2, batch_size=4, ema_decay=0.0),
        evaluation=replace(recipe.evaluation, every=4, num_clips=2),
        checkpoint_every=2,
    )


def trained(recipe: Recipe, folder: Path | None = None, rungs: Any = (), budget_bytes: int = 0) -> list[float]:
    """Train as ``fit`` does and return the losses; with a folder guarded, every move in it."""
    bench, clock = Workbench(recipe), Clock()
    optimizer = bench.optimizer()
    guard = None if folder is None else guarded(bench, optimizer, None, folder, rungs, budget_bytes)
    return [record.loss for record in bench.steps(optimizer, bench.examples(clock), clock, guard=guard)]


def test_a_run_within_a_budget_notes_its_moves_in_its_folder_and_learns_the_same(
    recipe: Recipe, tmp_path: Path
) -> None:
    """A run that goes on begins where it stood."""
    wanted, rungs = trained(recipe), plain_rungs(4, 2)
    trained(recipe, tmp_path, rungs[:1], GIB)
    line = read_lines(tmp_path / MEMORY_MOVES)[0][0]
    assert line == {
        "step": 1, "shape": line["shape"], "from": None, "to": "4 samples at a time, 2 keep", "reason": "a new shape",
        "peak_bytes": None, "budget_bytes": GIB,
    }  # fmt: skip
    folder = tmp_path / "tight"
    folder.mkdir()
    budget = 1_650_000  # keeping everything takes 1.84 MB from the second step on, less 1.52 MB (2026-12-03)
    assert trained(recipe, folder, rungs, budget) == pytest.approx(wanted, rel=1e-4)
    lines = read_lines(folder / MEMORY_MOVES)[0]
    assert [line["from"] for line in lines[1:]] == [line["to"] for line in lines[:-1]]
    assert lines[1]["reason"].startswith("out of memory: aten.") and lines[1]["peak_bytes"] > budget
    assert trained(recipe, folder, rungs, budget) == pytest.approx(wanted, rel=1e-4)
    later = read_lines(folder / MEMORY_MOVES)[0][len(lines) :]
    assert [line["to"] for line in later] == [lines[-1]["to"]]


def test_a_tuned_run_needs_a_budget_and_visible_operations_on_a_cpu(recipe: Recipe) -> None:
    for speed, message in (
        (SpeedConfig(recompute="tuned"), "needs a budget"),
        (SpeedConfig(recompute="tuned", budget_gib=1.0, compile="blocks"), "compiled blocks hide"),
    ):
        with pytest.raises(InputError, match=message):
            rungs_of(Workbench(replace(recipe, speed=speed)))


def test_a_plan_in_the_recipe_is_followed(recipe: Recipe) -> None:
    net = Workbench(replace(recipe, speed=SpeedConfig(recompute="1 full, 1 matmuls"))).net
    assert str(plan_of(net)) == "1 full, 1 matmuls"


def test_a_captured_step_is_captured_anew_for_another_plan() -> None:
    """Memory fails while the second step is captured."""
    wanted = Trial(is_guarded=False).run()
    net, moves, made = Small(), [], []
    optimizer = make_optimizer(net, CONFIG)
    guard = Guard(net, optimizer, Ladder(PLANS), Scripted(), tell=moves.append)
    fails, device = [2], ReplayDevice()

    def loss(pair: Any) -> LossTerms:
        total = F.mse_loss(net(pair.seen), pair.wanted)
        if len(records) + 1 in fails:
            fails.clear()
            raise torch.OutOfMemoryError("no room")
        return LossTerms(total, total.detach(), total.detach())

    def wrap(step: Any) -> Any:
        made.append(captured(step, device=device, watched=dict(net.named_parameters()), num_warmups=1))
        return made[0]

    records: list[Any] = []
    for record in train(loss, examples((32,)), optimizer, CONFIG, guard=guard, wrap=guard.forgetting(wrap)):
        records.append(record)
    assert [record.loss for record in records] == wanted.losses
    assert [(move.step, move.after) for move in moves[1:]] == [(2, f"{BATCH} samples at a time, 2 matmuls")]
    assert device.num_captures == 2
    assert [capture.reason for capture in made[0].report().captures] == ["graphs were given up"]


@pytest.fixture(scope="module")
def laws(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]], str]:
    """Return what each of two processes did, the moves told when one of them failed, and what that one said."""
    folder = tmp_path_factory.mktemp("laws")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(LAW), str(folder)], capture_output=True, text=True, timeout=240)
    assert done.returncode != 0 and (folder / "1.json").exists(), done.stderr[-3000:]
    found = {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)}
    return found, read_lines(folder / "memory.jsonl")[0], done.stderr


def test_compiled_blocks_are_taken_again_with_another_plan(laws: Any) -> None:
    found = laws[0][0]
    for (loss, norm, _), (wanted_loss, wanted_norm, _) in zip(found["compiled again"], found["alone"], strict=True):
        assert (loss, norm) == pytest.approx((wanted_loss, wanted_norm), rel=1e-5)
    assert [plan for _, _, plan in found["compiled again"]] == ["3 keep", "3 matmuls", "3 matmuls"]


def test_processes_move_together_when_one_of_them_takes_too_much(laws: Any) -> None:
    """The first one alone would have stayed where it was."""
    first, second = laws[0][0], laws[0][1]
    plans = [plan for _, _, plan in first["together"]]
    assert plans == [plan for _, _, plan in second["together"]] == ["3 keep", "3 matmuls", "3 attention"]
    for (loss, norm, _), (wanted_loss, wanted_norm, _) in zip(first["together"], first["alone"], strict=True):
        assert (loss, norm) == pytest.approx((wanted_loss, wanted_norm), rel=1e-5)
    assert [move["peak_bytes"] for move in first["moves"]] == [None, 130, 110] and not second["moves"]


def test_a_process_that_fails_among_others_ends_the_run_and_says_where_it_goes_on(laws: Any) -> None:
    _, moves, said = laws
    assert (
        "step 2 ran out of memory on process 1 of 2 while others wait for its messages: resume the run, which begins "
        "with 4 samples at a time, 3 matmuls"
    ) in said
    last = moves[-1]
    assert (last["step"], last["reason"]) == (2, "out of memory: no room")
    ladder = Ladder(plain_rungs(4, 3), begin={last["shape"]: last["to"]})
    assert ladder.rung(Shape((), int(last["shape"].split()[0]))) == 1
