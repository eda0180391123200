"""Requests of many clients, gathered for one call of the policy, which runs beside the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from wamlab.serve.protocol import Request
from wamlab.serve.sessions import Carries, Memory, Session
from wamlab.types import Observation, Policy


@dataclass(frozen=True)
class Planned:
    """What one request got."""

    actions: np.ndarray  # [a j]
    infer_ms: float  # of the call it was part of
    batch_size: int


@dataclass
class _Waiting:
    request: Request
    session: Session
    planned: asyncio.Future[Planned]

    @property
    def kind(self) -> tuple[object, ...]:
        """Only frames of equal sizes make one array."""
        return tuple(frame.shape for frame in self.request.frames.values())


class Batcher:
    """Calls a policy for as many sessions at once as wait within a deadline.

    ``count_clients`` says how many could ask: once that many have, nothing is waited for. A call that fails is made
    again for each session alone, so that only the one at fault hears of it.
    """

    def __init__(
        self,
        policy: Policy | Carries,
        executor: Executor,
        *,
        max_batch: int,
        deadline_s: float,
        count_clients: Callable[[], int],
    ) -> None:
        self._policy, self._executor = policy, executor
        self._max_batch, self._deadline_s = max_batch, deadline_s
        self._count_clients = count_clients
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self.num_calls = 0

    async def plan(self, request: Request, session: Session) -> Planned:
        """Return the actions of one request and keep its session's memory; raises what the policy raised.

        A session has one request here at a time.
        """
        waiting = _Waiting(request, session, asyncio.get_running_loop().create_future())
        await self._queue.put(waiting)
        return await waiting.planned

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            group = await self._gather()
            kinds: dict[tuple[object, ...], list[_Waiting]] = {}
            for waiting in group:
                kinds.setdefault(waiting.kind, []).append(waiting)
            for alike in kinds.values():
                await self._call(alike)

    async def _gather(self) -> list[_Waiting]:
        group = [await self._queue.get()]
        end_s = time.monotonic() + self._deadline_s
        while len(group) < self._max_batch:
            if not self._queue.empty():
                group.append(self._queue.get_nowait())
                continue
            left_s = end_s - time.monotonic()
            if left_s <= 0 or len(group) >= self._count_clients():
                break
            try:
                group.append(await asyncio.wait_for(self._queue.get(), left_s))
            except TimeoutError:
                break
        return group

    async def _call(self, group: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        start_s = time.perf_counter()
        try:
            chunks, memories = await loop.run_in_executor(self._executor, self._plan, group)
        except Exception as error:  # of the policy, any: it belongs to the client that caused it
            if len(group) == 1:
                _settle(group[0], error)
                return
            for waiting in group:
                await self._call([waiting])
            return
        self.num_calls += 1
        infer_ms = (time.perf_counter() - start_s) * 1000
        for waiting, actions, memory in zip(group, chunks, memories, strict=True):
            if np.isfinite(actions).all():
                waiting.session.memory = memory
                _settle(waiting, Planned(actions, infer_ms, len(group)))
            else:
                _settle(waiting, ValueError("its actions are not finite"))

    def _plan(self, group: Sequence[_Waiting]) -> tuple[np.ndarray, Sequence[Memory | None]]:
        first = group[0].request
        observation = Observation(
            frames={camera: np.stack([w.request.frames[camera] for w in group]) for camera in first.frames},
            state=np.stack([w.request.state for w in group]),
            instructions=[w.request.instruction for w in group],
            session=np.array([w.session.number for w in group]),
            films=[w.request.film for w in group],
        )
        memories: Sequence[Memory | None] = [w.session.memory for w in group]
        if isinstance(self._policy, Carries):
            chunks, memories = self._policy.plan(observation, memories)
        else:
            chunks = np.asarray(self._policy(observation))
        if chunks.ndim != 3 or len(chunks) != len(group) or not chunks.shape[1]:
            raise ValueError(f"it returned actions of shape {chunks.shape} for {len(group)} sessions")
        return chunks, memories


def _settle(waiting: _Waiting, result: Planned | Exception) -> None:
    if waiting.planned.done():  # its client has gone
        return
    if isinstance(result, Exception):
        waiting.planned.set_exception(result)
    else:
        waiting.planned.set_result(result)
