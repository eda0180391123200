"""The tricks of a recipe one by one, and the same training without them: DreamZero's trainer, RLinf's middle row.

A baseline is built from the same pieces as everything else, with tricks off, so that a comparison changes nothing else:
the same samples in the same order, the same noise, the same mathematics. What published trainers do besides is left
out in their favour: DreamZero's loader decodes whole shards (``wamlab bench loader`` compares loaders), both wait for
the device several times a step, and RLinf's clips gradients by a norm of each process.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wamlab.errors import InputError
from wamlab.recipes.config import Recipe
from wamlab.speed.config import ShardConfig


@dataclass(frozen=True)
class Trick:
    """Settings of a recipe that are switched together.

    Where the recipe's own value is not the one without the trick, it stays in place of ``on``.
    """

    name: str
    off: Mapping[str, Any]  # field -> value without the trick
    on: Mapping[str, Any]
    why_not: Callable[[Recipe, torch.device, int], str] = lambda *_: ""  # why it can change nothing here


def _why_not_lean(recipe: Recipe, *_: Any) -> str:
    m = recipe.model
    is_published = not (m.video_spread or m.drops_noisy_first or m.position_scale)
    return "" if is_published else "the recipe's network has no published form"


def _why_not_shared(recipe: Recipe, device: torch.device, num_processes: int) -> str:
    is_alone = num_processes == 1 and device.type == "cpu"
    return "one process on a CPU shares and offloads nothing" if is_alone else ""


def _why_not_encoder(recipe: Recipe, *_: Any) -> str:
    return "" if hasattr(recipe.video, "path") else "the embedded codec has nothing to save"


def _why_not_text(recipe: Recipe, *_: Any) -> str:
    return "" if hasattr(recipe.text, "path") else "the embedded text encoder has nothing to save"


def _why_not_dead(recipe: Recipe, *_: Any) -> str:
    return _why_not_encoder(recipe) or ("the network reads the condition" if recipe.condition != "none" else "")


def _why_not_graph(recipe: Recipe, device: torch.device, num_processes: int) -> str:
    if device.type != "cuda":
        return "a CPU launches nothing, so there is no launch to save"
    return "messages between processes cannot be captured" if num_processes > 1 else ""


def _why_not_stored(recipe: Recipe, *_: Any) -> str:
    if len(recipe.data.roots) > 1:
        return "features are stored of one dataset"
    draws_anew = recipe.robot.is_augmenting and not recipe.features.num_variants
    return "the recipe draws crops and colours without end" if draws_anew else ""


ZERO2_OFFLOADED = ShardConfig(units="whole", is_offloaded=True, num_prefetched=0)

TRICKS = (  # in the order in which they are added
    Trick("asynchronous loading", {"data.num_threads": 0, "data.cache_gib": 0.0, "data.is_apart": False},
          {"data.num_threads": 1}),
    Trick("batched encoding", {"speed.is_encode_batched": False}, {"speed.is_encode_batched": True}, _why_not_encoder),
    Trick("no dead encode", {"speed.has_dead_encode": True}, {"speed.has_dead_encode": False}, _why_not_dead),
    Trick("text encoded once", {"speed.has_text_cache": False}, {"speed.has_text_cache": True}, _why_not_text),
    Trick("FSDP2 for ZeRO-2 offload", {"speed.shard": ZERO2_OFFLOADED}, {"speed.shard": None}, _why_not_shared),
    Trick("lean network", {"speed.is_plain": True}, {"speed.is_plain": False}, _why_not_lean),
    Trick("compiled blocks", {"speed.compile": "off"}, {"speed.compile": "blocks"}),
    Trick("no recompute", {"speed.recompute": "all"}, {"speed.recompute": "none"}),
    Trick("CUDA graph", {"speed.has_graph": False}, {"speed.has_graph": True}, _why_not_graph),
    Trick("stored features", {"features.mode": "online"}, {"features.mode": "cached"}, _why_not_stored),
)  # fmt: skip


def find_tricks(names: Sequence[str]) -> tuple[Trick, ...]:
    """Return tricks by name, in their own order; an unknown one raises with the nearest name."""
    known = {trick.name: trick for trick in TRICKS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(known)}"
            raise InputError(f'there is no trick "{name}": {hint}')
    return tuple(trick for trick in TRICKS if trick.name in names)


def choose_tricks(
    recipe: Recipe, device: torch.device, num_processes: int = 1
) -> tuple[tuple[Trick, ...], dict[str, str]]:
    """Return the tricks that can change something for a recipe here, and why the others cannot."""
    reasons = {trick.name: trick.why_not(recipe, device, num_processes) for trick in TRICKS}
    return tuple(t for t in TRICKS if not reasons[t.name]), {name: why for name, why in reasons.items() if why}


def with_tricks(recipe: Recipe, tricks: Sequence[Trick], among: Sequence[Trick] = TRICKS) -> Recipe:
    """Return a recipe that has ``tricks`` and lacks the others of ``among``."""
    names = {trick.name for trick in tricks}
    values: dict[str, Any] = {}
    for trick in among:
        if trick.name not in names:
            values |= trick.off
        else:
            values |= {field: on for field, on in trick.on.items() if value_of(recipe, field) == trick.off[field]}
    return changed(recipe, values)


def value_of(recipe: Recipe, field: str) -> Any:
    """Return a field such as "speed.compile"."""
    part, name = field.split(".")
    return getattr(getattr(recipe, part), name)


def changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return a recipe with fields such as "speed.compile" changed, those of one part at once."""
    parts: dict[str, dict[str, Any]] = {}
    for field, value in values.items():
        part, name = field.split(".")
        parts.setdefault(part, {})[name] = value
    return replace(recipe, **{part: replace(getattr(recipe, part), **own) for part, own in parts.items()})


def official_baseline(recipe: Recipe, among: Sequence[Trick] = TRICKS) -> Recipe:
    """Return a recipe trained as DreamZero's own script does.

    The network as published, eager, every block recomputed; ZeRO-2's sharing with the optimiser in host memory and
    nothing overlapped; clip by clip encoding, the condition that nobody reads included; instructions encoded in every
    step; clips read in the training thread. Adam on the host is fused there too (DeepSpeed's is vectorised).
    """
    return with_tricks(recipe, (), among)


def fsdp2_base(recipe: Recipe, among: Sequence[Trick] = TRICKS) -> Recipe:
    """Return a recipe trained as RLinf's middle row: FSDP2 and asynchronous loading, no more; Adam is not fused there.

    Its published row has a micro-batch of 1 at 5 B ("cannot open large mbs"); here it has the recipe's.
    """
    kept = [trick for trick in among if trick.name in ("asynchronous loading", "FSDP2 for ZeRO-2 offload")]
    recipe = with_tricks(recipe, kept, among)
    return replace(recipe, speed=replace(recipe.speed, is_optimizer_fused=False))
