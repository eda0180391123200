"""The words of the tabletop: names of things, and instruction templates for training and for evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COLOURS = {
    "red": (214, 45, 48),
    "green": (36, 160, 84),
    "blue": (40, 96, 214),
    "yellow": (245, 200, 30),
    "purple": (142, 62, 176),
}
SHAPES = ("circle", "square", "triangle")

# Kept out of every split but "unseen_combo"; each colour and each shape is still seen in other company.
HELD_OUT_COMBOS = frozenset(
    {
        ("red", "triangle"),
        ("green", "circle"),
        ("blue", "square"),
        ("yellow", "triangle"),
        ("purple", "circle"),
    }
)

# Both lists name {object} (and {target}) in the same order, so that only the wording is new in evaluation.
TRAIN_TEMPLATES = {
    "reach": ("reach the {object}", "move to the {object}", "go to the {object}", "touch the {object}"),
    "push": (
        "push the {object} into the {target}",
        "slide the {object} to the {target}",
        "push the {object} onto the {target}",
    ),
    "pick_place": (
        "put the {object} in the {target}",
        "pick up the {object} and place it in the {target}",
        "move the {object} to the {target}",
    ),
    "stack": (
        "stack the {object} on the {target}",
        "put the {object} on the {target}",
        "place the {object} on top of the {target}",
    ),
}
EVAL_TEMPLATES = {
    "reach": ("bring the gripper over to the {object}", "hover above the {object}"),
    "push": ("shove the {object} over to the {target}", "get the {object} into the {target} without lifting"),
    "pick_place": ("drop the {object} off at the {target}", "carry the {object} over to the {target}"),
    "stack": ("set the {object} down upon the {target}", "build up: {object} above {target}"),
}


def phrase(
    family: str,
    pairs: Sequence[tuple[str, str]],
    rng: np.random.Generator,
    *,
    is_unseen: bool = False,
) -> str:
    """Say in one sentence what to do with each (object, target) pair, in order."""
    templates = (EVAL_TEMPLATES if is_unseen else TRAIN_TEMPLATES)[family]
    template = templates[rng.integers(len(templates))]
    return ", then ".join(template.format(object=thing, target=target) for thing, target in pairs)
