"""What `wamlab train` and `wamlab encode` are told: a recipe, every field of which can be changed, and more."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import AvoidSubcommands, arg

from wamlab.data.robot import RobotConfig
from wamlab.data.robot_files import RobotFile, read_robot_file
from wamlab.errors import InputError
from wamlab.lab.records import read_json
from wamlab.recipes.config import Recipe, recipe_from_dict
from wamlab.recipes.published import RECIPES, find_recipe


@dataclass(frozen=True)
class TrainOrder:
    """Train a recipe into a run folder."""

    recipe: Annotated[Recipe, arg(name="")]
    runs: Path = Path("runs")  # folder of the runs
    robot_file: str = ""  # TOML file or libero, droid, yam, tabletop: your robot; "a,b": that of each of data.roots
    processes: int = 1  # of this machine that train together, on CUDA each on its own device; with torchrun, leave it
    restarts: int = 0  # times that the processes begin again from the newest checkpoint after one of them was lost
    resume: bool = False  # go on with the newest run of this recipe; with the same settings bit for bit
    quiet: bool = False  # print into the run's logs/ rather than here, as all processes but the first always do
    announce: Path | None = None  # file to write the run's folder into, for the program that started this one


@dataclass(frozen=True)
class EncodeOrder:
    """Make a recipe's features beforehand; what is there already is left as it is."""

    recipe: Annotated[Recipe, arg(name="")]
    processes: int = 1  # that encode side by side, on CUDA each on its own device as long as there are enough
    verify: bool = False  # first check all finished files against their hashes
    robot_file: str = ""  # as for `wamlab train`


def with_robot(recipe: Recipe, name: str) -> Recipe:
    """Return a recipe for the robot and the windows of a robot file, with a network of that block size.

    Actions and states are padded to what the recipe has, which published weights need, unless the file says otherwise.
    Several names with commas between them are the robots of the recipe's datasets, in the order of ``data.roots``.
    """
    found, *others = [read_robot_file(part.strip()) for part in name.split(",")]
    for other in others:
        if other.window != found.window:
            raise InputError(f"{found.path} and {other.path} differ in [window]: one run has one kind of windows")
    dims = ("max_action_dim", "max_state_dim")

    def padded(file: RobotFile) -> RobotConfig:
        return replace(file.robot, **{dim: getattr(recipe.robot, dim) for dim in dims if dim not in file.given})

    robot = padded(found)
    sizes = ("latents_per_block", "actions_per_block", "max_blocks")
    blocks = {size: getattr(found.window, size) for size in sizes}
    model = replace(recipe.model, **blocks, **{dim: getattr(robot, dim) for dim in dims})
    data = replace(recipe.data, robots=(robot, *map(padded, others)) if others else ())
    return replace(recipe, data=data, robot=robot, window=found.window, model=model)


def named_recipe(name: str) -> Recipe:
    """Return the recipe of a name, or of the ``config.json`` of a run; InputError where there is none."""
    return recipe_from_dict(read_json(Path(name))) if name.endswith(".json") else find_recipe(name)


def read_order(kind: Any, verb: str, words: Sequence[str]) -> Any:
    """Return what a command that takes a recipe was told; the recipe is a name or the ``config.json`` of a run."""
    if not words or words[0].startswith("-"):
        raise InputError(f"name a recipe to {verb}, one of {', '.join(RECIPES)}: wamlab {verb} {next(iter(RECIPES))}")
    recipe = named_recipe(words[0])
    if robot_file := _value_of("--robot-file", words):  # first, so that the other options can change what it says
        recipe = with_robot(recipe, robot_file)
    return tyro.cli(
        kind, default=kind(recipe), args=words[1:], prog=f"wamlab {verb} {words[0]}", config=(AvoidSubcommands,)
    )


def _value_of(option: str, words: Sequence[str]) -> str:
    """Return an option's value before the options are parsed; nothing if it is not there."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.replace("_", "-") == option:
            return following
        name, _, value = word.partition("=")
        if name.replace("_", "-") == option:
            return value
    return ""
