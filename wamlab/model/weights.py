"""Published checkpoints: what is in one, into a network, into another layout; never more than one tensor in memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from wamlab.errors import InputError
from wamlab.model.fit import PRESETS, Fit, compare, network_shapes
from wamlab.model.key_maps import (
    LORA_LEAVES,
    NETWORK,
    KeyLayout,
    find_layout,
    from_wamlab,
    part_of,
    to_wamlab,
)
from wamlab.model.tensor_files import (
    DTYPE_NAMES,
    SHARD_BYTES,
    Entry,
    Index,
    Spec,
    listed,
    read_index,
    read_tensor,
    read_values,
    write_tensors,
)
from wamlab.model.wam import WorldActionModel
from wamlab.tensors import put

WINDOWS, WINDOW = 4, 16  # of values of each tensor that go into a fingerprint


@dataclass(frozen=True)
class Loaded:
    """What ``load_pretrained`` did, in tensor names of this library."""

    path: Path
    layout: KeyLayout
    loaded: tuple[str, ...]
    initialized: tuple[str, ...]  # drawn afresh: train them, or store them beside a LoRA


@dataclass(frozen=True)
class Part:
    """One part of a checkpoint in numbers."""

    name: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    dtypes: dict[str, int]  # parameters of each type


@dataclass(frozen=True)
class Description:
    """What the headers of a checkpoint say."""

    path: Path
    layout: KeyLayout
    parts: tuple[Part, ...]
    preset: str  # the nearest one; it fits if ``fit.num_wrong`` is 0
    fit: Fit

    def __str__(self) -> str:
        lines = [f"{self.path}: layout {self.layout}"]
        for part in self.parts:
            types = ", ".join(f"{name} {count / 1e9:.3f} B" for name, count in part.dtypes.items())
            lines.append(f"  {part.name:18}{part.num_tensors:6} tensors {part.num_bytes / 1e9:9.3f} GB  {types}")
        lines.append(f"  {'fits' if not self.fit.num_wrong else 'does not fit; nearest is'} {self.preset}: {self.fit}")
        if self.fit.fresh:
            lines.append(f"  initialised afresh when loaded: {listed(list(self.fit.fresh))}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Converted:
    """What ``convert`` wrote."""

    target: Path
    files: tuple[Path, ...]
    layout: KeyLayout
    num_tensors: int
    num_bytes: int
    left_out: tuple[str, ...]  # parts of the source that are not in the target: the encoders of a bundle


def load_pretrained(
    net: WorldActionModel, path: Path, *, layout: KeyLayout | None = None, generator: torch.Generator | None = None
) -> Loaded:
    """Stream a checkpoint into a network, each tensor cast to the type and moved to the device it has there.

    Of a network that is shared among processes each takes its share, one whole tensor in memory at a time.

    A DreamZero bundle must fit exactly; its encoders are skipped. A Wan checkpoint without any action module leaves
    those, and in a network on Wan2.2-TI2V-5B the image path, to a fresh draw from ``generator`` (on the CPU). Adapters
    of a network that has them stay as they are. Raises InputError for anything else that is missing, extra or of
    another shape, before the network is touched.
    """
    index, layout = _opened(path, layout)
    entries, extra = _network_of(index, layout)
    targets = {name: tensor for name, tensor in net.state_dict().items() if not name.endswith(LORA_LEAVES)}
    shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    fit = compare(net.config, shapes, entries, layout, extra)
    if fit.num_wrong:
        raise InputError(f"{path} ({layout}) does not fit this network: {fit}; choose the preset it was trained with")
    if any(tensor.is_meta for tensor in targets.values()):
        raise InputError(
            "this network is on the meta device: call net.to_empty(device=...) before its weights are read"
        )
    with torch.no_grad():
        for name, entry in entries.items():
            put(targets[name], read_tensor(entry))
        for name in fit.fresh:
            put(targets[name], _fresh(name, shapes[name], generator))
    return Loaded(path, layout, tuple(entries), fit.fresh)


def describe(path: Path, *, layout: KeyLayout | None = None) -> Description:
    """Read what a checkpoint holds and which preset it fits from its headers alone."""
    index, layout = _opened(path, layout)
    entries, extra = _network_of(index, layout)
    parts: dict[str, list[Entry]] = {}
    for name, entry in index.entries.items():
        parts.setdefault(part_of(name, layout), []).append(entry)
    fits = {
        preset: compare(config(), network_shapes(config()), entries, layout, extra)
        for preset, config in PRESETS.items()
    }
    nearest = min(fits, key=lambda preset: (fits[preset].num_wrong, len(fits[preset].fresh)))
    return Description(path, layout, tuple(_part(name, held) for name, held in parts.items()), nearest, fits[nearest])


def _part(name: str, entries: list[Entry]) -> Part:
    dtypes: Counter[str] = Counter()
    for entry in entries:
        dtypes[DTYPE_NAMES[entry.dtype]] += entry.numel
    return Part(name, len(entries), sum(dtypes.values()), sum(entry.num_bytes for entry in entries), dict(dtypes))


def convert(
    source: Path,
    target: Path,
    *,
    layout: KeyLayout,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Write a checkpoint in another layout, type or sharding, bit for bit unless ``dtype`` changes its numbers.

    From a DreamZero bundle to any other layout only the network goes; see ``left_out``. Raises InputError for a
    tensor without a name in the new layout, and as ``write_tensors`` does.
    """
    index, found = _opened(source, None)
    names: dict[str, str] = {}  # new: old
    left_out: set[str] = set()
    for name in index.entries:
        part, ours = part_of(name, found), to_wamlab(name, found)
        if ours is not None:
            names[from_wamlab(ours, layout)] = name
        elif part in (NETWORK, "unknown"):
            raise InputError(f"{source} holds {name}, which no world action model has: take it out first")
        elif layout == "dreamzero":
            names[name] = name
        else:
            left_out.add(part)
    kinds = {
        new: dtype if dtype is not None and index.entries[old].dtype.is_floating_point else index.entries[old].dtype
        for new, old in names.items()
    }
    plan = {new: Spec(index.entries[old].shape, kinds[new]) for new, old in names.items()}
    stem = "diffusion_pytorch_model" if layout in ("wan", "diffusers") else "model"
    files = write_tensors(
        target,
        plan,
        lambda new: read_tensor(index.entries[names[new]]).to(kinds[new]),
        max_shard_bytes=max_shard_bytes,
        stem=stem,
    )
    num_bytes = sum(spec.num_bytes for spec in plan.values())
    return Converted(target, tuple(files), layout, len(plan), num_bytes, tuple(sorted(left_out)))


def fingerprint(path: Path) -> str:
    """Return a name (64 hex digits) of a checkpoint's network, the same in every layout and sharding.

    It covers names, shapes and 64 values of each tensor as bfloat16, so float32 and the bfloat16 made from it agree.
    """
    index, layout = _opened(path, None)
    entries, _ = _network_of(index, layout)
    digest = hashlib.sha256()
    for name, entry in sorted(entries.items()):
        digest.update(f"{name} {list(entry.shape)} ".encode())
        for first, count in _windows(entry.numel):
            digest.update(read_values(entry, first, count).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _windows(numel: int) -> list[tuple[int, int]]:
    """Return the first value and the number of values of each sampled window."""
    if numel <= WINDOWS * WINDOW:
        return [(0, numel)]
    return [((numel - WINDOW) * i // (WINDOWS - 1), WINDOW) for i in range(WINDOWS)]


def _opened(path: Path, layout: KeyLayout | None) -> tuple[Index, KeyLayout]:
    index = read_index(path)
    try:
        return index, layout or find_layout(index.entries)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _network_of(index: Index, layout: KeyLayout) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return a checkpoint's network under this library's names, and the tensors that belong to no known part."""
    entries: dict[str, Entry] = {}
    extra: list[str] = []
    for name, entry in index.entries.items():
        ours = to_wamlab(name, layout)
        if ours is not None:
            entries[ours] = entry
        elif part_of(name, layout) in (NETWORK, "unknown"):
            extra.append(name)
    return entries, tuple(extra)


def _fresh(name: str, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Draw one tensor: action maps of spread 0.02 (spec 1.5), image maps by their widths, norms as if not there."""
    values = torch.zeros(shape)
    if name.endswith(".W"):
        return values.normal_(std=0.02, generator=generator)
    if name.endswith(".weight"):
        if len(shape) == 1:
            return values.fill_(1.0)
        return nn.init.xavier_uniform_(values, generator=generator)
    return values
