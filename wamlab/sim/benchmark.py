"""Fixed episode lists: the same starts for every policy, so that two policies are compared pair by pair."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from wamlab.errors import InputError
from wamlab.sim.scene import FAMILIES, SPLITS, Scene
from wamlab.sim.tabletop import new_scene

FORMAT = "wamlab-tabletop-episodes-1"


@dataclass(frozen=True)
class ListedEpisode:
    """One episode start; its scene is stored, so that a later generator changes no benchmark."""

    family: str
    split: str
    seed: int  # of the noise during the episode, and of the scene when it was drawn
    scene: Scene


def make_episode_list(
    families: Sequence[str] = FAMILIES,
    splits: Sequence[str] = SPLITS,
    num_each: int = 50,
    seed: int = 0,
) -> list[ListedEpisode]:
    """Draw ``num_each`` starts for every family and split; a longer list only adds to a shorter one."""
    listed = []
    for family in families:
        for split in splits:
            for index in range(num_each):
                cell = [seed, index, *family.encode(), 0, *split.encode()]
                episode_seed = int(np.random.default_rng(cell).integers(2**31))
                scene = new_scene(family, split, seeding.np_random(episode_seed)[0], None)
                listed.append(ListedEpisode(family, split, episode_seed, scene))
    return listed


def reset_arguments(episodes: Sequence[ListedEpisode]) -> dict[str, Any]:
    """Return what ``TabletopVector.reset`` needs to start these episodes, one a table."""
    return {
        "seed": [episode.seed for episode in episodes],
        "options": {"scenes": [episode.scene for episode in episodes]},
    }


def write_episode_list(path: str | Path, episodes: Sequence[ListedEpisode]) -> None:
    """Write a list as JSON, one episode a line; the file appears complete or not at all."""
    path = Path(path)
    lines = [
        json.dumps({"family": e.family, "split": e.split, "seed": e.seed, "scene": e.scene.to_dict()}) for e in episodes
    ]
    text = f'{{"format": "{FORMAT}", "episodes": [\n' + ",\n".join(lines) + "\n]}\n"
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def read_episode_list(path: str | Path | None = None) -> list[ListedEpisode]:
    """Read a list; without a path the small one of the package (two starts a family and split)."""
    source = Path(path) if path is not None else resources.files("wamlab.sim").joinpath("episode_lists", "small.json")
    try:
        content = json.loads(source.read_text())
        is_ours = content["format"] == FORMAT
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{source} is no readable episode list ({error}); write it again") from error
    if not is_ours:
        raise InputError(f"{source} has format {content['format']!r}, this version reads {FORMAT}; write it again")
    return [_listed(entry) for entry in content["episodes"]]


def _listed(entry: Mapping[str, Any]) -> ListedEpisode:
    return ListedEpisode(entry["family"], entry["split"], entry["seed"], Scene.from_dict(entry["scene"]))
