"""The command ``wamlab tune``: the micro-batch and recompute plan of a recipe for a budget of memory."""

from __future__ import annotations

import re

from tyro.conf import Positional

from wamlab.errors import InputError

UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "": 2**30}


def tune(
    recipe: Positional[str] = "",
    budget: str = "",
    devices: str = "",
    cached: bool = True,
    json: bool = False,
) -> None:
    """Find the micro-batch and the recompute plan of a recipe that are fastest within a device's memory.

    Args:
        recipe: its name
        budget: memory of one device for tensors, such as 70GiB; without one, all that it has less 8 GiB
        devices: number and kind of devices that are not here, such as 8xH100; without it, times are measured here
        cached: take traces and times of an earlier call; --no-cached makes them anew
        json: print the figures as one line of JSON
    """
    from json import dumps

    from wamlab.recipes.published import RECIPES, find_recipe
    from wamlab.recipes.tune import tune_recipe, tuned_table

    if not recipe:
        raise InputError(f"name a recipe to tune, one of {', '.join(RECIPES)}: wamlab tune tiny --budget 1GiB")
    found = tune_recipe(
        find_recipe(recipe), parse_budget(budget) if budget else None, devices or "auto", is_cached=cached
    )
    print(dumps(found.to_dict()) if json else tuned_table(found))


def parse_budget(text: str) -> int:
    """Read "70GiB", "70 GB" or "900MiB" as bytes; a number alone is in GiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in UNITS or not float(found[1]):
        raise InputError(f'"{text}" is no budget of memory: give a number and a unit, such as 70GiB or 900MiB')
    return int(float(found[1]) * UNITS[found[2].lower()])
