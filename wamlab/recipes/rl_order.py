"""`wamlab rl`: post-train a run's policy by a recipe, every field of which can be changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tqdm.auto import tqdm
from tyro.conf import AvoidSubcommands, arg

from wamlab.errors import InputError
from wamlab.lab.records import read_json
from wamlab.lab.run import Run, find_run, newest_run, open_run
from wamlab.recipes.rl_config import RL_RECIPES, RlRecipe, find_rl_recipe
from wamlab.recipes.rl_run import RL_FILE, open_bench, post_train, start_rl, summarize_rl


@dataclass(frozen=True)
class RlOrder:
    """Post-train a run's policy on the tabletop into a run folder of its own."""

    recipe: Annotated[RlRecipe, arg(name="")]
    start: str = ""  # run to start from: the beginning or a part of its name; when going on, it is known
    runs: Path = Path("runs")  # folder of the runs, the start among them
    resume: bool = False  # go on with the newest run of this recipe; with the same settings bit for bit


def start_of(order: RlOrder) -> Run:
    """Return what the newest run of a recipe started from."""
    path = newest_run(order.runs, order.recipe.name).folder / RL_FILE
    start = read_json(path).get("start")
    if not isinstance(start, str) or "\0" in start:
        raise InputError(f"{path} does not say which run was the start: name it with --start")
    return open_run(start)


def rl_command(words: Sequence[str]) -> int:
    """Do what `wamlab rl` is told."""
    if not words or words[0].startswith("-"):
        raise InputError(f"name an rl recipe, one of {', '.join(RL_RECIPES)}: wamlab rl {next(iter(RL_RECIPES))}")
    order = tyro.cli(
        RlOrder,
        default=RlOrder(find_rl_recipe(words[0])),
        args=words[1:],
        prog=f"wamlab rl {words[0]}",
        config=(AvoidSubcommands,),
    )
    start = find_run(order.runs, order.start) if order.start or not order.resume else start_of(order)
    bench = open_bench(order.recipe, start)
    with start_rl(bench, start, order.runs, is_resumed=order.resume) as run:
        total = order.recipe.num_iterations
        with tqdm(total=total, desc="iterations") as bar:
            for record in post_train(bench, run):
                bar.update(record.step // order.recipe.num_epochs - bar.n)
                bar.set_postfix_str(f"success {bench.notes['success']:.0%}, {bench.notes['num_flat']} flat groups")
        summary = summarize_rl(run)
        run.finish(summary=summary)
    before, after = summary["before"], summary["after"]
    for name, found in (("before", before), ("after", after)):
        print(f"{name}: {found['success']:.1%} of held-out scenes ({found['low']:.0%} to {found['high']:.0%})")
    print(f"run: {run.folder}")
    return 0
