"""What the frozen Wan encoders share: their libraries, native checkpoints, freezing, fingerprints.

"Native" is the layout in which Wan publishes its weights, and in which policies built on Wan keep them. Every encoder
says for each tensor of its library's module where that tensor lies in a native checkpoint; both directions follow.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from safetensors import safe_open
from torch import Tensor, nn

from wamlab.errors import InputError

NUM_LISTED = 10  # keys of one kind that an error names
NUM_SAMPLED = 64  # values of a tensor that enter a fingerprint


@dataclass(frozen=True)
class Source:
    """Where one tensor of a library's module lies in a native checkpoint."""

    key: str
    shape: tuple[int, ...]  # of the native tensor
    part: int = 0  # which of the equal parts along axis 0, where one native tensor holds several
    num_parts: int = 1


def import_library(name: str) -> ModuleType:
    """Import a library of the extra ``wan``; raise InputError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"{name} cannot be imported ({error}): run pip install -e '.[wan]'") from error


def read_tensors(path: Path | str, prefix: str = "") -> dict[str, Tensor]:
    """Read the tensors of a checkpoint whose keys begin with ``prefix``, named without it.

    ``path`` is a ``.safetensors`` file, a folder of them, or a file that ``torch.save`` wrote.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"there is no checkpoint at {path}: give a .safetensors or .pth file, or a folder of shards")
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors = {key: value for file in files for key, value in _tensors_of(file, prefix)}
    if not tensors:
        raise InputError(f'{path} holds no tensor whose key begins with "{prefix}": give the right path and prefix')
    return tensors


def _tensors_of(file: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as content:
                for key in content.keys():  # noqa: SIM118  # not a dict
                    if key.startswith(prefix):
                        yield key.removeprefix(prefix), content.get_tensor(key)
            return
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what unpickling raises is up to the damaged bytes
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{file} cannot be read as a checkpoint of plain tensors: {reason}") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InputError(f"{file} holds more than named tensors: give a file with the state_dict alone")
    yield from ((key.removeprefix(prefix), value) for key, value in content.items() if key.startswith(prefix))


def load_native(
    module: nn.Module, tensors: Mapping[str, Tensor], sources: Mapping[str, Source], *, unused: str = r"(?!)"
) -> None:
    """Give a module the tensors of a native checkpoint; raise InputError naming missing, extra or misshapen keys.

    ``unused`` is a pattern of keys that native checkpoints hold and the module has no place for.
    """
    shapes = {source.key: source.shape for source in sources.values()}
    extra = [key for key in tensors.keys() - shapes.keys() if not re.match(unused, key)]
    misshapen = [
        f"{key} {list(tensors[key].shape)} instead of {list(shape)}"
        for key, shape in shapes.items()
        if key in tensors and tuple(tensors[key].shape) != shape
    ]
    wrong = {"missing": [*(shapes.keys() - tensors.keys())], "extra": extra, "misshapen": misshapen}
    if any(wrong.values()):
        listed = "; ".join(f"{kind}: {_listed(keys)}" for kind, keys in wrong.items() if keys)
        raise InputError(f"these are not native weights of {type(module).__name__} of this size: {listed}")
    state = module.state_dict()
    module.load_state_dict(
        {
            key: tensors[source.key].chunk(source.num_parts)[source.part].reshape(state[key].shape)
            for key, source in sources.items()
        },
        assign=True,
    )


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - NUM_LISTED} more" if len(keys) > NUM_LISTED else ""
    return ", ".join(sorted(keys)[:NUM_LISTED]) + more


def to_native(module: nn.Module, sources: Mapping[str, Source]) -> dict[str, Tensor]:
    """Return a module's tensors under their native keys and in their native shapes."""
    state = module.state_dict()
    parts: dict[str, dict[int, Tensor]] = {}
    for key, source in sources.items():
        parts.setdefault(source.key, {})[source.part] = state[key]
    shapes = {source.key: source.shape for source in sources.values()}
    return {
        key: torch.cat([found[i] for i in sorted(found)]).reshape(shapes[key])
        if len(found) > 1
        else found[0].reshape(shapes[key])
        for key, found in parts.items()
    }


def default_dtype(device: torch.device | str) -> torch.dtype:
    """Return the dtype in which frozen encoders compute on a device: bfloat16 on CUDA, else float32."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def frozen(module: nn.Module, device: torch.device | str, dtype: torch.dtype | None) -> nn.Module:
    """Return the module itself, on the device, without dropout and without gradients."""
    # The method of nn.Module itself: that of diffusers 0.42 logs a warning about an empty list of modules.
    nn.Module.to(module, device=device, dtype=dtype or default_dtype(device))
    return module.eval().requires_grad_(False)


def fingerprint_of(module: nn.Module, *settings: object) -> str:
    """Identify what a module computes by its settings, its shapes and evenly spaced values of every tensor."""
    tensors = list(module.state_dict().values())
    digest = hashlib.sha256(repr((settings, [tuple(tensor.shape) for tensor in tensors])).encode())
    sampled = [tensor.flatten()[:: max(1, tensor.numel() // NUM_SAMPLED)].float() for tensor in tensors]
    digest.update(torch.cat(sampled).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
