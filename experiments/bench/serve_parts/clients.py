"""The clients of ``wamlab bench serve``: a process of their own, started by name."""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection

import numpy as np
import torch
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from wamlab.serve.arrays import decode, encode
from wamlab.sim.vector import TabletopVector

NUM_SESSIONS = 32


def make_requests() -> list[bytes]:
    """Return what each session sends: its own scene."""
    env = TabletopVector(NUM_SESSIONS, "reach", size=64)
    env.reset(seed=0)
    seen = env.observation()
    return [
        encode(
            {
                **{f"observation/{camera}": views[row] for camera, views in seen.frames.items()},
                "observation/state": seen.state[row],
                "prompt": seen.instructions[row],
            },
            "openpi",
        )
        for row in range(NUM_SESSIONS)
    ]


async def ask_for(port: int, request: bytes, end_s: float) -> tuple[list[float], int]:
    """Be one client until a moment of the wall clock; return latencies in ms and the number of errors."""
    latencies_ms, num_errors = [], 0
    try:
        async with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as client:
            await client.recv()
            while time.time() < end_s:
                start_s = time.perf_counter()
                await client.send(request)
                reply = await asyncio.wait_for(client.recv(), 60)
                latencies_ms.append((time.perf_counter() - start_s) * 1000)
                is_good = isinstance(reply, bytes) and np.isfinite(decode(reply)[0]["actions"]).all()
                num_errors += not is_good
    except (OSError, TimeoutError, WebSocketException):
        num_errors += 1
    return latencies_ms, num_errors


async def ask_together(port: int, requests: list[bytes], seconds: float) -> list[tuple[list[float], int]]:
    end_s = time.time() + seconds
    return await asyncio.gather(*(ask_for(port, request, end_s) for request in requests))


def play_clients(orders: Connection) -> None:
    """Be all the clients: for each order of a port and seconds, answer with latencies and errors."""
    torch.set_num_threads(1)
    requests = make_requests()
    while (order := orders.recv()) is not None:
        port, seconds = order
        found = asyncio.run(ask_together(port, requests, seconds))
        latencies_ms = [latency for client, _ in found for latency in client]
        orders.send((latencies_ms, sum(errors for _, errors in found)))
