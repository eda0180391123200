"""How many frames a memory cache of each policy would deliver: a simulation that decodes nothing.

    python experiments/bench/frame_caches.py [episodes]

Counts frames delivered from memory in the second epoch, and decoding work relative to no cache: each frame passed from
the key frame on costs 1, each one delivered 0.3 more (its conversion), as measured for h264 at 320x180.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from wamlab.data.cache_room import Room
from wamlab.data.frame_cache import COVER, STRETCH_ROWS
from wamlab.data.order import SampleOrder

CONVERSION = 0.3


@dataclass(frozen=True)
class Workload:
    """Episodes of random length, and a window at each row where one fits."""

    num_episodes: int = 2000
    mean_rows: int = 250
    num_frames: int = 25
    frame_stride: int = 4
    pool: int = 1
    batch_size: int = 32
    key_frame_every: int = 30
    sampling: int = 1  # only every so many rows start a window


@dataclass(frozen=True)
class Outcome:
    hit_rate: float  # of frames
    decoding: float  # work relative to no cache


def simulate(work: Workload, *, fraction: float, policy: str, stretch_rows: int = STRETCH_ROWS) -> Outcome:
    """Run two epochs with room for a fraction of all frames, and return how the second went."""
    rng = np.random.default_rng(0)
    span = work.frame_stride * (work.num_frames - 1) + 1
    lengths = np.clip(rng.lognormal(np.log(work.mean_rows), 0.5, work.num_episodes).astype(int), span, None)
    firsts = [np.arange(0, length - span + 1, work.sampling) for length in lengths]
    episodes = np.repeat(np.arange(len(lengths)), [len(first) for first in firsts])
    first = np.concatenate(firsts)
    order = SampleOrder(len(first), 1, pool=work.pool, num_lanes=work.batch_size, episodes=episodes)
    room = Room(int(fraction * lengths.sum()), policy)
    steps = work.frame_stride * np.arange(work.num_frames)
    hits = asked = 0
    decoded = plain = 0.0
    seen: set[tuple[int, int]] = set()
    for position in range(2 * order.num_samples):
        draw = order.draw(position)
        if work.pool > 1:
            if draw.group in seen:
                continue
            seen.add(draw.group)
        last = position + (len(draw.members) - 1) * work.batch_size * (work.pool > 1)
        episode = int(episodes[draw.sample])
        rows = np.unique(first[list(draw.members)][:, None] + steps)
        due = order.next_use(episode, last)
        room.renew(position, lambda key, now=position: order.next_use(key[0], now))  # pyright: ignore
        missing, num_hits = [], 0
        stretches, starts = np.unique(rows // stretch_rows, return_index=True)
        for number, mine in zip(stretches.tolist(), np.split(rows, starts[1:]), strict=True):
            start, end = number * stretch_rows, min((number + 1) * stretch_rows, int(lengths[episode]))
            if (episode, number) in room:
                room.touch((episode, number), due)
                num_hits += len(mine)
                continue
            is_covered = min(end, rows[-1] + 1) - max(start, rows[0]) >= COVER * (end - start)
            is_kept = room.admit((episode, number), end - start, due, can_evict=bool(is_covered)) is not None
            missing.append(np.arange(start, end) if is_kept else mine)
        if position >= order.num_samples:
            hits, asked = hits + num_hits, asked + len(rows)
            plain += _work(rows, work.key_frame_every)
            decoded += _work(np.concatenate(missing), work.key_frame_every) if missing else 0.0
    return Outcome(hits / asked, decoded / plain)


def _work(rows: np.ndarray, key_frame_every: int) -> float:
    """Return what decoding rising rows costs: from the last key frame, or from where decoding stands."""
    before = np.concatenate([[-1], rows[:-1]])
    passed = rows - np.maximum(rows // key_frame_every * key_frame_every - 1, before)
    return float(passed.sum() + CONVERSION * len(rows))


def main() -> None:
    num_episodes = int(sys.argv[1]) if len(sys.argv) > 1 else Workload.num_episodes
    print(f"{num_episodes} episodes, windows of 25 frames stride 4; frames from memory / decoding relative to no cache")
    print("pool  room   keep         lru          future       future, whole episodes")
    for pool in (1, 8):
        for fraction in (0.1, 0.3, 0.6):
            work = Workload(num_episodes, pool=pool, sampling=5)
            found = [simulate(work, fraction=fraction, policy=policy) for policy in ("keep", "lru", "future")]
            found.append(simulate(work, fraction=fraction, policy="future", stretch_rows=10**6))
            cells = "  ".join(f"{100 * one.hit_rate:3.0f} % / {one.decoding:.2f}" for one in found)
            print(f"{pool:4}  {100 * fraction:2.0f} %  {cells}", flush=True)


if __name__ == "__main__":
    main()
