"""The policy server with 32 sessions at once, against the same server that plans for them one by one.

    wamlab bench serve [--quick] [--json]

A network of the demo's size with random weights behind the real server. Clients, in a process of their own, send real
tabletop frames in openpi's dialect, each as soon as it has its answer. One by one means batches of one; everything
else is the same, but that each way has the threads that serve it best: one, which two would halve beside busy clients,
and torch's own number. Rounds alternate and the ratio is the median of the paired rounds. Latencies are the clients',
from sent to received, while all 32 wait: most of it is queueing. Without --quick the batched server is then kept busy
for ten minutes; its memory is read at a tenth of that and at the end.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serve_parts.clients import NUM_SESSIONS, play_clients

from wamlab.data.normalize import Normalizers, Quantiles
from wamlab.lab.table import Table
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import tiny
from wamlab.recipes.serve import SessionPolicy, warm_up
from wamlab.serve.server import PolicyServer, ServeConfig, served
from wamlab.serve.sessions import Memory
from wamlab.types import Observation

WAYS = {"one by one": (1, 1), "batched": (NUM_SESSIONS, torch.get_num_threads())}  # largest batch, threads


class ThreadedPolicy(SessionPolicy):
    """Plans with a number of threads, set in the thread that plans, where torch keeps it."""

    num_threads = 1

    def plan(self, observation: Observation, memories: Sequence[Memory | None]) -> tuple[np.ndarray, Sequence[Memory]]:
        torch.set_num_threads(self.num_threads)
        return super().plan(observation, memories)


def make_policies() -> dict[str, ThreadedPolicy]:
    """Build the demo's network as it is before training, for the tabletop's units, and a policy of it a way."""
    recipe = replace(tiny(), device="cpu")
    action, state = (Quantiles(-np.ones(size), np.ones(size)) for size in (4, 5))
    bench = Workbench(recipe)
    for p in bench.net.parameters():  # heads start at zero, and would give every session the same actions
        if not p.any():
            torch.nn.init.normal_(p, std=0.02)
    bench.net.eval()
    policies = {name: ThreadedPolicy(bench, Normalizers(action, state, (), 4, 5)) for name in WAYS}
    for name, policy in policies.items():
        policy.num_threads = WAYS[name][1]
        warm_up(policy)
    return policies


def resident_mib() -> float:
    """Return this process's memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def measure(orders: Connection, ports: dict[str, int], num_rounds: int, round_s: float) -> dict[str, Any]:
    """Alternate rounds of both servers; return each one's answers a second, round by round, and latencies."""
    found: dict[str, Any] = {name: {"rates": [], "latencies_ms": [], "errors": 0} for name in ports}
    for _ in range(num_rounds):
        for name, port in ports.items():
            start_s = time.perf_counter()
            orders.send((port, round_s))
            latencies_ms, num_errors = orders.recv()
            found[name]["rates"].append(len(latencies_ms) / (time.perf_counter() - start_s))
            found[name]["latencies_ms"] += latencies_ms
            found[name]["errors"] += num_errors
    return found


def soak(orders: Connection, port: int, seconds: float) -> dict[str, Any]:
    """Keep one server busy; return errors, answers and how its memory grew after the first tenth."""
    orders.send((port, seconds))
    begin_s, early = time.perf_counter(), 0.0
    while not orders.poll(1.0):
        if not early and time.perf_counter() - begin_s > seconds / 10:
            early = resident_mib()
    latencies_ms, num_errors = orders.recv()
    growth = resident_mib() - early
    return {"soak_s": seconds, "soak_answers": len(latencies_ms), "soak_errors": num_errors, "soak_growth_mib": growth}


def run(*, is_quick: bool) -> dict[str, Any]:
    """Measure both ways of serving; return the ratio of their answers a second, and the batched one's latencies."""
    torch.manual_seed(0)
    start_s = time.perf_counter()
    here, there = multiprocessing.Pipe()
    clients = multiprocessing.get_context("spawn").Process(target=play_clients, args=(there,), daemon=True)
    clients.start()
    there.close()  # so that the end of the clients ends this process too
    executors = {name: ThreadPoolExecutor(1) for name in WAYS}
    policies = executors["batched"].submit(make_policies).result()
    servers = {
        name: PolicyServer(
            policy, policy.contract, ServeConfig(port=0, max_batch=WAYS[name][0]), executor=executors[name]
        )
        for name, policy in policies.items()
    }
    with served(servers["one by one"]) as single, served(servers["batched"]) as batched:
        ports = {"one by one": single.port, "batched": batched.port}
        measure(here, ports, 1, 1.0)  # what is made lazily
        found = measure(here, ports, *((3, 4.0) if is_quick else (7, 10.0)))
        figures: dict[str, Any] = {} if is_quick else soak(here, batched.port, 600.0)
        sizes = {name: s.metrics.num_planned / max(1, s.num_calls) for name, s in servers.items()}
    here.send(None)
    clients.join(10)
    ratios = [b / a for a, b in zip(found["one by one"]["rates"], found["batched"]["rates"], strict=True)]
    rows = [
        {
            "serving": name,
            "threads": WAYS[name][1],
            "answers/s, median": statistics.median(way["rates"]),
            "sessions a call": sizes[name],
            "p50 ms": float(np.percentile(way["latencies_ms"], 50)),
            "p99 ms": float(np.percentile(way["latencies_ms"], 99)),
            "errors": way["errors"],
        }
        for name, way in found.items()
    ]
    print(f"\n{NUM_SESSIONS} sessions, {len(ratios)} paired rounds")
    print(Table(rows))
    figures |= {
        "throughput_vs_one_by_one": statistics.median(ratios),
        "throughput_vs_one_by_one, lowest": min(ratios),
        "throughput_vs_one_by_one, highest": max(ratios),
        "p50_ms": rows[1]["p50 ms"],
        "p99_ms": rows[1]["p99 ms"],
        "errors": sum(way["errors"] for way in found.values()) + figures.get("soak_errors", 0),
        "minutes": (time.perf_counter() - start_s) / 60,
    }
    return figures


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
