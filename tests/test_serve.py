"""The policy server with real sockets: dialects end to end, batching, bounds, misbehaving clients, a graceful end."""

import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pytest

msgpack = pytest.importorskip("msgpack", reason="pip install 'wamlab[serve]'")
pytest.importorskip("websockets", reason="pip install 'wamlab[serve]'")

from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402
from websockets.sync.client import ClientConnection, connect  # noqa: E402

from wamlab.errors import InputError  # noqa: E402
from wamlab.serve.arrays import decode, encode  # noqa: E402
from wamlab.serve.protocol import Contract  # noqa: E402
from wamlab.serve.server import PolicyServer, ServeConfig, served  # noqa: E402
from wamlab.serve.sessions import Memory  # noqa: E402
from wamlab.types import Observation  # noqa: E402

CONTRACT = Contract(("top",), 2, 3)


class Counting:
    """Answers with the session's state, its number of calls and its session number; carries a kilobyte of each."""

    def __init__(self, call_s: float = 0.0) -> None:
        self.call_s = call_s
        self.batch_sizes: list[int] = []
        self.film_sizes: list[int] = []

    def plan(self, observation: Observation, memories: Sequence[Memory | None]) -> tuple[np.ndarray, Sequence[Memory]]:
        time.sleep(self.call_s)
        if "fail" in observation.instructions:
            raise ArithmeticError("as asked")
        numbers = observation.session.tolist()
        self.batch_sizes.append(len(numbers))
        self.film_sizes += [len(film["top"]) for film in observation.films]
        found = [Memory((memory.value if memory else 0) + 1, 1024) for memory in memories]
        rows = [
            [state[0], memory.value, number]
            for state, memory, number in zip(observation.state, found, numbers, strict=True)
        ]
        actions = np.repeat(np.array(rows, np.float32)[:, None], 4, axis=1)
        actions[[text == "nan" for text in observation.instructions]] = np.nan
        return actions, found


def request(value: float = 0.0, prompt: str = "go", size_px: int = 4, **more: Any) -> bytes:
    frame = np.zeros((size_px, size_px, 3), np.uint8)
    state = np.array([value, 1], np.float32)
    return encode({"observation/top": frame, "observation/state": state, "prompt": prompt, **more}, "openpi")


@contextmanager
def open_client(server: PolicyServer, **options: Any) -> Iterator[ClientConnection]:
    address = f"ws://127.0.0.1:{server.port}/any/path"
    with connect(address, compression=None, max_size=None, **options) as client:
        assert isinstance(decode(client.recv())[0], dict)  # pyright: ignore[reportArgumentType]
        yield client


def ask(client: ClientConnection, message: bytes) -> Any:
    client.send(message)
    reply = client.recv(timeout=20)
    return reply if isinstance(reply, str) else decode(reply)[0]


def fetch(server: PolicyServer, path: str) -> str:
    return urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10).read().decode()


def config(**changes: Any) -> ServeConfig:
    return ServeConfig(port=0, **changes)


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    with served(PolicyServer(Counting(), CONTRACT, config())) as running:
        yield running


def test_a_server_listens_to_its_own_machine_alone_tells_its_health_and_counts(server: PolicyServer) -> None:
    assert ServeConfig().host == "127.0.0.1"
    assert fetch(server, "/healthz") == "OK\n"
    with open_client(server) as client:
        for value in (1.0, 2.0):
            reply = ask(client, request(value))
            assert reply["actions"].shape == (4, 3) and reply["actions"][0, 0] == value
        assert reply["server_timing"].keys() == {"infer_ms", "prev_total_ms"}
        text = fetch(server, "/metrics")
    assert "wamlab_serve_requests_total 2\n" in text and "wamlab_serve_connections 1\n" in text
    assert "wamlab_serve_session_bytes 1024\n" in text


def test_roboarena_resets_an_episode_and_molmospaces_gets_actions_one_by_one(server: PolicyServer) -> None:
    with open_client(server) as client:
        infer = request(endpoint="infer", session_id="a")
        assert [ask(client, infer)["actions"][0, 1] for _ in range(3)] == [1, 2, 3]
        assert ask(client, encode({"endpoint": "reset", "session_id": "a"}, "openpi")) == "reset successful"
        actions = ask(client, infer)["actions"]
        assert actions[0, 1:].tolist() == [1, 1]  # first call of session 1
    raw = {"top": np.zeros((4, 4, 3), np.uint8), "qpos": {"arm": [5.0], "gripper": [0.1, 0.1]}, "task": "go"}
    with open_client(server) as client:
        found = [ask(client, encode(raw, "msgpack-numpy")) for _ in range(6)]
    assert [reply["arm"].tolist()[1] for reply in found] == [1, 1, 1, 1, 2, 2]  # planned anew after four


def test_a_session_outlives_its_connection_and_is_no_strangers(server: PolicyServer) -> None:
    named = request(session_id="a")
    with open_client(server) as client:
        assert ask(client, named)["actions"][0, 1] == 1
        with open_client(server) as stranger:
            assert ask(stranger, named)["actions"][0, 1] == 1
    while server._num_open:
        time.sleep(0.01)
    with open_client(server) as client:
        assert ask(client, named)["actions"][0, 1] == 2


def test_requests_of_many_clients_are_planned_together_and_answered_apart() -> None:
    policy = Counting(0.02)
    with served(PolicyServer(policy, CONTRACT, config(max_batch=16))) as server:

        def play(number: int) -> list[float]:
            with open_client(server) as client:
                return [ask(client, request(float(number)))["actions"][0, 0] for _ in range(8)]

        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(play, range(16)))
    assert found == [[float(number)] * 8 for number in range(16)]
    assert max(policy.batch_sizes) > 8 and sum(policy.batch_sizes) == 16 * 8


def test_a_failing_request_harms_no_other_of_its_batch() -> None:
    with served(PolicyServer(Counting(0.02), CONTRACT, config(deadline_ms=200.0))) as server:

        def one(prompt: str) -> Any:
            with open_client(server) as client:
                first = ask(client, request(prompt=prompt))
                return first, ask(client, request())["actions"][0, 0]  # the connection is kept

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(one, ["go", "fail", "go", "nan", "go", "go"]))
    assert [isinstance(first, str) for first, _ in found] == [False, True, False, True, False, False]
    assert "ArithmeticError: as asked" in found[1][0] and "not finite" in found[3][0]
    assert all(after == 0 for _, after in found)


def test_keep_alives_are_answered_while_the_policy_thinks() -> None:
    with (
        served(PolicyServer(Counting(1.5), CONTRACT, config(ping_s=0.2))) as server,
        open_client(server, ping_interval=0.2, ping_timeout=0.4) as client,
    ):
        assert ask(client, request())["actions"][0, 1] == 1
        assert fetch(server, "/healthz") == "OK\n"


def test_memory_of_sessions_stays_within_its_budget_and_idle_ones_go() -> None:
    policy = Counting()
    budget = config(memory_gib=5.5 * 1024 / 2**30, idle_s=1.0)
    with served(PolicyServer(policy, CONTRACT, budget)) as server, open_client(server) as client:
        for name in range(20):
            assert ask(client, request(session_id=str(name)))["actions"][0, 1] == 1
            assert server.sessions.num_bytes <= 5.5 * 1024
        assert ask(client, request(session_id="19"))["actions"][0, 1] == 2  # used lately: still known
        assert ask(client, request(session_id="0"))["actions"][0, 1] == 1  # forgotten
        end_s = time.monotonic() + 5
        while len(server.sessions) and time.monotonic() < end_s:
            time.sleep(0.05)
        assert not len(server.sessions) and not server.sessions.num_bytes


def test_slow_and_vanishing_clients_hold_nothing_up() -> None:
    limits = config(handshake_s=0.5, idle_s=1.0, ping_s=0.5)
    with served(PolicyServer(Counting(), CONTRACT, limits)) as server, ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        slow = [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(30)]
        for place, client in enumerate(slow):
            if place % 3:  # others never speak
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
        for _ in range(5):
            dripping = stack.enter_context(open_client(server, ping_interval=None, close_timeout=0.1))
            dripping.socket.sendall(b"\x82\xfe\x10\x00\x00\x00\x00\x00" + b"x" * 10)  # 10 of 4,096 bytes
        for _ in range(20):
            socket.create_connection(address).close()
        vanishing = stack.enter_context(open_client(server, close_timeout=0.1))
        vanishing.send(request())
        vanishing.socket.shutdown(socket.SHUT_RDWR)
        with open_client(server) as client:
            assert ask(client, request(2.0))["actions"][0, 0] == 2
        end_s = time.monotonic() + 8
        while server._num_open and time.monotonic() < end_s:
            time.sleep(0.05)
        assert server._num_open == 0
        for client in slow:
            with suppress(ConnectionResetError):
                while client.recv(1000):  # at most a refusal, then the end; else this would time out
                    continue
        assert fetch(server, "/healthz") == "OK\n"


def test_more_connections_than_allowed_are_refused() -> None:
    with (
        served(PolicyServer(Counting(), CONTRACT, config(max_connections=1))) as small,
        open_client(small) as client,
    ):
        with pytest.raises(InvalidStatus, match="503"), open_client(small):
            pass
        assert ask(client, request())["actions"].shape == (4, 3)


def test_a_server_that_ends_answers_what_is_at_work_first() -> None:
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        with served(PolicyServer(Counting(0.5), CONTRACT, config())) as server:
            client = stack.enter_context(open_client(server))
            answer = pool.submit(ask, client, request(4.0))
            while not server._num_at_work:
                time.sleep(0.01)
        assert answer.result(5)["actions"][0, 0] == 4
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=5)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001


def test_wrong_settings_are_refused_in_a_sentence(server: PolicyServer) -> None:
    with pytest.raises(InputError, match=r"serve.port is 70000"):
        ServeConfig(port=70_000)
    with pytest.raises(InputError, match=r"serve.reply"):
        ServeConfig(reply="pickle")
    with pytest.raises(OSError), served(PolicyServer(Counting(), CONTRACT, ServeConfig(port=server.port))):
        pass
