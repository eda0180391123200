"""A websocket server around a policy: many clients, batched calls, bounded sessions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType

import websockets
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response

from wamlab.errors import InputError, check_range
from wamlab.serve.arrays import encode
from wamlab.serve.batching import Batcher
from wamlab.serve.metrics import Metrics
from wamlab.serve.protocol import REPLIES, RESET_DONE, Contract, Request, read_request, write_reply
from wamlab.serve.sessions import Carries, Session, Sessions
from wamlab.types import Policy

LOG = logging.getLogger(__name__)
QUIET = logging.getLogger(f"{__name__}.websockets")  # clients that come and go are no news
QUIET.setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class ServeConfig:
    """Where a server listens and what it allows."""

    host: str = "127.0.0.1"  # this machine alone; "0.0.0.0" opens it to the network, without any password
    port: int = 8000  # 0 takes a free one
    max_batch: int = 32  # sessions of one call; 1 gives each the bits that it would get alone
    deadline_ms: float = 10.0  # that a request waits for others
    reply: str = "dict"  # to RoboArena's dialect; "array" for DreamZero's own test client
    max_message_mib: float = 64.0
    max_connections: int = 256
    max_sessions: int = 1024
    memory_gib: float = 2.0  # of what is kept of sessions between their requests
    idle_s: float = 600.0  # without a whole request a connection is closed, and a session forgotten
    ping_s: float = 20.0  # between keep-alives, and allowed for their answer
    handshake_s: float = 10.0
    grace_s: float = 30.0  # for requests at work when the server ends

    def __post_init__(self) -> None:
        check_range("serve", self, 0, 65_535, "port")
        check_range("serve", self, 1, 1e6, "max_batch", "max_connections", "max_sessions")
        check_range("serve", self, 0, 1e5, "deadline_ms", "memory_gib", "grace_s")
        check_range("serve", self, 1e-3, 1e6, "max_message_mib", "idle_s", "ping_s", "handshake_s")
        if self.reply not in REPLIES:
            raise InputError(f"serve.reply is {self.reply!r}: give {' or '.join(REPLIES)}")


class PolicyServer:
    """Serves a policy: ``async with PolicyServer(policy, contract) as server``; ``server.port`` is where.

    The policy runs in one thread of its own, so that keep-alives and health checks are answered meanwhile. If it
    ``Carries`` memories, each is kept with its session until that ends: by a reset, with its connection, idle, or as
    the least recently used when all take more than ``memory_gib``; what is being planned comes on top. Give
    ``executor`` (of one thread, ended with the server) if the policy was made in it: on a CPU a second thread that
    computes has OpenMP workers of its own, and both then wait for cores (102 ms against 165 ms for a batch of 32 on
    2 cores, torch 2.13, 2026-12-03).
    """

    def __init__(
        self,
        policy: Policy | Carries,
        contract: Contract,
        config: ServeConfig | None = None,
        *,
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        self.policy, self.contract, self.config = policy, contract, config or ServeConfig()
        self.metrics = Metrics()
        self.sessions = Sessions(max_sessions=self.config.max_sessions)
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._batcher = Batcher(
            policy,
            self._executor,
            max_batch=self.config.max_batch,
            deadline_s=self.config.deadline_ms / 1000,
            count_clients=lambda: self._num_open,
        )
        self._num_open = self._num_at_work = 0
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self._server: Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None, "the server has not started"
        return next(iter(self._server.sockets)).getsockname()[1]

    async def __aenter__(self) -> PolicyServer:
        config = self.config
        self._server = await serve(
            self._converse,
            config.host,
            config.port,
            process_request=self._answer_http,
            origins=[None],  # programs name none; a page in some browser does, and may not steer a robot
            compression=None,
            max_size=int(config.max_message_mib * 2**20),
            max_queue=1,  # requests that wait unread stay with their client
            open_timeout=config.handshake_s,
            ping_interval=config.ping_s,
            ping_timeout=config.ping_s,
            close_timeout=config.handshake_s,
            server_header=None,
            logger=QUIET,
        )
        self._tasks = [asyncio.create_task(self._batcher.run()), asyncio.create_task(self._sweep())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Answer what is at work, for ``grace_s`` at most, refuse what comes, then close every connection."""
        assert self._server is not None
        self._is_ending = True
        end_s = time.monotonic() + self.config.grace_s
        while self._num_at_work and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._server.wait_closed(), *self._tasks, return_exceptions=True)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.config.idle_s / 4)
            self.sessions.evict_idle(self.config.idle_s)

    def _answer_http(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        """Answer health checks and metrics; any other path is the way to the policy."""
        path = request.path.partition("?")[0]
        if self._is_ending:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending\n")
        if path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        if path == "/metrics":
            return connection.respond(HTTPStatus.OK, self.metrics_text())
        if self._num_open >= self.config.max_connections:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "the server has no free connection\n")
        return None

    @property
    def num_calls(self) -> int:
        """Return how often the policy was called."""
        return self._batcher.num_calls

    def metrics_text(self) -> str:
        """Return counters, latencies and the state of this moment as Prometheus text."""
        calls = self.num_calls
        gauges = {
            "connections": self._num_open,
            "sessions": len(self.sessions),
            "session_bytes": self.sessions.num_bytes,
            "evicted_total": self.sessions.num_evicted,
            "calls_total": calls,
            "batch_size_mean": self.metrics.num_planned / calls if calls else 0,
        }
        return self.metrics.text(gauges)

    async def _converse(self, socket: ServerConnection) -> None:
        """Speak first, then answer each request, until the client goes or falls silent."""
        config, previous_ms = self.config, None
        self._num_open += 1
        self.metrics.num_connections += 1
        self.sessions.connect(socket)
        try:
            await socket.send(encode(self.contract.metadata(), "openpi"))
            while True:
                async with asyncio.timeout(config.idle_s):
                    message = await socket.recv()
                start_s = time.perf_counter()
                self._num_at_work += 1
                try:
                    reply = await self._answer(socket, message, previous_ms)
                    del message
                    async with asyncio.timeout(config.idle_s):
                        await socket.send(reply)
                finally:
                    self._num_at_work -= 1
                previous_ms = (time.perf_counter() - start_s) * 1000
        except TimeoutError:
            await socket.close(1001, f"no whole message in {config.idle_s:g} s")
        except websockets.ConnectionClosed:
            return  # ours to say nothing: clients go when they like
        finally:
            self._num_open -= 1
            self.sessions.disconnect(socket)

    async def _answer(self, socket: ServerConnection, message: bytes | str, previous_ms: float | None) -> bytes | str:
        """Return the reply to one message: bytes, or a text that clients take for an error."""
        self.metrics.num_requests += 1
        start_s = time.perf_counter()
        try:
            if self._is_ending:
                raise InputError("the server is ending")
            request = read_request(message, self.contract)
            if request.is_reset:
                self.sessions.reset(socket, request.session_id)
                return RESET_DONE
            session = self.sessions.find(socket, request.session_id)
        except InputError as error:
            self.metrics.num_malformed += 1
            return f"error: {error}"
        session.num_at_work += 1
        try:
            async with session.turn:
                return await self._plan(request, session, start_s, previous_ms)
        except Exception as error:  # of the policy, any: the connection and the other sessions live on
            self.metrics.num_failed += 1
            LOG.exception("the policy failed")
            return f"error: the policy failed: {type(error).__name__}: {error}"
        finally:
            session.num_at_work -= 1
            self.sessions.keep_within(int(self.config.memory_gib * 2**30))

    async def _plan(self, request: Request, session: Session, start_s: float, previous_ms: float | None) -> bytes:
        timing_ms = {} if previous_ms is None else {"prev_total_ms": previous_ms}
        if request.dialect == "molmospaces":
            if self.contract.film_frames > 1:
                request = session.filmed(request)
            if session.waiting:
                return write_reply(request, session.waiting.pop(0)[None], timing_ms)
        planned = await self._batcher.plan(request, session)
        self.metrics.num_planned += 1
        if request.dialect == "molmospaces":
            session.waiting = list(planned.actions[1:].copy())
        reply = write_reply(
            request, planned.actions, {"infer_ms": planned.infer_ms, **timing_ms}, reply=self.config.reply
        )
        self.metrics.latencies_ms.append((time.perf_counter() - start_s) * 1000)
        return reply


def serve_forever(server: PolicyServer, announce: Callable[[str], object] = print) -> None:
    """Serve in this thread until Ctrl-C or a termination signal; ``announce`` is told the address."""

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with server:
            announce(f"ws://{server.config.host}:{server.port} (/healthz, /metrics); Ctrl-C ends it")
            await stop.wait()

    asyncio.run(main())


@contextlib.contextmanager
def served(server: PolicyServer) -> Generator[PolicyServer, None, None]:
    """Serve from a thread of its own while the block runs, e.g. in a notebook."""
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    errors: list[BaseException] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        async with server:
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # handed to the thread that waits for the start
            errors.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="policy server", daemon=True)
    thread.start()
    started.wait()
    try:
        if errors:
            raise errors[0]
        yield server
    finally:
        if thread.is_alive():
            loops[0].call_soon_threadsafe(stop.set)
        thread.join()
