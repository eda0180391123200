"""The demo: everything from no data to a policy that acts, with a table and a picture at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tqdm.auto import tqdm

from wamlab.data.write import write_dataset
from wamlab.lab.report import summary_table, write_report
from wamlab.lab.run import Run, open_run
from wamlab.lab.table import Table
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import tiny
from wamlab.recipes.fit import fit_with_bar, start_run, summarize
from wamlab.recipes.playing import play_task
from wamlab.recipes.policy import load_policy
from wamlab.sim.experts import Style, play_episodes
from wamlab.types import Episode

STYLE = Style(tail_ticks=2)  # little of holding still, which is easily learnt
PLAY_SEED = 1_000_000  # recordings use the seeds from 0 up


def with_bar(episodes: Iterable[Episode], total: int) -> Iterator[Episode]:
    """Yield the episodes under a progress bar that appears with the first one."""
    yield from tqdm(episodes, total=total, desc="recording episodes", unit="")


def run_demo(
    data: Path = Path("datasets/demo"),
    runs: Path = Path("runs"),
    *,
    num_steps: int | None = None,
    num_episodes: int = 2400,
    num_played: int = 100,
) -> Run:
    """Record experts, train ``tiny`` on them, play its policy; return the finished run."""
    start_s = time.perf_counter()
    recipe = tiny()
    recipe = replace(recipe, name="demo", data=replace(recipe.data, root=data))
    if num_steps is not None:
        recipe = replace(recipe, train=replace(recipe.train, num_steps=num_steps))
    if not data.exists():
        size = (recipe.robot.view_height_px, recipe.robot.view_width_px)
        played = play_episodes(("reach",), num_episodes, seed=0, size=size, style=STYLE)
        write_dataset(with_bar(played, num_episodes), data, robot_type="tabletop")
    print(f"dataset: {data}")
    bench = Workbench(recipe)
    with start_run(bench, runs) as run:
        fit_with_bar(bench, run)
        summary = summarize(run)
        if num_played:
            print("playing the policy in closed loop")
            success = play_task(load_policy(run), "reach", range(PLAY_SEED, PLAY_SEED + num_played))
            summary["closed-loop reach success"] = success.rate
            summary["closed-loop reach, 95 % interval"] = [success.low, success.high]
        summary["minutes"] = (time.perf_counter() - start_s) / 60
        run.finish(summary=summary)
    finished = open_run(run.folder)
    print(summary_table(finished))
    print(Table([{"figure": name, "value": value} for name, value in summary.items()]))
    print(f"pictures: {sorted(finished.pictures.glob('*.png'))[-1]}\nreport:   {write_report(finished)}")
    return finished
