"""Does reinforcement learning raise a supervised policy's success on the tabletop within 40 CPU minutes?

    python experiments/2026-12-03_rl_tabletop/measure.py RUN [--runs FOLDER] [--seeds 0 1 2] [--updates 40]

RUN is a run folder of ``tiny_long`` (12,500 steps on 6,000 reach episodes). Half of the scenes are as in recordings,
half are of the split "unseen_position", where the object that is meant lies in the one corner that recordings leave
empty; there the start mostly goes to the other object of the same colour. Success is counted on 200 held-out scenes
(seeds from 9,000,000, that no probe saw) without exploration, before and after; the scenes of seed s begin at
(2 + s) million.

Decision rule, written while the first runs played, before any evaluation after the start: an
objective has learnt if the mean gain over 3 seeds is at least 20 points and each seed's 95 % interval of the gain
(paired bootstrap over scenes) lies above 0, each in less than 40 CPU minutes.
Splits, reward and rates were chosen by probes evaluated on 100 scenes from 1,000,000 on: 10 updates on
"unseen_position" alone took 22 to 71 % (GRPO) and to 61 % (NFT); on recorded scenes alone GRPO took 48 to 43 %.

A first series of 20 updates gained 17.5 and 22.5 points (GRPO, seeds 0 and 1) and 18 (NFT, seed 0) on those scenes.
What is finished is read, what was interrupted goes on; the verdict is written to summary.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wamlab.errors import InputError
from wamlab.lab.run import newest_run, open_run, read_evaluations, read_metrics
from wamlab.recipes.rl_config import find_rl_recipe
from wamlab.recipes.rl_run import open_bench, post_train, start_rl, summarize_rl

HELD_OUT_FROM = 9_000_000
WANTED_GAIN, MOST_CPU_S, NUM_BOOTSTRAPS = 0.20, 2400, 10_000


def paired_interval(before: list[int], after: list[int]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the gain in success over the same scenes."""
    gain = np.array(after) - np.array(before)
    rows = np.random.default_rng(0).integers(len(gain), size=(NUM_BOOTSTRAPS, len(gain)))
    low, high = np.quantile(gain[rows].mean(axis=1), [0.025, 0.975]).tolist()
    return low, high


def run_once(start: Path, runs: Path, objective: str, seed: int, num_updates: int) -> None:
    """Post-train with one seed; a finished run stays, an interrupted one goes on."""
    name = f"{objective}{seed}"
    recipe = find_rl_recipe(f"rl_tabletop_{objective}")
    recipe = replace(
        recipe,
        name=name,
        first_seed=(2 + seed) * 1_000_000,
        train=replace(recipe.train, seed=seed, num_steps=num_updates),
        evaluation=replace(recipe.evaluation, first_seed=HELD_OUT_FROM),
    )
    try:
        is_resumed = newest_run(runs, name).state != "finished"
    except InputError:  # there is none
        is_resumed = False
    else:
        if not is_resumed:
            return
    start_s, origin = time.process_time(), open_run(start)
    bench = open_bench(recipe, origin)
    with start_rl(bench, origin, runs, is_resumed=is_resumed) as run:
        for record in post_train(bench, run):
            print(name, record.step, {key: round(value, 3) for key, value in bench.notes.items()}, flush=True)
        run.finish(summary=summarize_rl(run) | {"cpu_s": time.process_time() - start_s})


def result_of(runs: Path, objective: str, seed: int) -> dict[str, Any]:
    """Return what a finished run says."""
    run = newest_run(runs, f"{objective}{seed}")
    first, *between, last = read_evaluations(run)
    rolled = [record["rl"] for record in read_metrics(run)[0]]
    low, high = paired_interval(first["won"], last["won"])
    looks = ("success", "low", "high", "by_split")
    return {
        "objective": objective,
        "seed": seed,
        "num_updates": last["step"],
        "gain": last["success"] - first["success"],
        "gain_low": low,
        "gain_high": high,
        "before": {name: first[name] for name in looks},
        "between": {e["step"]: e["success"] for e in between},
        "after": {name: last[name] for name in looks},
        "rollout_success": [round(notes["success"], 3) for notes in rolled],
        "num_episodes": sum(notes["num_episodes"] for notes in rolled),
        "largest_ratio_error": max(notes["ratio_error"] for notes in rolled),
        "cpu_s": (run.summary or {})["cpu_s"],
    }


def verdict(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Apply the decision rule to one objective."""
    gain = float(np.mean([result["gain"] for result in results]))
    is_learnt = gain >= WANTED_GAIN and all(
        result["gain_low"] > 0 and result["cpu_s"] < MOST_CPU_S for result in results
    )
    return {"num_seeds": len(results), "mean_gain": gain, "has_learnt": is_learnt if len(results) >= 3 else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--objectives", nargs="+", default=["grpo", "nft"])
    parser.add_argument("--read-only", action="store_true", help="summarise what is finished, run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {objective: [] for objective in given.objectives}
    for seed in given.seeds:
        for objective in given.objectives:
            if not given.read_only:
                run_once(given.start, given.runs, objective, seed, given.updates)
            try:
                found[objective].append(result_of(given.runs, objective, seed))
            except (InputError, ValueError, KeyError):
                print(f"{objective} {seed} is not finished")
    summary = {
        "verdict": {objective: verdict(results) for objective, results in found.items() if results},
        "runs": [result for results in found.values() for result in results],
    }
    Path(__file__).with_name("summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary["verdict"], indent=1))


if __name__ == "__main__":
    main()
