"""Whether a cache of decoded frames should keep whole episodes or the rows asked for so far.

    python experiments/2026-12-02_frame_caches/grain.py [--episodes 60]

The requests of simulate.py, with all rows of their windows, under Belady's rule; a whole episode has to pay for its
decoding. Costs count the frames decoded from each key frame to the last wanted row before the next one, and 0.3 of a
decoded frame for every converted one. The second of two epochs counts, against no cache.
"""

from __future__ import annotations

import argparse

import numpy as np
from simulate import NUM_FRAMES, NUM_LANES, SPAN, STRIDE, Told  # pyright: ignore[reportMissingImports]

from wamlab.data.eviction import Future, Key
from wamlab.data.order import SampleOrder

CONVERTED = 0.3  # of the CPU of a decoded frame (180p: 0.145 of 0.43 ms)


def cost(rows: np.ndarray, interval: int) -> float:
    """Return decoded frames, and converted ones at their share, for sorted rows of a video."""
    if not len(rows):
        return 0.0
    ends = np.append(np.flatnonzero(np.diff(rows // interval)), len(rows) - 1)
    return float((rows[ends] % interval + 1).sum()) + CONVERTED * len(rows)


def draw(num_episodes: int, pool: int) -> tuple[np.ndarray, list[tuple[int, int, np.ndarray]], int]:
    """Return episode lengths, each request's position, episode and rows, and where the second epoch begins."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(250), 0.5, num_episodes), 110, 1500).astype(int)
    episodes = np.repeat(np.arange(num_episodes), lengths - SPAN + 1)
    firsts = np.concatenate([np.arange(n) for n in lengths - SPAN + 1])
    num_lanes = NUM_LANES if pool > 1 else 1
    order = SampleOrder(len(episodes), 0, pool=pool, num_lanes=num_lanes, episodes=episodes)
    seen, requests = set(), []
    for position in range(2 * len(episodes)):
        drawn = order.draw(position)
        if pool > 1 and drawn.group in seen:
            continue
        seen.add(drawn.group)
        rows = np.unique(firsts[list(drawn.members)][:, None] + STRIDE * np.arange(NUM_FRAMES))
        requests.append((position, int(episodes[drawn.sample]), rows))
    return lengths, requests, len(episodes)


def simulate(num_episodes: int, pool: int, interval: int, share: float, *, is_whole: bool) -> tuple[float, float]:
    """Return the share of requests served fully from memory, and the cost against no cache."""
    lengths, requests, start = draw(num_episodes, pool)
    uses: dict[int, list[int]] = {}
    for position, episode, _ in requests:
        uses.setdefault(episode, []).append(position)
    rule, room = Future(Told(uses)), share * lengths.sum()
    kept: dict[Key, np.ndarray] = {}
    sizes: dict[Key, int] = {}
    hits = count = 0
    spent = plain = 0.0
    for position, episode, rows in requests:
        key, counts = (episode, ""), position >= start
        direct = cost(rows, interval)
        count, plain = count + counts, plain + direct * counts
        has = kept[key] if key in kept else np.zeros(lengths[episode], bool)
        if key in kept:
            rule.touch(key, position)
        if has[rows].all():
            hits += counts
            continue
        wanted = np.arange(lengths[episode]) if is_whole else rows[~has[rows]]
        price = cost(wanted, interval)
        lacking = sum(sizes.values()) + len(wanted) - room
        num_uses = max(1, int(np.ceil(price / direct))) if is_whole else 1
        dropped = rule.make_way(key, position, num_uses, int(np.ceil(lacking)), sizes) if lacking > 0 else []
        for old in dropped:
            del kept[old], sizes[old]
            rule.forget(old)
        if lacking > 0 and not dropped:
            spent += (direct if is_whole else price) * counts
            continue
        spent += price * counts
        has[wanted] = True
        kept[key], sizes[key] = has, int(has.sum())
        rule.touch(key, position)
    return hits / count, spent / plain


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=60)
    num_episodes = parser.parse_args().episodes
    print(f"{num_episodes} episodes; full hits, and cost against no cache")
    print("| order | key frame every | room | whole episodes | rows |\n|---|---|---|---|---|")
    for pool in (1, 8):
        for interval in (2, 30, 250):
            for share in (0.1, 0.25, 0.5):
                cells = [simulate(num_episodes, pool, interval, share, is_whole=w) for w in (True, False)]
                shown = " | ".join(f"{hits:.0%}, {spent:.2f}" for hits, spent in cells)
                print(f"| {f'pool {pool}' if pool > 1 else 'exact'} | {interval} | {share:.0%} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
