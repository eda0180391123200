"""Capture a step as a CUDA graph: its kernels are launched together by one call, and Python no longer runs in it.

A captured step repeats kernels on fixed addresses. What it is called with is copied into fixed buffers; whatever else
it depends on is watched, and a change captures it anew::

    step = captured(forward_and_backward, watched=dict(net.named_parameters()), device="cuda")

Rules a step must keep: no value read back to the host (``.item()``, prints, ``if loss > 1``), nothing of the host that
changes (a learning rate as a float: ``update.with_tensor_rates``), gradients never set to None inside it.

Gradients are persistent tensors that replays add to, so that one graph serves every micro-batch of an accumulation;
a graph for the first and another for the others would save one pass over the gradients and double the captures. A
gradient that is None before a call, after ``zero_grad(set_to_none=True)``, is put back, zeroed; so a parameter that
had a gradient once never lacks one again, even where the loss no longer reaches it.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from wamlab.errors import InputError
from wamlab.speed.graph_device import CudaGraphs
from wamlab.speed.tree import Tree, flat, rebuilt

Step = Callable[..., Any]


@runtime_checkable
class GraphDevice(Protocol):
    """What a device must be able to do; ``graph_device.CudaGraphs`` is the real one."""

    device: torch.device

    def warming(self) -> AbstractContextManager:
        """Return the context of calls that get ready what a capture must not create."""
        ...

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Return what ``run`` returns, not yet computed, and what computes it into the same tensors."""
        ...


@dataclass(frozen=True)
class Capture:
    """One capture of a step."""

    call: int  # number of the call, the first is 1
    reason: str
    seconds: float


@dataclass(frozen=True)
class GraphReport:
    """What became of the calls of a captured step."""

    num_calls: int
    num_eager: int  # that got a capture ready
    num_replays: int
    captures: tuple[Capture, ...]
    num_dropped: int  # graphs given up, for new ones or as what they relied on had moved


@dataclass
class _Graph:
    """What is kept for one kind of call; ``replay`` is None while it gets ready."""

    num_eager: int = 0
    inputs: list[Tensor] | None = None
    outputs: list[Tensor] | None = None
    output_tree: Tree | None = None
    names: tuple[str, ...] = ()  # of the tensors that must not move
    addresses: tuple[int, ...] = ()
    replay: Callable[[], None] | None = None


def captured(
    step: Step,
    *,
    device: torch.device | str | GraphDevice,
    watched: Mapping[str, Tensor] | None = None,
    optimizers: Iterable[Optimizer] = (),
    generators: Iterable[torch.Generator] = (),
    num_warmups: int = 2,
    max_graphs: int = 4,
    has_fresh_outputs: bool = True,
) -> Step:
    """Return the step captured for each kind of call: shapes, types, gradient mode, autocast, plain values.

    ``step`` takes and returns trees of tensors: dataclasses, tuples, lists and dicts. The first ``num_warmups`` calls
    of a kind run eagerly, the next one captures and replays: every call happens once, so numbers are those of the
    step itself. ``watched`` are the tensors it reads or writes besides its arguments (parameters; their gradients are
    watched with them), by name; ``optimizers`` those that step in it; ``generators`` those it draws from, besides the
    device's own. The least recently used kind beyond ``max_graphs`` is given up. Results are copies;
    ``has_fresh_outputs`` False returns tensors that the next call overwrites. All graphs share one pool of memory.
    On a device without graphs it returns the step as it is and says so once. ``.report()`` says what was captured.
    """
    if isinstance(device, torch.device | str):
        if torch.device(device).type != "cuda":
            _say_once(f"{torch.device(device).type} devices have no graphs: steps run as they are")
            return step
        device = CudaGraphs(torch.device(device), tuple(generators))
    return CapturedStep(step, device, watched or {}, tuple(optimizers), num_warmups, max_graphs, has_fresh_outputs)


class CapturedStep:
    """A step that is captured and replayed; made by ``captured``."""

    def __init__(
        self,
        step: Step,
        device: GraphDevice,
        watched: Mapping[str, Tensor],
        optimizers: tuple[Optimizer, ...],
        num_warmups: int,
        max_graphs: int,
        has_fresh_outputs: bool,
    ) -> None:
        if num_warmups < 1 or max_graphs < 1:
            raise InputError(f"num_warmups {num_warmups} and max_graphs {max_graphs}: give at least 1 each")
        self.step, self.device, self.optimizers = step, device, optimizers
        self.watched = dict(watched)
        if sharded := next((name for name, t in self.watched.items() if hasattr(t, "to_local")), None):
            raise InputError(f"{sharded} is shared between processes: a step that gathers it cannot be captured")
        self.num_warmups, self.max_graphs, self.has_fresh_outputs = num_warmups, max_graphs, has_fresh_outputs
        self._graphs: OrderedDict[tuple, _Graph] = OrderedDict()  # by kind of call, the most recently used last
        self._gradients: dict[str, Tensor] = {}
        self._known: set[int] = set()  # hashes of kinds that were captured
        self._captures: list[Capture] = []
        self._num_calls = self._num_eager = self._num_dropped = 0
        self._last_kind: tuple | None = None  # of the newest capture, to say what differs
        self._moved = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._num_calls += 1
        inputs: list[Tensor] = []
        tree = flat((args, kwargs), inputs)
        self._check(inputs)
        kind = self._kind(tree, inputs)
        self._put_back()
        graph = self._graph(kind)
        if graph.replay is None and graph.num_eager < self.num_warmups:
            graph.num_eager += 1
            self._num_eager += 1
            with self.device.warming():
                found = self.step(*args, **kwargs)
            self._gradients.update(self._current_gradients())
            return found
        if graph.replay is None:
            self._capture(graph, kind, tree, inputs)
        elif inputs:
            assert graph.inputs is not None
            torch._foreach_copy_(graph.inputs, inputs, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
        assert graph.replay is not None and graph.outputs is not None and graph.output_tree is not None
        graph.replay()
        outputs = [t.clone() for t in graph.outputs] if self.has_fresh_outputs else graph.outputs
        return rebuilt(graph.output_tree, iter(outputs))

    def report(self) -> GraphReport:
        """Return what was captured so far and why."""
        return GraphReport(
            num_calls=self._num_calls,
            num_eager=self._num_eager,
            num_replays=self._num_calls - self._num_eager,
            captures=tuple(self._captures),
            num_dropped=self._num_dropped,
        )

    def reset(self) -> None:
        """Give up all graphs and their memory."""
        self._num_dropped += sum(graph.replay is not None for graph in self._graphs.values())
        self._graphs.clear()
        self._known.clear()
        self._moved = "graphs were given up"

    def _graph(self, kind: tuple) -> _Graph:
        """Return the graph of a kind of call, a new one if there is none whose tensors all lie where they lay."""
        try:
            graph = self._graphs.pop(kind, None)
        except TypeError as error:
            raise InputError(f"a captured step takes tensors and plain values that can be compared: {error}") from error
        if graph is not None and graph.replay is not None:
            names, addresses = self._addresses()
            if (names, addresses) != (graph.names, graph.addresses):
                was = dict(zip(graph.names, graph.addresses, strict=True))
                moved = next((n for n, a in zip(names, addresses, strict=True) if was.get(n) != a), "a tensor")
                self._moved = f"{moved} has moved"
                self._num_dropped += 1
                graph = None
        self._graphs[kind] = graph = graph or _Graph()
        while len(self._graphs) > self.max_graphs:
            _, oldest = self._graphs.popitem(last=False)
            self._num_dropped += oldest.replay is not None
        return graph

    def _capture(self, graph: _Graph, kind: tuple, tree: Tree, inputs: list[Tensor]) -> None:
        """Capture the step on copies of its inputs; nothing is computed yet."""
        start_s = time.perf_counter()
        reason = self._reason(kind)
        graph.inputs = [t.detach().clone(memory_format=torch.preserve_format) for t in inputs]
        args, kwargs = rebuilt(tree, iter(graph.inputs))
        held = self._current_gradients()
        torch.clear_autocast_cache()  # of casts made before, which replays would not repeat
        try:
            found, replay = self.device.capture(lambda: self.step(*args, **kwargs))
        except torch.OutOfMemoryError:  # for whoever takes the step again in a leaner way
            raise
        except RuntimeError as error:
            raise InputError(
                f"the step cannot be captured, which forbids reading values back to the host: {error}"
            ) from error
        finally:
            torch.clear_autocast_cache()
        now = self._current_gradients()
        if replaced := [name for name in now if held.get(name) is not now[name]]:
            raise InputError(
                f"the captured step makes a new gradient of {replaced[0]}: inside it zero gradients with "
                "set_to_none=False, and let the calls before the capture reach every parameter"
            )
        self._gradients = now
        outputs: list[Tensor] = []
        graph.output_tree = flat(found, outputs)
        graph.outputs = [t.detach() for t in outputs]
        graph.names, graph.addresses = self._addresses()
        graph.replay = replay
        self._captures.append(Capture(self._num_calls, reason, time.perf_counter() - start_s))
        self._known.add(hash(kind))
        self._last_kind, self._moved = kind, ""

    def _current_gradients(self) -> dict[str, Tensor]:
        return {name: t.grad for name, t in self.watched.items() if t.grad is not None}

    def _put_back(self) -> None:
        """Give gradients that were set to None their memory again, zeroed."""
        gone = [(self.watched[name], held) for name, held in self._gradients.items() if self.watched[name].grad is None]
        if gone:
            torch._foreach_zero_([held for _, held in gone])  # pyright: ignore[reportPrivateImportUsage]
        for owner, held in gone:
            owner.grad = held

    def _addresses(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return what a replay reads or writes besides its inputs, and where it lies."""
        found = {name: t.data_ptr() for name, t in self.watched.items()}
        found |= {f"the gradient of {name}": t.data_ptr() for name, t in self._current_gradients().items()}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                found[f"a learning rate of optimiser {number}, {len(found)}"] = group["lr"].data_ptr()
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        found[f"an average of optimiser {number}, {len(found)}"] = value.data_ptr()
        return tuple(found), tuple(found.values())

    def _check(self, inputs: list[Tensor]) -> None:
        home = self.device.device
        for tensor in inputs:
            if tensor.device != home:
                raise InputError(f"a captured step on {home} was given a tensor on {tensor.device}: move it there")
            if tensor.requires_grad:
                raise InputError("a captured step was given a tensor that requires a gradient: watch it instead")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], Tensor) or group["lr"].device != home:
                    raise InputError(
                        f"the learning rate of {type(optimizer).__name__} is no tensor on {home}, so that a captured "
                        "step would never see it change: call with_tensor_rates and set_rate"
                    )
                if home.type == "cuda" and not group.get("capturable"):
                    raise InputError(
                        f"{type(optimizer).__name__} was made without capturable=True: its step counts lie on the host"
                    )

    def _kind(self, tree: Tree, inputs: list[Tensor]) -> tuple:
        """Return all that decides which graph fits a call, each part with its name."""
        device_type = self.device.device.type
        return (
            ("the arguments", tree),
            *((f"tensor {i}", (tuple(t.shape), t.dtype, t.stride())) for i, t in enumerate(inputs)),
            ("gradient mode", (torch.is_grad_enabled(), torch.is_inference_mode_enabled())),
            ("autocast", torch.is_autocast_enabled(device_type) and str(torch.get_autocast_dtype(device_type))),
            ("what is trained", tuple(t.requires_grad for t in self.watched.values())),
            (
                "the optimiser's settings",
                tuple(
                    tuple((k, v) for k, v in group.items() if k not in ("params", "lr", "initial_lr"))
                    for optimizer in self.optimizers
                    for group in optimizer.param_groups
                ),
            ),
        )

    def _reason(self, kind: tuple) -> str:
        if self._moved:
            return self._moved
        if hash(kind) in self._known:
            _say_once(f"a captured step has more than max_graphs {self.max_graphs} kinds of calls: it captures anew")
            return "given up before, for others"
        if self._last_kind is None:
            return "first capture"
        for (name, new), (_, old) in zip(kind, self._last_kind, strict=False):
            if new != old:
                return "the arguments have another form" if name == "the arguments" else f"{name} was {old}, is {new}"
        return "another number of tensors"


@cache
def _say_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
