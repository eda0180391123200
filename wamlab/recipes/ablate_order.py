"""The command ``wamlab ablate``: what it is told, its progress, its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tqdm.auto import tqdm
from tyro.conf import arg

from wamlab.recipes.config import Recipe
from wamlab.recipes.order import read_order


@dataclass(frozen=True)
class AblateOrder:
    """Measure the effect of each trick on a recipe: every field of the recipe can be changed."""

    recipe: Annotated[Recipe, arg(name="")]
    folder: Path = Path("runs/ablation")  # of the result; one that holds finished turns is gone on with
    tricks: tuple[str, ...] = ()  # to compare, in their own order; all that can change something here if none is given
    steps: int = 4  # measured in each turn, after two of warm-up
    rounds: int = 3  # turns of each variant, in alternation
    processes: int = 1  # that train together in each turn
    leave_one_out: bool = True  # also measure all tricks but one
    robot_file: str = ""  # as for `wamlab train`


def ablate_command(words: Sequence[str]) -> None:
    """Do what `wamlab ablate` is told."""
    run_ablation(read_order(AblateOrder, "ablate", words))


def run_ablation(order: AblateOrder) -> None:
    """Take all turns under a progress bar, then print the table and draw the figures into the folder."""
    from wamlab.lab.ablation import ablation_table, factor_table, read_ablation, write_figures
    from wamlab.recipes.ablate import AblationConfig, ablate, list_variants, prepare_features
    from wamlab.recipes.build import choose_device
    from wamlab.recipes.small import make_small_5b
    from wamlab.recipes.tricks import choose_tricks, find_tricks

    recipe, config = order.recipe, AblationConfig(order.steps, order.rounds, order.processes, order.leave_one_out)
    if recipe.name == "small_5b":
        make_small_5b(recipe.data.root.parent)
    tricks, left_out = choose_tricks(recipe, choose_device(recipe.device), order.processes)
    if order.tricks:
        chosen = find_tricks(order.tricks)
        tricks = tuple(trick for trick in tricks if trick in chosen)
    for name, why in left_out.items():
        print(f"without {name}: {why}")
    variants = list_variants(recipe, tricks, config)
    prepare_features(variants["all tricks"], tricks)
    turns = ablate(variants, order.folder, config, tricks=tricks, left_out=left_out)
    with tqdm(total=len(variants) * config.num_rounds, desc="turns", unit="turn") as bar:
        for name, turn in turns:
            bar.update()
            bar.set_postfix_str(f"{name}: {1000 * turn['step_s']:,.0f} ms a step")
    result = read_ablation(order.folder)
    print(ablation_table(result))
    print(f"\n{factor_table(result)}")
    print(f"\nfigures: {write_figures(order.folder).resolve()}")
