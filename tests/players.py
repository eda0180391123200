"""Policies and environments small enough to play many episodes; worker processes import them too."""

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from small_policy import SmallNet, batch_of
from torch import Tensor

from wamlab.rl.play import PlayedGroup
from wamlab.rl.segments import Asked, Group, Planned, Segment, Setting, noise_generator
from wamlab.sim.vector import TabletopVector
from wamlab.types import Noised

EXACT = Setting(seed=3, iteration=2, sampler="small", is_exact=True)
FAMILIES = ("reach", "push", "pick_place", "stack")
NUM_TICKS = 4
# with noise of their own, which snapshots keep; pictures take most of the time, and few tests look at them
make_table = partial(TabletopVector, 1, size=32, action_noise=0.1, cameras=())
make_seen_table = partial(TabletopVector, 1, size=32, action_noise=0.1)


def groups_of(number: int, cap: int = 10) -> list[Group]:
    return [Group(n, FAMILIES[n % 4], seed=100 + n, cap=cap) for n in range(number)]


class SmallHands:
    """Plans with a small network from state, noise by counters and what it remembers: its last action."""

    def __init__(self, version: int = 0, sleep_s: float = 0.0) -> None:
        self.net, self.version, self.sleep_s = SmallNet(action_dim=4, state_dim=5), version, sleep_s

    @torch.no_grad()
    def __call__(self, asked: Asked) -> Planned:
        assert asked.policy_version == self.version
        time.sleep(self.sleep_s)
        noise = np.stack([noise_generator(key).standard_normal((NUM_TICKS, 4)) for key in asked.keys])
        last = np.stack([memory.get("last", np.zeros(4)) for memory in asked.memories])
        batch = batch_of(torch.from_numpy(asked.observation.state).double(), NUM_TICKS, 4)
        levels = torch.ones(len(noise), 3, dtype=torch.float64), torch.ones(len(noise), NUM_TICKS, dtype=torch.float64)
        seen = Noised(batch.latents, torch.from_numpy(noise + 0.3 * last[:, None]), *levels)
        actions = self.net(batch, seen).actions.tanh().numpy()
        return Planned(actions, {"noise": noise}, [{"last": row[-1]} for row in actions])

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        missing = self.net.load_state_dict(weights, strict=False)
        assert not missing.unexpected_keys
        self.version = version


class Forgetful:
    """A tabletop that cannot be restored: its episodes are replayed."""

    num_envs = 1

    def __init__(self, task: str) -> None:
        self._table = make_table(task)
        self.reset, self.chunk_step = self._table.reset, self._table.chunk_step

    @property
    def instructions(self) -> list[str]:
        return self._table.instructions

    @property
    def is_done(self) -> np.ndarray:
        return self._table.is_done

    @property
    def is_success(self) -> np.ndarray:
        return self._table.is_success


class TroubledHands(SmallHands):
    """Hands of a process that, when a file of that name lies in the folder, "die", "sleep" or "fail" with worker 0."""

    def __init__(self, folder: Path, worker: int) -> None:
        super().__init__(sleep_s=0.005)
        self.folder, self.worker, self.num_calls = folder, worker, 0

    def __call__(self, asked: Asked) -> Planned:
        self.num_calls += 1
        for trouble in ("die", "sleep", "fail"):
            path = self.folder / trouble
            if self.worker == 0 and self.num_calls > 2 and path.exists():
                path.unlink()  # once
                if trouble == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif trouble == "sleep":
                    time.sleep(1.5)
                else:
                    raise ValueError("these hands are tied")
        return super().__call__(asked)


def bits_of(segment: Segment) -> tuple:
    """Return all of a trajectory that must not depend on who played it when."""
    arrays = tuple((name, value.dtype.str, value.tobytes()) for name, value in sorted(segment.chunks.items()))
    return segment.key, segment.num_chunks, segment.num_ticks, segment.is_success, arrays


def all_bits(played: list[PlayedGroup]) -> dict[tuple[int, int], tuple]:
    return {segment.key: bits_of(segment) for group in played for segment in group.segments}
