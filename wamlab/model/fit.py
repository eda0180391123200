"""How names and shapes compare with a network's: what is missing, what is too much, what may be drawn afresh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from wamlab.model import presets
from wamlab.model.key_maps import ACTION_MODULES, KeyLayout
from wamlab.model.tensor_files import Spec, listed
from wamlab.model.wam import WAMConfig, WorldActionModel

IMAGE_PATH = ("img_emb.", ".k_img.", ".v_img.", ".norm_k_img.")  # spec 1.8: absent from Wan2.2-TI2V-5B
PRESETS: dict[str, Callable[[], WAMConfig]] = {
    "wan21_14b": presets.wan21_14b,
    "wan22_5b": presets.wan22_5b,
    "wan22_5b(has_image=False)": partial(presets.wan22_5b, has_image=False),
    "tiny": presets.tiny,
}


@dataclass(frozen=True)
class Fit:
    """How a checkpoint's names and shapes compare with a network's; ``fresh`` may be missing (spec 1.5, 1.8)."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()

    @property
    def num_wrong(self) -> int:
        return len(self.missing) + len(self.extra) + len(self.misshapen)

    def __str__(self) -> str:
        found = {"missing": self.missing, "extra": self.extra, "of another shape": self.misshapen}
        return ", ".join(f"{kind} {listed(list(names))}" for kind, names in found.items() if names) or "all fit"


def compare(
    config: WAMConfig,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, Spec],
    layout: KeyLayout,
    extra: tuple[str, ...] = (),
) -> Fit:
    """Compare a network's shapes with those found for it; ``extra`` are tensors known to belong to no network."""
    missing = sorted(expected.keys() - found.keys())
    is_base = layout != "dreamzero" and not any(name.startswith(ACTION_MODULES) for name in found)
    has_image = any(_is_image_path(name) for name in found)
    fresh = [
        name
        for name in missing
        if is_base
        and (name.startswith(ACTION_MODULES) or (_is_image_path(name) and not has_image and not config.has_condition))
    ]
    misshapen = [
        f"{name}: {found[name].shape} in the file, {expected[name]} in the network"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name]
    ]
    return Fit(
        tuple(sorted(set(missing) - set(fresh))),
        (*sorted(found.keys() - expected.keys()), *extra),
        tuple(misshapen),
        tuple(fresh),
    )


@lru_cache(maxsize=8)
def network_shapes(config: WAMConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a network's tensors without making it."""
    with torch.device("meta"):
        net = WorldActionModel(config)
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}


def _is_image_path(name: str) -> bool:
    return any(mark in name for mark in IMAGE_PATH)
