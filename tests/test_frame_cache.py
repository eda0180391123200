"""Decoded frames in memory: the same frames whatever is kept, never more than the room, and the right ones kept."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from wamlab.data.frame_cache import FrameCache, FrameSource
from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.types import Episode

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "2026-12-02_frame_caches"))
from simulate import Told, simulate  # pyright: ignore[reportMissingImports]

TOP = "observation.images.top"
FRAME_BYTES = 32 * 48 * 3
LENGTHS = (12, 7, 15, 9)


class Counted:
    """Frames that say which they are, of a source that counts what it decodes."""

    def __init__(self, lengths: tuple[int, ...], delay_s: float = 0.0, broken: tuple[int, ...] = ()):
        self.lengths = np.array(lengths)
        self.delay_s, self.broken = delay_s, broken
        self.decoded: list[tuple[int, str, int]] = []  # episode, camera, number of rows

    def frames(self, episode: int, camera: str, rows: np.ndarray) -> np.ndarray:
        time.sleep(self.delay_s)
        self.decoded.append((episode, camera, len(rows)))
        if episode in self.broken and rows.max() > 3:
            raise InputError(f"episode {episode} is broken")
        return self.expected(episode, camera, rows)

    def expected(self, episode: int, camera: str, rows: np.ndarray) -> np.ndarray:
        pixels = np.zeros((len(rows), 1, 2, 3), np.uint8)
        pixels[:, 0, 0, 0], pixels[:, 0, 0, 1], pixels[:, 0, 1, 2] = rows, episode, len(camera)
        return pixels

    @property
    def num_whole(self) -> int:
        return sum(length == self.lengths[episode] for episode, _, length in self.decoded)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> RobotDataset:
    rng = np.random.default_rng(0)

    def recorded(length: int) -> Episode:
        vectors = rng.normal(size=(length, 2)).astype(np.float32)
        frames = {"top": rng.integers(0, 256, (length, 32, 48, 3)).astype(np.uint8)}
        return Episode(frames=frames, state=vectors, action=vectors, instruction="go", fps=10.0)

    return open_dataset(write_dataset(map(recorded, LENGTHS), tmp_path_factory.mktemp("cache") / "robot"))


@pytest.mark.parametrize("policy", ["future", "lru", "keep"])
@pytest.mark.parametrize("num_kept", [0, 13, 30, 1000])
def test_threads_get_the_decoders_frames_with_any_room(dataset, policy, num_kept):
    cache = FrameCache(
        dataset, num_kept * FRAME_BYTES, next_use=lambda episode, after: after + 1 + episode, policy=policy
    )
    direct = {e: dataset.frames(e, TOP, np.arange(length)) for e, length in enumerate(LENGTHS)}

    def read(number: int) -> None:
        rng = np.random.default_rng(number)
        for position in range(number, 60, 3):
            episode = int(rng.integers(4))
            rows = rng.integers(0, LENGTHS[episode], 5)
            frames = cache.frames(episode, TOP, rows, position=position)
            np.testing.assert_array_equal(frames, direct[episode][rows])
            assert cache.used_bytes <= num_kept * FRAME_BYTES

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(read, range(3)))
    report = cache.report()
    assert report.hits + report.misses == (60 if num_kept else 0)
    assert report.used_bytes <= report.max_bytes == num_kept * FRAME_BYTES
    assert isinstance(cache, FrameSource)


def test_threads_that_want_an_episode_at_once_decode_it_once():
    source = Counted((20,) * 3, delay_s=0.05)
    cache = FrameCache(source, 10**6)
    start = threading.Barrier(6)

    def read(number: int) -> np.ndarray:
        start.wait()
        return cache.frames(1, "top", np.array([number]))

    with ThreadPoolExecutor(6) as threads:
        frames = list(threads.map(read, range(6)))
    assert source.num_whole == 1
    assert [int(frame[0, 0, 0, 0]) for frame in frames] == list(range(6))
    assert cache.report().hits == 5


def test_a_frame_kept_may_be_changed_by_who_got_it():
    cache = FrameCache(Counted((5,)), 10**6)
    for _ in range(2):
        frames = cache.frames(0, "top", np.arange(5))
        assert frames[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
        frames[:] = 99


def test_what_comes_soonest_stays_and_what_comes_later_is_not_let_in():
    uses = {0: [0, 90], 1: [1, 7, 8], 2: [2, 4, 5, 6], 3: [3, 91]}
    source = Counted((10,) * 4)
    cache = FrameCache(source, 2 * 60, next_use=Told(uses))
    rows = np.arange(9)
    for position, episode in ((0, 0), (1, 1), (2, 2)):
        cache.frames(episode, "top", rows, position=position)
    # 2 took the place of 0, as it comes twice (one use would not pay for its decoding) before 90
    assert cache.report().dropped == 1
    before = source.num_whole
    cache.frames(3, "top", rows, position=3)  # comes last of all
    assert source.num_whole == before
    for position, episode in ((4, 2), (5, 2), (6, 2), (7, 1), (8, 1)):
        cache.frames(episode, "top", rows, position=position)
    assert cache.report().hits == 5


def test_a_cache_follows_a_stream_that_begins_later():
    source = Counted((10,) * 3)
    cache = FrameCache(source, 60)
    cache.frames(0, "top", np.arange(10))
    cache.follow(Told({0: [100], 1: [0, 1, 2]}))
    for position in range(3):
        cache.frames(1, "top", np.arange(10), position=position)
    assert cache.report().hits == 2


def test_an_episode_that_passed_unasked_is_looked_up_again():
    """Another rank's samples pass by: what was due then must not seem to come soonest for ever."""
    source = Counted((10,) * 3)
    cache = FrameCache(source, 60, next_use=Told({0: [0, 5, 90_000], 1: [1000, 1001, 1002]}))
    cache.frames(0, "top", np.arange(10), position=0)
    for position in range(1000, 1003):
        cache.frames(1, "top", np.arange(10), position=position)
    assert cache.report().hits == 2


def test_an_episode_damaged_in_part_gives_its_other_rows():
    source = Counted((10, 10), broken=(0,))
    cache = FrameCache(source, 10**6)
    for _ in range(2):
        assert cache.frames(0, "top", np.array([1]))[0, 0, 0, 0] == 1
        with pytest.raises(InputError, match="episode 0 is broken"):
            cache.frames(0, "top", np.array([5]))
    assert source.num_whole == 1
    assert cache.used_bytes == 0


@pytest.mark.parametrize("policy", ["keep", "lru", "future"])
@pytest.mark.parametrize(("episode", "camera", "row"), [(9, TOP, 0), (0, "no", 0), (0, TOP, 99), (0, TOP, -1)])
def test_a_wrong_request_is_told_as_the_dataset_does(dataset, policy, episode, camera, row):
    cache = FrameCache(dataset, 10**6, policy=policy, next_use=lambda episode, after: after + 1)
    with pytest.raises(InputError) as direct:
        dataset.frames(episode, camera, np.array([row]))
    with pytest.raises(InputError) as cached:
        cache.frames(episode, camera, np.array([row]))
    assert str(cached.value) == str(direct.value)


def test_a_wrong_setting_is_one_sentence():
    with pytest.raises(InputError, match='policy of a frame cache is "mru": give one of future, lru, keep'):
        FrameCache(Counted((3,)), 10, policy="mru")
    with pytest.raises(InputError, match="needs next_use"):
        FrameCache(Counted((3,)), 10, policy="future")
    with pytest.raises(InputError, match="-1 bytes of room"):
        FrameCache(Counted((3,)), -1)


@pytest.mark.parametrize("pool", [1, 32])
def test_knowing_the_future_beats_forgetting_the_past(pool):
    """Two epochs of 400 episodes in pools, of 10 in an exact shuffle; with room for a quarter."""
    found = {
        policy: simulate(400 if pool > 1 else 10, pool, share=0.25, policy=policy)
        for policy in ("future", "lru", "keep")
    }
    assert found["future"].hit_rate >= 1.3 * max(found["lru"].hit_rate, found["keep"].hit_rate)
    assert found["future"].decoded <= found["keep"].decoded * 1.001
    assert found["future"].decoded < 0.7 * found["lru"].decoded
    assert all(result.used_share <= 1 for result in found.values())
