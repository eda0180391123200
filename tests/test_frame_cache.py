"""The memory cache of frames: the same frames as without, within its room, and what the stream needs soonest."""

import runpy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from wamlab.data.cache_room import Room
from wamlab.data.frame_cache import STRETCH_ROWS, FrameCache
from wamlab.data.frame_source import FrameSource
from wamlab.data.order import NEVER, SampleOrder
from wamlab.errors import InputError

PATH = Path(__file__).resolve().parents[1] / "experiments" / "bench" / "frame_caches.py"
LENGTHS = (100, 20, 70, 33, 150)
FRAME_BYTES = 4 * 6 * 3


class Counted:
    """Frames that say where they come from, and a count of how often each was decoded."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, delay_s: float = 0.0, broken: tuple[int, int] | None = None):
        self.lengths, self.delay_s, self.broken = lengths, delay_s, broken
        self.decoded: dict[tuple[int, str, int], int] = {}
        self.lock = threading.Lock()

    def frames(self, episode: int, camera: str, rows: np.ndarray) -> np.ndarray:
        if episode >= len(self.lengths) or (rows < 0).any() or (rows >= self.lengths[episode]).any():
            raise InputError("no such row")
        if self.broken and episode == self.broken[0] and self.broken[1] in rows:
            raise InputError("that frame is damaged")
        time.sleep(self.delay_s)
        with self.lock:
            for row in np.unique(rows).tolist():
                self.decoded[episode, camera, row] = self.decoded.get((episode, camera, row), 0) + 1
        noise = np.random.default_rng([episode, len(camera)]).integers(
            0, 256, (self.lengths[episode], 4, 6, 3), np.uint8
        )
        return noise[rows]


def requests(num: int, seed: int) -> list[tuple[int, str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        episode = int(rng.integers(len(LENGTHS)))
        count = int(rng.integers(1, 12))
        rows = rng.integers(0, LENGTHS[episode], count)
        found.append((episode, ("top", "left")[int(rng.integers(2))], rows if rng.random() < 0.5 else np.sort(rows)))
    return found


@pytest.mark.parametrize("policy", ["future", "lru", "keep"])
@pytest.mark.parametrize("num_stretches", [0, 1, 5, 1000])
def test_threads_get_the_same_frames_as_without_a_cache(policy, num_stretches):
    source, order = Counted(), SampleOrder(500, 1, episodes=np.arange(500) % len(LENGTHS))
    cache = FrameCache(source, num_stretches * STRETCH_ROWS * FRAME_BYTES, policy=policy)
    cache.follow(order.next_use)

    def check(item: tuple[int, tuple[int, str, np.ndarray]]) -> None:
        position, (episode, camera, rows) = item
        frames = cache.frames(episode, camera, rows, position=position)
        np.testing.assert_array_equal(frames, source.frames(episode, camera, rows))
        frames[:] = 0  # what is returned belongs to the caller
        report = cache.report()
        assert 0 <= report.used_bytes <= report.max_bytes

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(check, enumerate(requests(300, 3))))
    report = cache.report()
    assert cache.used_bytes == sum(stretch.nbytes for stretch in cache._kept.values())
    assert (report.hits > 0) == (num_stretches > 0)
    assert isinstance(cache, FrameSource)


def test_threads_that_want_the_same_episode_decode_it_once():
    source = Counted(delay_s=0.05)
    cache = FrameCache(source, 2**20)
    cache.frames(1, "top", np.array([0]))  # tells how large a frame is
    source.decoded.clear()
    start = threading.Barrier(8)

    def read(thread: int) -> np.ndarray:
        start.wait()
        return cache.frames(4, "top", np.arange(thread, 120, 7))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    assert set(source.decoded.values()) == {1}


def test_a_full_cache_drops_what_is_needed_latest_and_takes_nothing_needed_later():
    room = Room(3)
    assert [room.admit(key, 1, use) for key, use in (("a", 10), ("b", 30), ("c", 20))] == [[], [], []]
    assert room.admit("d", 1, 40) is None
    assert room.admit("d", 1, 30) is None  # no gain
    assert room.admit("d", 2, 15) == ["b", "c"]
    room.touch("a", 50)
    assert room.admit("e", 1, 49) == ["a"]
    assert room.admit("f", 4, 1) is None
    room.renew(200, lambda key: NEVER)
    assert room.admit("g", 3, 300) == ["e", "d"] or room.used_bytes == 3


def test_without_a_future_nothing_kept_is_dropped():
    cache = FrameCache(Counted(), 2 * STRETCH_ROWS * FRAME_BYTES)
    for episode in (0, 2, 3, 4):
        for _ in range(2):
            cache.frames(episode, "top", np.arange(STRETCH_ROWS))
    report = cache.report()
    assert (report.num_evicted, report.used_bytes) == (0, report.max_bytes)
    assert set(cache._kept) == {(0, "top", 0), (2, "top", 0)}


def test_a_damaged_frame_spoils_only_the_requests_that_ask_for_it():
    source = Counted(broken=(0, 20))
    cache = FrameCache(source, 2**20)
    rows = np.array([3, 25, 40])
    np.testing.assert_array_equal(cache.frames(0, "top", rows), source.frames(0, "top", rows))
    with pytest.raises(InputError, match="that frame is damaged"):
        cache.frames(0, "top", np.array([19, 20]))
    assert cache.used_bytes == sum(stretch.nbytes for stretch in cache._kept.values())
    for rows in (np.array([100]), np.array([-1])):
        with pytest.raises(InputError, match="no such row"):
            cache.frames(0, "top", rows)


@pytest.mark.parametrize("options", [{"max_bytes": -1}, {"max_bytes": 1, "policy": "fifo"}])
def test_a_cache_refuses_settings_that_make_no_sense(options):
    with pytest.raises(InputError, match="frame cache"):
        FrameCache(Counted(), **options)


@pytest.mark.parametrize("pool", [1, 8])
def test_knowing_the_future_hits_more_and_decodes_less(pool):
    bench = runpy.run_path(str(PATH))
    work = bench["Workload"](num_episodes=60, mean_rows=150, pool=pool, sampling=6 if pool == 1 else 2)
    found = {policy: bench["simulate"](work, fraction=0.3, policy=policy) for policy in ("future", "lru", "keep")}
    assert found["future"].hit_rate > 1.2 * max(found["lru"].hit_rate, found["keep"].hit_rate)
    assert found["future"].decoding < min(found["lru"].decoding, found["keep"].decoding, 1.0)
