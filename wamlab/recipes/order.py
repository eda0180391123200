"""What `wamlab train` and `wamlab encode` are told: a recipe, every field of which can be changed, and more."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from wamlab.data.robot import RobotConfig
from wamlab.data.robot_files import RobotFile, read_robot_file
from wamlab.errors import InputError
from wamlab.recipes.config import Recipe


@dataclass(frozen=True)
class TrainOrder:
    """Train a recipe into a run folder."""

    recipe: Annotated[Recipe, arg(name="")]
    runs: Path = Path("runs")  # folder of the runs
    robot_file: str = ""  # TOML file or libero, droid, yam, tabletop: your robot; "a,b": that of each of data.roots
    processes: int = 1  # of this machine that train together, on CUDA each on its own device; with torchrun, leave it
    resume: bool = False  # go on with the newest run of this recipe; with the same settings bit for bit


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
