"""Low-rank adapters: train a few million parameters beside frozen weights, then add them in.

Adapter files have DreamZero's names (spec 8.3) and also say which base they belong to, since on another base they
would load without an error and only play worse.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wamlab.errors import InputError, check_range
from wamlab.model.key_maps import ACTION_MODULES, LORA_LEAVES, LORA_PREFIX
from wamlab.model.tensor_files import Spec, listed, read_index, read_tensor, write_tensors
from wamlab.tensors import whole

NUM_SAMPLED = 64  # values of a frozen tensor that enter a fingerprint


@dataclass(frozen=True)
class LoraConfig:
    """Which linear maps get an adapter of what rank, and what is trained whole beside them (spec 5)."""

    rank: int = 4
    alpha: float = 4.0  # an adapter's product is scaled by alpha / rank
    targets: tuple[str, ...] = ("blocks.*.self_attn.[qkvo]", "blocks.*.cross_attn.[qkvo]", "blocks.*.ffn.[02]")
    trained: tuple[str, ...] = tuple(f"{module}*" for module in ACTION_MODULES)  # parameter name patterns

    def __post_init__(self) -> None:
        check_range("lora", self, 1, math.inf, "rank")
        check_range("lora", self, 0, 1e6, "alpha")


class LoraLinear(nn.Linear):
    """A linear map with an adapter; ``weight`` and ``bias`` keep their names and their parameters."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        kind = torch.promote_types(linear.weight.dtype, torch.float32)  # small steps vanish in bfloat16
        self.lora_A = nn.Parameter(linear.weight.new_zeros(rank, linear.in_features, dtype=kind))
        self.lora_B = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank, dtype=kind))

    def forward(self, input: Tensor) -> Tensor:
        lora_A, lora_B = self.lora_A.to(input.dtype), self.lora_B.to(input.dtype)
        return super().forward(input) + self.scale * F.linear(F.linear(input, lora_A), lora_B)


@torch.no_grad()
def with_lora(net: nn.Module, config: LoraConfig, generator: torch.Generator | None = None) -> nn.Module:
    """Put adapters into a network in place, freeze all but them and ``config.trained``, and return it.

    A is drawn evenly from +-1 / sqrt(inputs) (``generator`` on the CPU), B is zero: outputs do not change at first.
    Raises InputError for a pattern that matches nothing. An image path that was drawn afresh is not in its base's
    file: name it in ``trained`` ("img_emb.*", "*_img.*"), so that it is stored with the adapters.
    """
    linears = {name: module for name, module in net.named_modules() if type(module) is nn.Linear}
    chosen = _matching(linears, config.targets)
    freeze(net, ["*"])
    for name in chosen:
        adapted = LoraLinear(linears[name], config.rank, config.alpha / config.rank)
        if not adapted.lora_A.is_meta:
            drawn = torch.rand(adapted.lora_A.shape, generator=generator)
            adapted.lora_A.copy_((2 * drawn - 1) * adapted.in_features**-0.5)
        net.set_submodule(name, adapted)
    return _set_trained(net, config.trained, is_trained=True)


@torch.no_grad()
def narrowed(net: nn.Module, config: LoraConfig) -> nn.Module:
    """Keep the matrices of the blocks that ``with_lora`` will freeze, nearly all of a network, in bfloat16.

    Under bfloat16 autocast, which rounds them in every product anyway, no number changes.
    """
    for name, parameter in net.named_parameters():
        is_trained = any(fnmatchcase(name, pattern) for pattern in config.trained)
        if name.startswith("blocks.") and parameter.ndim == 2 and not is_trained:
            parameter.data = parameter.data.bfloat16()
    return net


@torch.no_grad()
def merge_lora(net: nn.Module) -> nn.Module:
    """Add every adapter to its weight in place and put plain linear maps back; what was frozen stays frozen."""
    for name, module in list(net.named_modules()):
        if isinstance(module, LoraLinear):
            module.weight += (module.scale * module.lora_B @ module.lora_A).to(module.weight.dtype)
            plain = nn.Linear(module.in_features, module.out_features, device="meta")
            plain.weight, plain.bias = module.weight, module.bias
            net.set_submodule(name, plain)
    return net


def freeze(net: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """Stop training the parameters whose names match a pattern; InputError for a pattern that matches nothing."""
    return _set_trained(net, patterns, is_trained=False)


def has_adapters(net: nn.Module) -> bool:
    """Say whether ``with_lora`` changed the network."""
    return any(name.endswith(LORA_LEAVES) for name, _ in net.named_parameters())


def split_lora(net: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a network's state as the frozen base and what a LoRA file holds: adapters and all that is trained."""
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    state = net.state_dict()
    stored = {name for name in state if name in trained or name.endswith(LORA_LEAVES)}
    return {n: x for n, x in state.items() if n not in stored}, {n: x for n, x in state.items() if n in stored}


def fingerprint_base(net: nn.Module) -> str | None:
    """Identify the frozen weights beside a network's adapters; None without adapters.

    All processes that share the network must call this; the answer is that of one that holds it whole.
    """
    if not has_adapters(net):
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(split_lora(net)[0].items()):
        values = whole(tensor).flatten()[:: max(1, tensor.numel() // NUM_SAMPLED)]
        rounded = values.bfloat16().float().cpu()  # a base kept in bfloat16 is the same base
        digest.update(f"{name} {list(tensor.shape)} ".encode() + rounded.numpy().tobytes())
    return digest.hexdigest()


def check_base(named: str | None, net: nn.Module, where: Path) -> None:
    """Raise InputError unless a network has the frozen weights that adapters were trained beside."""
    if (base := fingerprint_base(net)) != named:
        raise InputError(
            f"{where} was trained beside the frozen weights {named}, this network has {base}: "
            "give the start and the adapters of its own recipe"
        )


def write_lora(net: nn.Module, path: Path, base_fingerprint: str) -> Path:
    """Write adapters and trained parameters as a new ``.safetensors`` file that names its base."""
    found = {module.scale for module in net.modules() if isinstance(module, LoraLinear)}
    if not found:
        raise InputError("this network has no adapters: call with_lora first")
    named = {_file_name(name): tensor for name, tensor in split_lora(net)[1].items()}
    plan = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}
    notes = {"base_fingerprint": base_fingerprint, "scale": repr(found.pop())}
    return write_tensors(path, plan, named.__getitem__, metadata=notes)[0]


@torch.no_grad()
def read_lora(net: nn.Module, path: Path, base_fingerprint: str | None) -> None:
    """Read a LoRA file into a network that has adapters.

    ``base_fingerprint`` is that of the base in the network; None skips the check, as DreamZero's own files need, which
    name no base. Raises InputError for another base, another rank or scale, and missing or extra tensors.
    """
    index = read_index(path)
    named = index.metadata.get("base_fingerprint")
    if base_fingerprint is not None and named != base_fingerprint:
        raise InputError(f"{path} was trained on base {named}, not on {base_fingerprint}: load the base it belongs to")
    scales = {repr(module.scale) for module in net.modules() if isinstance(module, LoraLinear)}
    if "scale" in index.metadata and scales != {index.metadata["scale"]}:
        raise InputError(f"{path} has adapters of scale {index.metadata['scale']}, this network {scales}: set alpha")
    targets = {_file_name(name): tensor for name, tensor in split_lora(net)[1].items()}
    ours = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    theirs = {name: entry.shape for name, entry in index.entries.items()}
    if wrong := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        first = f"{wrong[0]} is {theirs.get(wrong[0])} there, {ours.get(wrong[0])} here"
        raise InputError(f"{path} does not fit in {listed(wrong)}; {first}: set rank, targets and trained alike")
    for name, entry in index.entries.items():
        targets[name].copy_(read_tensor(entry))


def _file_name(name: str) -> str:
    return LORA_PREFIX + (f"{name}.default.weight" if name.endswith(LORA_LEAVES) else name)


def _set_trained(net: nn.Module, patterns: Sequence[str], *, is_trained: bool) -> nn.Module:
    parameters = dict(net.named_parameters())
    for name in _matching(parameters, patterns):
        parameters[name].requires_grad_(is_trained)
    return net


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f'no module or parameter is named like "{pattern}": see net.named_parameters()')
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
