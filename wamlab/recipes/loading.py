"""Whether a run's clips are read by threads or by a helper process: as the recipe says, or as measured at its start."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wamlab.data.apart import ApartLoader, measure_slowdown, room_for_batches
from wamlab.data.loader import ClipLoader, num_cores
from wamlab.recipes.config import Recipe

Start = Callable[[], ClipLoader]

MAX_SLOWDOWN = 1.3  # of small operations beside reading threads; beside a helper 1.2; at 1.46 one saved 5 %
MIN_STEPS = 200  # a helper process takes a second or more to start
KEPT_BATCHES = 8  # that a helper may hold in shared memory at once


@dataclass(frozen=True)
class LoaderChoice:
    """How a run's clips are read, and why; a line of ``loader.jsonl`` in its folder."""

    is_apart: bool
    why: str
    slowdown: float | None = None  # of small operations in the training thread while threads read
    measured_s: float = 0.0


def choose_loader(
    recipe: Recipe, num_steps: int, start: Start, start_apart: Callable[[], ApartLoader]
) -> tuple[ClipLoader | ApartLoader, LoaderChoice]:
    """Start the loader that a recipe asks for; where it leaves the choice, the one that disturbs training less."""
    if (is_apart := recipe.data.is_apart) is not None:
        return (start_apart if is_apart else start)(), LoaderChoice(is_apart, f"data.is_apart is {is_apart}")
    if reason := reason_for_threads(recipe, num_steps):
        return start(), LoaderChoice(False, reason)
    start_s = time.perf_counter()
    loader, slowdown = measure_slowdown(start)
    measured_s = time.perf_counter() - start_s
    told = f"small operations take {slowdown:.2f} times as long while threads read, a helper pays from {MAX_SLOWDOWN}"
    if slowdown < MAX_SLOWDOWN:
        return loader, LoaderChoice(False, told, slowdown, measured_s)
    loader.close()
    return start_apart(), LoaderChoice(True, told, slowdown, measured_s)


def reason_for_threads(recipe: Recipe, num_steps: int) -> str:
    """Return why nothing needs to be measured, or a helper process cannot be; nothing where it may pay."""
    batch_bytes = recipe.train.batch_size * 3 * recipe.window.num_frames
    batch_bytes *= recipe.robot.canvas_height_px * recipe.robot.canvas_width_px
    reasons = {
        "data.num_threads is 0": recipe.data.num_threads == 0,
        f"{num_steps} steps are fewer than the {MIN_STEPS} that pay for the start of a helper": num_steps < MIN_STEPS,
        f"{num_cores()} core has no room for a helper": num_cores() < 2,
        "features are read in place of videos": recipe.features.mode != "online",
        "this process may have no children": multiprocessing.current_process().daemon,
        'a helper would run this script again, which has no `if __name__ == "__main__"`': not has_guarded_main(),
        f"shared memory has no room for {KEPT_BATCHES} batches": room_for_batches() < KEPT_BATCHES * batch_bytes,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def has_guarded_main() -> bool:
    """Say whether a spawned process can import what this one was started with: a script is run again by that."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None:  # a notebook; python -m
        return True
    try:
        return "__main__" in Path(file).read_text("utf-8", errors="replace")
    except OSError:
        return False
