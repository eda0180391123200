"""Malformed, oversized and slow messages by the thousand: other sessions notice nothing, nothing grows.

A few hundred by default; WAMLAB_HOSTILE_MESSAGES=10000 sends as many, and -s shows the figures.
"""

import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

msgpack = pytest.importorskip("msgpack", reason="pip install 'wamlab[serve]'")
pytest.importorskip("websockets", reason="pip install 'wamlab[serve]'")

from websockets.exceptions import ConnectionClosed  # noqa: E402
from websockets.sync.client import ClientConnection, connect  # noqa: E402

from wamlab.serve.arrays import decode, encode  # noqa: E402
from wamlab.serve.protocol import Contract  # noqa: E402
from wamlab.serve.server import PolicyServer, ServeConfig, served  # noqa: E402
from wamlab.serve.sessions import Memory  # noqa: E402
from wamlab.types import Observation  # noqa: E402

NUM_MESSAGES = int(os.environ.get("WAMLAB_HOSTILE_MESSAGES", "400"))
LIMITS = ServeConfig(port=0, max_message_mib=0.05, idle_s=2.0, handshake_s=1.0, max_connections=200, memory_gib=1e-3)
NUM_GOOD = 3
GROWTH_MIB = 48  # of this process, clients and all, between a tenth of the messages and the last; 10,000 took 8


class Chained:
    """Answers with the state it got, and carries the number of calls in a memory of 20 kB."""

    def plan(self, observation: Observation, memories: Sequence[Memory | None]) -> tuple[np.ndarray, Sequence[Memory]]:
        found = [Memory(np.full(2500, memory.value[0] + 1 if memory else 1.0), 20_000) for memory in memories]
        rows = [[state[0], memory.value[0]] for state, memory in zip(observation.state, found, strict=True)]
        return np.repeat(np.array(rows, np.float32)[:, None], 2, axis=1), found


def request(value: float = 0.0, **more: Any) -> bytes:
    frame = np.zeros((4, 4, 3), np.uint8)
    return encode({"observation/top": frame, "state": np.array([value, 1]), "prompt": "go", **more}, "openpi")


@contextmanager
def open_client(server: PolicyServer) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{server.port}", compression=None, max_size=None, close_timeout=0.2) as client:
        client.recv(timeout=20)
        yield client


def malformed(chance: random.Random) -> bytes | str:
    """Return one message that is no request."""
    whole = request()
    damaged = bytearray(whole)
    damaged[chance.randrange(4)] ^= 0xFF
    choices: list[bytes | str] = [
        chance.randbytes(chance.randrange(1, 200)),
        whole[: chance.randrange(len(whole))],
        bytes(damaged),
        "a text frame",
        b"\xdd\xff\xff\xff\xff" + bytes(chance.randrange(20)),  # a list of 4 thousand million values
        b"\x91" * chance.randrange(50, 2000),  # lists in lists
        msgpack.packb([0] * chance.randrange(4097, 9000)),
        request(endpoint=chance.choice(["", "dance", 3, None])),
        request(session_id="x" * chance.randrange(257, 5000), endpoint="infer"),
        encode({"observation/top": np.zeros((0, 4, 3), np.uint8), "state": np.zeros(2), "prompt": "go"}, "openpi"),
        encode({"observation/top": np.zeros((4, 4, 3)), "state": np.zeros(2), "prompt": "go"}, "openpi"),
        msgpack.packb({"prompt": "go", "state": {b"nd": True, b"type": b"|O", b"kind": b"O", b"data": b"cos\nx"}}),
    ]
    return chance.choice(choices)


def send_malformed(server: PolicyServer, number: int, seed: int) -> None:
    """Send so many on one connection, each answered by a sentence; then a request that is answered as ever."""
    chance = random.Random(seed)
    with open_client(server) as client:
        for _ in range(number):
            client.send(malformed(chance))
            reply = client.recv(timeout=30)
            assert isinstance(reply, str) and reply.startswith("error: ") and len(reply) < 500
        client.send(request(7.0))
        reply = client.recv(timeout=30)
        assert isinstance(reply, bytes) and decode(reply)[0]["actions"][0].tolist() == [7.0, 1.0]


def send_oversized(server: PolicyServer) -> None:
    """Send more than is allowed, or what is no websocket frame: the connection ends, with a code."""
    with suppress(ConnectionClosed, OSError), open_client(server) as client:
        client.send(b"x" * 200_000)
        client.recv(timeout=20)
        pytest.fail("an oversized message was answered")


def send_slowly(server: PolicyServer, number: int) -> None:
    """Begin a handshake or a message and never end it; the server hangs up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
        if number % 2:
            client.sendall(
                b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            client.recv(4096)
            client.sendall(b"\x82\xfe\x10\x00\x00\x00\x00\x00" + b"x" * 10)  # 10 of 4,096 bytes
        client.settimeout(0.1)
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            try:
                client.sendall(b"x")  # a byte at a time
                if not client.recv(4096):
                    return
            except TimeoutError:
                continue
            except OSError:  # it hung up
                return
    pytest.fail("a client that never ends its message was served for ever")


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.timeout(1200)
def test_hostile_messages_harm_nobody_and_leave_nothing_behind() -> None:
    """Eight in ten are malformed, one oversized, one never ends; three sessions play on beside them."""
    slow = oversized = NUM_MESSAGES // 10
    bad = NUM_MESSAGES - slow - oversized
    stop, waits_s = threading.Event(), []

    def behave(name: str) -> int:
        """Play one session: what it gets says its own state and how often it has called."""
        calls = 0
        with open_client(server) as client:
            while not stop.is_set():
                start_s = time.perf_counter()
                client.send(request(float(calls), session_id=name))
                reply = client.recv(timeout=60)
                waits_s.append(time.perf_counter() - start_s)
                calls += 1
                assert isinstance(reply, bytes), reply
                assert decode(reply)[0]["actions"][0].tolist() == [calls - 1.0, calls]
                time.sleep(0.01)
        return calls

    def attack(share: slice) -> None:
        list(pool.map(lambda seed: send_malformed(server, 40, seed), range(*share.indices(bad // 40))))
        list(pool.map(lambda _: send_oversized(server), range(*share.indices(oversized))))
        list(slow_pool.map(lambda number: send_slowly(server, number), range(*share.indices(slow))))

    with (
        served(PolicyServer(Chained(), Contract(("top",), 2, 2), LIMITS)) as server,
        ThreadPoolExecutor(NUM_GOOD) as good_pool,
        ThreadPoolExecutor(8) as pool,
        ThreadPoolExecutor(100) as slow_pool,
    ):
        good = [good_pool.submit(behave, f"good {number}") for number in range(NUM_GOOD)]
        try:
            attack(slice(0, None, 10))  # a tenth: what is made lazily
            early_mib = resident_mib()
            attack(slice(None))
        finally:
            stop.set()
        calls = [session.result(60) for session in good]
        end_s = time.monotonic() + 20
        while (server._num_open or len(server.sessions)) and time.monotonic() < end_s:
            time.sleep(0.05)
        growth_mib = resident_mib() - early_mib
        assert server._num_open == 0 and len(server.sessions) == 0 and server.sessions.num_bytes == 0
        assert server.metrics.num_failed == 0 and server.metrics.num_malformed >= bad // 40 * 40
        send_malformed(server, 1, 0)  # it lives
    assert min(calls) > 10
    assert growth_mib < GROWTH_MIB
    print(
        f"\n{bad // 40 * 40 + oversized + slow:,} hostile messages and a tenth more; {sum(calls):,} calls of good "
        f"sessions, p50 {np.percentile(waits_s, 50) * 1000:.1f} ms, p99 {np.percentile(waits_s, 99) * 1000:.1f} ms; "
        f"grew {growth_mib:.1f} MiB"
    )


def test_a_message_in_fragments_that_never_end_is_cut_off_at_the_limit() -> None:
    with (
        served(PolicyServer(Chained(), Contract(("top",), 2, 2), LIMITS)) as server,
        connect(f"ws://127.0.0.1:{server.port}", compression=None, close_timeout=0.2) as client,
    ):
        client.recv(timeout=20)
        with pytest.raises(ConnectionClosed) as closed:
            client.send(b"x" * 1000 for _ in range(1_000_000))
        assert closed.value.rcvd is None or closed.value.rcvd.code == 1009
