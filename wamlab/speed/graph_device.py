"""The thin part of graph capture that only a CUDA device can run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CudaGraphs:
    """Captures on one CUDA device; all its graphs share a pool of memory, so none may run beside another.

    Graphs of one pool reuse each other's temporary memory: what a graph returned is valid until any of them runs.
    """

    def __init__(self, device: torch.device, generators: tuple[torch.Generator, ...] = ()) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.generators = generators
        with torch.cuda.device(self.device):
            self.stream = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Run on the stream of the capture, after all that was begun before and before all that comes."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record the kernels of ``run`` without running them."""
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize(self.device)
        gc.collect()  # a tensor freed by the collector while capturing would end the capture
        # Only this thread must not allocate in ways a capture forbids: loading threads go on pinning memory.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            found = run()
        return found, graph.replay
