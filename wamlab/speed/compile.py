"""Compile a network's repeated blocks, frozen encoders and the optimiser's step; go on eagerly where that fails."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._functorch.config
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, RecompileError, TorchDynamoException
from torch._dynamo.utils import CompilationMetrics, get_compilation_metrics, set_compilation_metrics_limit
from torch.optim import Adam, AdamW, Optimizer

from wamlab.errors import InputError
from wamlab.speed.config import COMPILE_MODES
from wamlab.speed.update import with_tensor_rates

Net = TypeVar("Net", bound=nn.Module)
NUM_FORMS = 64  # of a block that may be compiled: first, middle, last; training, observing, sampling; each history
NUM_NOTED = 4096  # compilations that are remembered; torch keeps 64 by itself
RESUMED = "torch_dynamo_resume_in"  # how torch names what follows a graph break


def has_cpp_compiler() -> bool:
    """Say whether this machine can compile for its CPU."""
    return any(map(shutil.which, ("g++", "clang++", "cl")))


def compiled(
    net: Net,
    *,
    mode: str = "default",
    activation_budget: float | int = 1.0,
    is_strict: bool = False,
    backend: str = "inductor",
) -> Net:
    """Compile every block of ``net.blocks`` in place, for training and for cached inference; return the network.

    Equal blocks share one compilation a form (the last one has its own), and each shape takes its own. It goes above
    ``with_recompute``, whose forgetting becomes part of what is compiled, and below ``sharded``. With the mode
    "reduce-overhead" call ``mark_step`` before every forward pass. With an ``activation_budget`` below 1 a block keeps
    about that share of what its compiled form would keep for its backward pass, 0 being its inputs alone: the compiler
    chooses which operations to compute again, finer than ``with_recompute``, which it does not go with. On a CPU it
    needs a C++ compiler. If compiling fails, the network runs eagerly from then on and a warning says why;
    ``is_strict`` raises instead.
    """
    way_back = _WayBack("the network", is_strict)
    if not _can_compile(next(net.parameters()).device, way_back, backend):
        return net
    forward = _Region(_run_forward, way_back, mode, backend, activation_budget=activation_budget)
    step = _Region(_run_step, way_back, mode, backend)
    for block in net.get_submodule("blocks").children():
        vars(block)["forward"] = partial(forward, block.forward)
        if hasattr(block, "step"):
            cached: Any = block.step
            vars(block)["step"] = partial(step, cached)
    return net


def compiled_encoder(
    module: Net, blocks: str | None = None, *, mode: str = "default", is_strict: bool = False, backend: str = "inductor"
) -> Net:
    """Compile a frozen encoder in place: its forward, or each child of its submodule ``blocks``; return it.

    Parts that cannot be compiled run eagerly between the others (graph breaks, which ``compile_report`` counts).
    """
    way_back = _WayBack(type(module).__name__, is_strict)
    if _can_compile(next(module.parameters()).device, way_back, backend):
        region = _Region(_run_encoder, way_back, mode, backend, has_breaks=True)
        for part in [module] if blocks is None else module.get_submodule(blocks).children():
            vars(part)["forward"] = partial(region, part.forward)
    return module


def compiled_step(
    optimizer: Optimizer, *, mode: str = "default", is_strict: bool = False, backend: str = "inductor"
) -> Callable[[], None]:
    """Return the optimiser's step, compiled; its learning rates become tensors, so that a new one compiles nothing.

    Set rates with ``update.set_rate``. Fused kernels are replaced by loops over lists, which the compiler fuses itself.
    Compiling takes seconds for every hundred parameters.
    """
    if type(optimizer) not in (Adam, AdamW):
        raise InputError(f"the step of {type(optimizer).__name__} cannot be compiled: take AdamW, or its own step")
    with_tensor_rates(optimizer)
    kinds = ("fused", "foreach", "capturable")
    before = [{kind: group[kind] for kind in kinds} for group in optimizer.param_groups]

    def undo() -> None:
        for group, kept in zip(optimizer.param_groups, before, strict=True):
            group.update(kept)

    way_back = _WayBack("the optimiser's step", is_strict, undo)
    if not _can_compile(optimizer.param_groups[0]["params"][0].device, way_back, backend):
        return optimizer.step
    for group in optimizer.param_groups:
        group.update(fused=False, foreach=True, capturable=True)
    return partial(_Region(_run_optimizer, way_back, mode, backend, has_breaks=True), optimizer.step)


def mark_step() -> None:
    """Tell graphs of the mode "reduce-overhead" that a new pass begins: what the last one returned may be overwritten.

    Call it before each micro-batch; without it the graphs of one are taken for parts of the next.
    """
    torch.compiler.cudagraph_mark_step_begin()


def compile_cache(folder: Path | str) -> Path:
    """Keep what is compiled in a folder, for this process and those it starts; a later run there compiles nothing anew.

    Say it before the first compilation. The parent of run folders suits: runs of one machine share it.
    """
    path = Path(folder).resolve() / "compiled"
    path.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path)
    return path


@dataclass(frozen=True)
class CompileReport:
    """What was compiled in this process since some moment."""

    num_compilations: int  # of frames: each form and shape of a function
    num_recompiles: int  # of these, because something a compiled form relies on had changed
    num_graph_breaks: int  # places where a frame was cut and left to Python
    cold_s: float  # spent on what no cache had, backward passes included
    warm_s: float  # spent on what was found in the cache
    frames: tuple[str, ...]  # "forward (block.py:150)", one a compilation
    fallbacks: tuple[str, ...]  # reasons why something runs eagerly


_fallbacks: list[tuple[float, str]] = []


def compile_report(since_s: float = 0.0) -> CompileReport:
    """Report what was compiled after a moment, as ``time.time()`` gives it."""
    metrics = _noted(since_s)
    frames = [m for m in metrics if m.is_forward and m.co_name]
    seconds = {True: 0.0, False: 0.0}
    for m in metrics:
        is_warm = bool(m.inductor_fx_local_cache_hit_count) and not m.inductor_fx_local_cache_miss_count
        seconds[is_warm] += (m.duration_us or 0) / 1e6
    return CompileReport(
        num_compilations=len(frames),
        num_recompiles=sum(m.recompile_reason is not None for m in frames),
        num_graph_breaks=sum(str(m.co_name).startswith(RESUMED) for m in frames),
        cold_s=seconds[False],
        warm_s=seconds[True],
        frames=tuple(map(_frame_name, frames)),
        fallbacks=tuple(reason for moment_s, reason in _fallbacks if moment_s >= since_s),
    )


@contextmanager
def expect_no_recompiles() -> Iterator[None]:
    """Raise torch's ``RecompileError``, naming the frame, if the body of a ``with`` statement compiles anything."""
    start_s = time.time()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    if frames := compile_report(start_s).frames:
        raise RecompileError(f"nothing was to be compiled here, but {', '.join(frames)} was")


class _WayBack:
    """Says, once, that something runs eagerly and why."""

    def __init__(self, name: str, is_strict: bool, undo: Callable[[], None] = lambda: None) -> None:
        self.name, self.is_strict, self.undo = name, is_strict, undo
        self.is_taken = False

    def take(self, reason: str) -> None:
        if not self.is_taken:
            self.is_taken = True
            _fallbacks.append((time.time(), reason))
            warnings.warn(f"{self.name} runs eagerly, as compiling failed: {reason}", RuntimeWarning, stacklevel=4)


class _Region:
    """Calls a function compiled; when that fails, itself, now and from then on."""

    def __init__(
        self,
        run: Callable[..., Any],
        way_back: _WayBack,
        mode: str,
        backend: str,
        *,
        has_breaks: bool = False,
        activation_budget: float | int = 1.0,
    ) -> None:
        if mode not in COMPILE_MODES:
            raise InputError(f'there is no way to compile "{mode}": give one of {", ".join(COMPILE_MODES)}')
        self.way_back = way_back
        self.activation_budget = activation_budget
        self.run: Any = torch.compile(run, fullgraph=not has_breaks, dynamic=False, backend=backend, mode=mode)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.way_back.is_taken:
            return function(*args, **kwargs)
        try:
            if self.activation_budget == 1.0:
                return self.run(function, *args, **kwargs)
            # read as a form is compiled, which may be at any call
            with torch._functorch.config.patch(activation_memory_budget=self.activation_budget):
                return self.run(function, *args, **kwargs)
        except RecompileError:  # asked for by expect_no_recompiles
            raise
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            if self.way_back.is_strict:
                raise
            reason = _sentence(error)
        self.way_back.undo()
        found = function(*args, **kwargs)  # if the fault is the function's own, it raises it here, unwrapped
        self.way_back.take(reason)
        return found


# What is compiled takes the method as an argument: methods of equal blocks, wrapped alike, then share a compilation,
# hooks (of FSDP2) stay outside, and a copied network calls its own blocks. Compilations are counted and sought by code
# object, hence one function each.
def _run_forward(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _run_step(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _run_encoder(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _run_optimizer(function: Callable[..., Any]) -> None:
    function()


def _can_compile(device: torch.device, way_back: _WayBack, backend: str) -> bool:
    """Prepare the compiler; without a C++ compiler take the way back."""
    if backend == "inductor" and device.type == "cpu" and not has_cpp_compiler():
        reason = "compiling for a CPU needs a C++ compiler: install g++"
        if way_back.is_strict:
            raise InputError(reason)
        way_back.take(reason)
        return False
    set_compilation_metrics_limit(NUM_NOTED)
    torch._dynamo.config.recompile_limit = max(NUM_FORMS, torch._dynamo.config.recompile_limit)
    # A backward pass is compiled with its forward pass, so that a failure shows while there is a way back.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    return True


def _noted(since_s: float) -> list[CompilationMetrics]:
    return [m for m in get_compilation_metrics() if (m.start_time_us or 0) / 1e6 >= since_s]


def _frame_name(m: CompilationMetrics) -> str:
    place = f"{Path(m.co_filename or '?').name}:{m.co_firstlineno}"
    why = (
        f", as {m.recompile_reason.splitlines()[0].split(': ', 1)[-1].split('#')[0].strip()}"
        if m.recompile_reason
        else ""
    )
    return f"{m.co_name} ({place}{why})"


def _sentence(error: BaseException) -> str:
    """Return the start of an error's message, without commands and traces."""
    message = str(error).split("\nSet TORCH", 1)[0]
    return f"{type(error).__name__}: {' '.join(message.split())}"[:300]
