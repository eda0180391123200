"""Recorded episodes whose every frame shows a number, and changes to a dataset's JSON files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from barcode import barcode_frames

from wamlab.types import Episode


def numbered_episode(first: int, length: int) -> Episode:
    """Return an episode of two cameras: the top one shows ``first`` and on, the wrist one 2,000 more."""
    rng = np.random.default_rng(first)
    numbers = np.arange(first, first + length)
    return Episode(
        frames={"top": barcode_frames(numbers), "wrist": barcode_frames(numbers + 2000)},
        state=rng.normal(size=(length, 4)).astype(np.float32),
        action=rng.normal(size=(length, 2)).astype(np.float32),
        instruction=f"task of {first}",
        fps=10.0,
    )


def single_camera_episode(first: int, length: int) -> Episode:
    """Return an episode of one camera whose actions have as many dimensions as its states."""
    whole = numbered_episode(first, length)
    action = np.random.default_rng(first + 1).normal(size=whole.state.shape).astype(np.float32)
    return replace(whole, frames={"top": whole.frames["top"]}, action=action)


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    """Change what a JSON file holds."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
