"""Post-training killed in the middle of an iteration goes on to the same trajectories and the same weights."""

import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from test_rl_recipe import small, start  # noqa: F401

from wamlab.lab.run import Run, open_run, read_metrics  # noqa: F401
from wamlab.recipes.rl import RlBench
from wamlab.recipes.rl_config import RlRecipe, rl_tabletop_grpo
from wamlab.recipes.rl_progress import RolloutProgress
from wamlab.recipes.rl_run import ROLLOUT, open_bench, post_train, start_rl
from wamlab.rl.play import PlayConfig
from wamlab.rl.schedule import ScheduleConfig
from wamlab.rl.segments import segment_from_tensors

CODE = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_rl_crash import *
start = open_run(Path(sys.argv[2]))
bench = open_bench(exact(), start)
with start_rl(bench, start, Path(sys.argv[3])) as run:
    list(post_train(bench, run))
"""


def exact() -> RlRecipe:
    recipe = small(rl_tabletop_grpo())
    schedule = ScheduleConfig(segment_chunks=2, tail_chunks=1)
    play = PlayConfig(num_members=2, num_slots=2, schedule=schedule)
    return replace(recipe, play=play, is_exact=True, checkpoint_every=10)


def bits_of(run: Run) -> dict[str, list[bytes]]:
    """Return what iteration 0 left in the store: of each episode its arrays, segments behind one another."""
    store = RolloutProgress(run.folder / ROLLOUT).store
    pieces = {name: segment_from_tensors(store.get(name), name) for name in store if name.startswith("0-")}
    found: dict[str, list[bytes]] = {}
    for name, piece in sorted(pieces.items(), key=lambda item: item[1].num_chunks):
        rows = [
            value[row].tobytes() for row in range(len(piece.chunks["num_ticks"])) for value in piece.chunks.values()
        ]
        found.setdefault(name.rpartition("-")[0], []).extend(rows)
    return found


def end_of(bench: RlBench, run: Run) -> tuple[dict[str, list[bytes]], list[float], int]:
    """Train on to the end; return what iteration 0 played, which lies there until then, the losses, and its pieces."""
    bits, num_pieces = {}, 0
    with run:
        for record in post_train(bench, run):
            if record.step == 1:
                bits = bits_of(run)
                num_pieces = len(list((run.folder / ROLLOUT / "segments").iterdir()))
    return bits, [r["loss"] for r in read_metrics(run)[0]], num_pieces


def test_killed_at_a_random_moment_it_ends_with_the_same_trajectories_and_weights(
    start: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    whole = open_bench(exact(), start)
    whole_run = start_rl(whole, start, tmp_path / "whole")
    bits, losses, num_pieces = end_of(whole, whole_run)
    assert len(bits) == 4 and all(bits.values())
    root, draw = tmp_path / "killed", random.Random(time.time_ns())
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(Path(__file__).parent), str(start.folder), str(root)]
    wanted = draw.randint(1, num_pieces * 5 // 4)  # a moment of the first iteration or of the second
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while len(list(root.glob("*/rollout/segments/*.safetensors"))) < wanted and process.poll() is None:
            time.sleep(0.005)
        has_ended = process.poll() is not None
        process.kill()
    assert not has_ended
    resumed = open_bench(exact(), start)
    run = start_rl(resumed, start, root, is_resumed=True)
    assert end_of(resumed, run)[:2] == (bits, losses)
    assert all(torch.equal(a, b) for a, b in zip(whole.net.parameters(), resumed.net.parameters(), strict=True))
    played, total = ([r["rl"][name] for r in read_metrics(run)[0]] for name in ("num_played", "num_chunks"))
    assert sum(played) < sum(total)
    assert not list((run.folder / ROLLOUT / "segments").iterdir())  # the checkpoint holds what was learnt


def test_segments_of_other_weights_are_played_again(start: Run, tmp_path: Path) -> None:  # noqa: F811
    bench = open_bench(exact(), start)
    first = RolloutProgress(tmp_path).begin(3, bench.net)
    bench.update_from(3, first)
    names = set(first)
    again = RolloutProgress(tmp_path)
    assert names and set(again.begin(3, bench.net)) == names
    bench.update_from(3, again.store)
    assert bench.notes["num_played"] == 0 and bench.notes["num_episodes"] == 4
    with torch.no_grad():
        next(bench.net.parameters()).add_(1e-3)
    assert not set(RolloutProgress(tmp_path).begin(3, bench.net))
    again.forget(4)
    assert RolloutProgress(tmp_path).weights == {}


def test_a_recipe_that_stores_no_rollout_leaves_none(start: Run, tmp_path: Path) -> None:  # noqa: F811
    bench = open_bench(replace(exact(), is_stored=False), start)
    with start_rl(bench, start, tmp_path) as run:
        next(post_train(bench, run))
    assert not (run.folder / ROLLOUT).exists()
