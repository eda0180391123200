"""Which rule a cache of decoded frames should follow: hit rate, and frames decoded a sample, without decoding any.

    python experiments/2026-12-02_frame_caches/simulate.py [--episodes 400]

Episodes of 110 to 1,500 rows (median 250, as DROID's) and windows of 33 frames in 97 rows, in the order that training
draws them: exactly shuffled, and pools of 8 and 16 windows of an episode. The second of two epochs counts.

A request costs the frames from its first row to its last, or all of an episode where that is let into the cache; and
"decoded" is that against no cache at all. "future, unpaid" is Belady's rule as it stands in the book, which lets an
episode in for a single use: it hits most and decodes more than no cache does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from wamlab.data.eviction import Future
from wamlab.data.frame_cache import FrameCache
from wamlab.data.order import NEVER, SampleOrder

SPAN, STRIDE, NUM_FRAMES, NUM_LANES = 97, 3, 33, 64
POLICIES = ("keep", "lru", "future, unpaid", "future")


@dataclass(frozen=True)
class Simulated:
    """How a policy did in the second epoch."""

    hit_rate: float
    decoded: float  # frames, as a share of those without a cache
    used_share: float  # of the room, at most


class Told:
    """When episodes come, from a list."""

    def __init__(self, uses: Mapping[int, Sequence[int]]):
        self._uses = {episode: np.array(places) for episode, places in uses.items()}

    def __call__(self, episode: int, after: int) -> int:
        places = self._uses.get(episode, np.zeros(0))
        index = int(np.searchsorted(places, after, side="right"))
        return int(places[index]) if index < len(places) else NEVER


class Blank:
    """A source of one-pixel frames that counts what it would decode."""

    def __init__(self, lengths: np.ndarray):
        self.lengths, self.decoded = lengths, 0

    def frames(self, episode: int, camera: str, rows: np.ndarray) -> np.ndarray:
        self.decoded += int(rows.max() - rows.min()) + 1
        return np.zeros((len(rows), 1, 1, 3), np.uint8)


class Unpaid(Future):
    """Belady's rule that takes no account of what letting in costs."""

    def make_way(self, key, position, num_uses, needed, sizes):
        return super().make_way(key, position, 1, needed, sizes)


@dataclass(frozen=True)
class Request:
    """One turn to the cache: where the stream stands, and which stretch of an episode is read."""

    position: int
    episode: int
    first: int
    last: int


@lru_cache(maxsize=2)
def draw_requests(num_episodes: int, pool: int, num_epochs: int = 2) -> tuple[np.ndarray, list[Request], int]:
    """Return episode lengths, what training asks for in turn, and where the last epoch begins."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(250), 0.5, num_episodes), 110, 1500).astype(int)
    num_windows = lengths - SPAN + 1
    episodes = np.repeat(np.arange(num_episodes), num_windows)
    firsts = np.concatenate([np.arange(n) for n in num_windows])
    order = SampleOrder(
        len(episodes), 0, pool=pool, num_lanes=NUM_LANES if pool > 1 else 1, episodes=episodes, is_shuffled=True
    )
    requests = []
    for number in range(num_epochs):
        epoch = order._epoch(number)
        lane = np.searchsorted(epoch.lane_starts, epoch.starts, side="right") - 1
        places = (epoch.starts - epoch.lane_starts[lane]) * order.num_lanes + lane if pool > 1 else epoch.starts
        drawn = firsts[epoch.samples]  # a group is decoded when its first window comes
        first, last = np.minimum.reduceat(drawn, epoch.starts), np.maximum.reduceat(drawn, epoch.starts) + SPAN - 1
        columns = places + number * len(episodes), episodes[epoch.samples[epoch.starts]], first, last
        requests += [Request(*map(int, row)) for row in sorted(zip(*columns, strict=True))]
    return lengths, requests, (num_epochs - 1) * len(episodes)


def simulate(num_episodes: int, pool: int, *, share: float, policy: str) -> Simulated:
    """Let a cache with room for a share of all frames serve a policy's two epochs."""
    lengths, requests, start = draw_requests(num_episodes, pool)
    uses: dict[int, list[int]] = {}
    for request in requests:
        uses.setdefault(request.episode, []).append(request.position)
    told, source = Told(uses), Blank(lengths)
    cache = FrameCache(source, int(share * lengths.sum()) * 3, next_use=told, policy=policy.split(",")[0])  # pyright: ignore[reportArgumentType]
    if policy == "future, unpaid":
        cache._eviction = Unpaid(told)
    before, decoded, plain, most = cache.report(), 0, 0, 0
    for request in requests:
        if request.position >= start and not plain:
            before, decoded = cache.report(), source.decoded
        cache.frames(request.episode, "camera", np.array([request.first, request.last]), position=request.position)
        plain += (request.last - request.first + 1) * (request.position >= start)
        most = max(most, cache.used_bytes)
    after = cache.report()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return Simulated(hits / (hits + misses), (source.decoded - decoded) / plain, most / after.max_bytes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    num_episodes = parser.parse_args().episodes
    print(f"{num_episodes} episodes; hit rate, and frames decoded against no cache")
    print("| order | room | " + " | ".join(POLICIES) + " |")
    print("|---" * (2 + len(POLICIES)) + "|")
    for pool in (1, 8, 16):
        for share in (0.05, 0.1, 0.25, 0.5):
            found = [simulate(num_episodes, pool, share=share, policy=policy) for policy in POLICIES]
            cells = " | ".join(f"{result.hit_rate:.0%}, {result.decoded:.2f}" for result in found)
            name = f"pool {pool}" if pool > 1 else "exact"
            print(f"| {name} | {share:.0%} | {cells} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
