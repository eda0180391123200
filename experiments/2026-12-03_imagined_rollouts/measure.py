"""Is a world action model's own video good enough to post-train its policy in?

    python experiments/2026-12-03_imagined_rollouts/measure.py RUN --data DATASET [--runs FOLDER] [--updates 20]

RUN is a run folder of ``tiny_long``, DATASET its 6,000 reach episodes. Hypotheses, written before the first imagined
episode was played: (1) the network as it was trained does not follow actions given clean, which training never showed
it, and 800 lessons make it; (2) a policy post-trained in imagination gains on real tables.
Decision rule: imagination pays if success on 200 held-out real scenes rises and the 95 % interval of the gain (paired
bootstrap over scenes) lies above 0 after the updates; else the verdict is negative. World and head are kept in
FOLDER/imagined_parts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wamlab.lab.run import newest_run, open_run, read_evaluations, read_metrics
from wamlab.recipes.imagined_parts import world_bench
from wamlab.recipes.imagined_world import WamWorld
from wamlab.recipes.policy import WamPolicy
from wamlab.recipes.rl_config import ImagineConfig, RlEvaluation, RlRecipe, rl_tabletop_grpo
from wamlab.recipes.rl_imagined import ImaginedBench
from wamlab.recipes.rl_run import open_bench, post_train, start_rl, summarize_rl
from wamlab.score.video import psnr_db
from wamlab.sim.imagined import ImaginedVector, Keyframe, moved_pose
from wamlab.sim.vector import TabletopVector
from wamlab.types import Episode, Observation

NUM_RECORDED, NUM_PLAYED, NUM_BLOCKS = 96, 200, 3
FIRST_SEED = 9_500_000  # of tables that no probe saw


def squared(first: np.ndarray, second: np.ndarray) -> float:
    """Return the mean squared error of frames, full range 1."""
    return float(np.square((first.astype(np.float32) - second.astype(np.float32)) / 255).mean())


def follow_recorded(world: WamWorld, episodes: Sequence[Episode], shift: int = 0) -> list[float]:
    """Return the PSNR of each block's last frame along recorded actions; ``shift`` gives those of other episodes."""
    minds: Sequence[Any] = world.begin(
        [Keyframe({c: f[0] for c, f in e.frames.items()}, e.state[0], e.instruction) for e in episodes]
    )
    state, found = np.stack([e.state[0] for e in episodes]), []
    for block in range(NUM_BLOCKS):
        rows = slice(4 * block, 4 * block + 4)
        actions = np.roll(np.stack([e.action[rows] for e in episodes]), shift, axis=0)
        keys = [(number, block) for number in range(len(episodes))]
        imagined = world.step(minds, state, actions, keys)
        minds, state = imagined.minds, imagined.state
        views = [world.look(mind) for mind in minds]
        errors = [
            squared(view[c], e.frames[c][4 * block + 4]) for view, e in zip(views, episodes, strict=True) for c in view
        ]
        found.append(psnr_db(np.array(errors)))
    return found


def play_both(bench: ImaginedBench, policy: WamPolicy) -> dict[str, Any]:
    """Imagine episodes from real first frames; let the very same actions be executed on the real tables beside them."""
    table = TabletopVector(NUM_PLAYED, "reach", size=64)
    seen, _ = table.reset(seed=FIRST_SEED)
    starts = {
        row: Keyframe({c: f[row] for c, f in seen["pixels"].items()}, seen["agent_pos"][row], table.instructions[row])
        for row in range(NUM_PLAYED)
    }
    env = ImaginedVector(NUM_PLAYED, bench.world, starts.__getitem__, threshold=bench.recipe.imagine.threshold)
    imagined, _ = env.reset(seed=0)
    errors, poses, ends = [], [], np.full((2, NUM_PLAYED), 99)
    for block in range(10):
        live = ~table.is_done
        now = Observation(imagined["pixels"], imagined["agent_pos"], table.instructions, np.arange(NUM_PLAYED))
        actions = policy(now)
        imagined, *_ = env.chunk_step(actions)
        seen, *_ = table.chunk_step(actions)
        both = live & ~table.is_done & ~env.is_done  # neither is frozen
        if both.sum() >= 10:
            errors.append(
                psnr_db(
                    np.array([squared(imagined["pixels"][c][both], seen["pixels"][c][both]) for c in seen["pixels"]])
                )
            )
            poses.append(float(np.abs(imagined["agent_pos"][both] - seen["agent_pos"][both]).max()))
        for which, is_success in enumerate((env.is_success, table.is_success)):
            ends[which] = np.where(is_success & (ends[which] == 99), block, ends[which])
    dreamt, real = ends < 99
    kinds = {
        f"dreamt {a}, real {b}": int(((dreamt == a) & (real == b)).sum()) for a in (True, False) for b in (True, False)
    }
    return {
        "psnr_db_by_block": errors,
        "largest_pose_error": max(poses),
        "dreamt_success": float(dreamt.mean()),
        "real_success": float(real.mean()),
        "agreement": float((dreamt == real).mean()),
        "agreement_by_chance": float(dreamt.mean() * real.mean() + (1 - dreamt.mean()) * (1 - real.mean())),
        "kinds": kinds,
    }


def paired_interval(before: list[int], after: list[int]) -> list[float]:
    """Return the 95 % bootstrap interval of the gain over the same scenes."""
    gain = np.array(after) - np.array(before)
    rows = np.random.default_rng(0).integers(len(gain), size=(10_000, len(gain)))
    return np.quantile(gain[rows].mean(axis=1), [0.025, 0.975]).tolist()


def recipe_of(data: Path, num_updates: int, splits: tuple[str, ...]) -> RlRecipe:
    recipe = rl_tabletop_grpo()
    return replace(
        recipe, name="imagined", env="imagined", splits=splits, imagine=ImagineConfig(data=data),
        train=replace(recipe.train, num_steps=num_updates),
        evaluation=RlEvaluation(every=num_updates, first_seed=9_000_000),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--updates", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    recipe = recipe_of(given.data, given.updates, ("seen",))
    bench = open_bench(recipe, open_run(given.start))
    assert isinstance(bench, ImaginedBench)
    bench.folder = parts = given.runs / "imagined_parts"
    parts.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    start_s = time.process_time()
    head = bench.head
    result["head_cpu_s"] = time.process_time() - start_s
    result["head_held_out"] = bench.measure_head()
    print(head is not None, result, flush=True)
    start_s = time.process_time()
    taught = bench.world
    result["world_cpu_s"] = time.process_time() - start_s
    as_trained = WamWorld(world_bench(bench.start), bench.start.normalizers, bench.judge, moved_pose)
    dataset, held_out = bench.start.bench.parts[0].dataset, bench.split[1]
    long_enough = [e for e in held_out if dataset.lengths[e] > 4 * NUM_BLOCKS][:NUM_RECORDED]
    episodes = [dataset.episode(e) for e in long_enough]
    result["recorded"] = {
        "copy": [
            psnr_db(np.array([squared(e.frames[c][0], e.frames[c][4 * block + 4]) for e in episodes for c in e.frames]))
            for block in range(NUM_BLOCKS)
        ]
    }
    for name, world in (("as trained", as_trained), ("taught", taught)):
        result["recorded"][name] = follow_recorded(world, episodes)
        result["recorded"][f"{name}, actions of others"] = follow_recorded(world, episodes, shift=1)
    print(json.dumps(result, indent=1), flush=True)
    result["played"] = play_both(bench, bench.start)
    print(json.dumps(result["played"], indent=1), flush=True)
    if given.updates:
        origin = open_run(given.start)
        start_s = time.process_time()
        with start_rl(bench, origin, given.runs) as run:
            bench.folder = parts
            for record in post_train(bench, run):
                print(record.step, {k: round(v, 3) for k, v in bench.notes.items()}, flush=True)
            run.finish(summary=summarize_rl(run))
        first, *_, last = read_evaluations(newest_run(given.runs, "imagined"))
        rolled = [record["rl"]["success"] for record in read_metrics(run)[0]]
        low, high = paired_interval(first["won"], last["won"])
        result["post_training"] = {
            "num_updates": given.updates, "cpu_s": time.process_time() - start_s, "dreamt_success": rolled,
            "real_before": first["success"], "real_after": last["success"], "gain_interval": [low, high],
            "verdict": "positive" if low > 0 else "negative",
        }  # fmt: skip
    Path(__file__).with_name("summary.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
