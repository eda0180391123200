"""What `wamlab train` is told: a recipe, every field of which can be changed, and where to train it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from wamlab.recipes.config import Recipe


@dataclass(frozen=True)
class TrainOrder:
    """Train a recipe into a run folder."""

    recipe: Annotated[Recipe, arg(name="")]
    runs: Path = Path("runs")  # folder of the runs
    resume: bool = False  # go on with the newest run of this recipe; with the same settings bit for bit
