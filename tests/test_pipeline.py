"""The stages of the loader: order, back-pressure, errors, pools of windows, skipping, resume, recycled memory."""

import gc
import itertools
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_loader import PLAIN, ROBOT, WINDOW, Numbered, assert_same, numbers, recorded

from wamlab.data.buffers import KEPT, BufferPool
from wamlab.data.clips import ClipReader
from wamlab.data.frame_store import FrameStore
from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.loader import load_clips
from wamlab.data.mixture import mix
from wamlab.data.pipeline import Stage, close
from wamlab.data.reading import DecodedSource
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.types import Clip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> RobotDataset:
    root = tmp_path_factory.mktemp("pipeline") / "robot"
    return open_dataset(write_dataset(map(recorded, (30, 25, 12, 40)), root))


@pytest.fixture(scope="module")
def reader(dataset: RobotDataset) -> ClipReader:
    return ClipReader(dataset, ROBOT, WINDOW, is_training=True)


class Counting:
    """A reader that counts the frames it decodes."""

    def __init__(self, reader: ClipReader):
        self.reader, self.num_rows, self.windows = reader, 0, Counter()

    @property
    def num_samples(self) -> int:
        return self.reader.num_samples

    @property
    def sample_episodes(self) -> np.ndarray:
        return self.reader.sample_episodes

    def read(self, sample_index: int, seed: int) -> Clip:
        return self.reader.read(sample_index, seed)

    def decode(self, samples, position, new=None):
        decoded = self.reader.decode(samples, position, new)
        self.num_rows += len(decoded.rows)
        self.windows[len(samples)] += 1
        return decoded

    def clip(self, sample_index, seed, decoded, new):
        return self.reader.clip(sample_index, seed, decoded, new)


def take(stream, num: int) -> list[list[Clip]]:
    batches = list(islice(stream, num))
    stream.close()
    return batches


@pytest.mark.parametrize("num_threads", [0, 1, 4])
def test_a_stage_keeps_the_order_and_holds_no_more_than_its_depth(num_threads):
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        time.sleep(0.002 * (item % 3))
        return item * item

    stage = Stage("work", count(), work, num_threads=num_threads, depth=6)
    assert list(islice(stage, 20)) == [n * n for n in range(20)]
    time.sleep(0.05)
    assert len(begun) == 20 + (6 if num_threads else 0)
    close([stage])
    assert list(stage) == []


def test_a_stage_ends_with_its_items_and_reports_what_it_did():
    stage = Stage("work", iter(range(7)), lambda item: item, num_threads=3, depth=4)
    assert list(stage) == list(range(7))
    report = stage.report()
    assert (report.num_items, report.num_threads, report.name) == (7, 3, "work")
    assert report.busy_s >= 0
    close([stage])


def test_an_upstream_that_fails_is_heard_at_its_turn():
    def items():
        yield 1
        raise InputError("the disk is gone")

    stages = [first := Stage("a", items(), str, num_threads=2), Stage("b", first, str.strip, num_threads=1)]
    assert next(stages[1]) == "1"
    with pytest.raises(InputError, match="the disk is gone"):
        next(stages[1])
    close(stages)


def test_a_reader_is_a_decoded_source(reader):
    assert isinstance(reader, DecodedSource)
    assert not isinstance(Numbered(3), DecodedSource)


@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("pool", [1, 4])
def test_clips_of_a_pool_are_those_read_one_by_one(reader, num_threads, pool):
    counting = Counting(reader)
    stream = load_clips(counting, batch_size=4, seed=2, num_threads=num_threads, pool=pool)
    batches = take(stream, 15)  # more than half an epoch
    for clip in itertools.chain(*batches):
        windows = reader.windows
        (sample,) = np.flatnonzero((windows[:, 0] == clip.episode) & (windows[:, 1] == clip.first_row))[:1]
        assert_same(clip, reader.read(int(sample), clip.augmentation_seed))
    if pool > 1:
        assert counting.windows[4] > 5
        assert counting.num_rows < 0.8 * 60 * 9  # frames that windows share are decoded once


def test_one_order_for_any_number_of_threads_and_ranks(reader):
    def seen(num: int, **options) -> list[tuple[int, int]]:
        batches = take(load_clips(reader, seed=5, pool=3, **options), num)
        return [(clip.episode, clip.first_row) for clip in itertools.chain(*batches)]

    whole = seen(12, batch_size=4)
    assert seen(12, batch_size=4, num_threads=4) == whole == seen(12, batch_size=4, num_threads=0)
    ranks = [seen(12, batch_size=2, rank=rank, world_size=2) for rank in (0, 1)]
    joined = [ranks[rank][2 * batch : 2 * batch + 2] for batch in range(12) for rank in (0, 1)]
    assert list(itertools.chain(*joined)) == whole


@pytest.mark.parametrize("pool", [1, 3])
def test_a_stream_goes_on_where_its_state_says(reader, pool):
    options: dict[str, Any] = {"batch_size": 4, "seed": 7, "pool": pool}
    whole = take(load_clips(reader, **options), 14)
    stream = load_clips(reader, num_threads=1, **options)
    head = list(islice(stream, 5))  # more were read ahead
    state = stream.state_dict()
    stream.close()
    for num_threads, ranks in ((1, 1), (2, 1), (4, 1), (2, 2)):
        own: dict[str, Any] = options | {"batch_size": 4 // ranks, "num_threads": num_threads, "world_size": ranks}
        streams = [load_clips(reader, rank=r, start_batch=state["next_batch"], **own) for r in range(ranks)]
        assert [stream.check_state(state) for stream in streams] == [5] * ranks
        parts = [take(stream, 9) for stream in streams]
        tail = [list(itertools.chain(*(part[batch] for part in parts))) for batch in range(9)]
        for ours, theirs in zip(itertools.chain(*head, *tail), itertools.chain(*whole), strict=True):
            assert_same(ours, theirs)


def test_a_state_of_another_stream_is_refused(reader):
    state = load_clips(reader, batch_size=4, seed=7).state_dict()
    other = load_clips(reader, batch_size=4, seed=8, pool=2)
    with pytest.raises(InputError, match=r"another one: seed \(was 7, now 8\), pool \(was 1, now 2\)"):
        other.check_state(state)


def fail_on(*bad: int):
    def hook(index: int) -> None:
        if index in bad:
            raise InputError(f"sample {index} is broken")

    return hook


def test_broken_clips_can_be_skipped_counted_and_listed():
    def skipped(num_threads: int):
        stream = load_clips(Numbered(20, fail_on(3, 7)), batch_size=4, seed=1, on_error="skip", num_threads=num_threads)
        batches = numbers(list(islice(stream, 5)))
        report = stream.report()
        stream.close()
        return batches, report

    batches, report = skipped(2)
    assert batches == skipped(0)[0]
    shown = Counter(episode for batch in batches for episode, _ in batch)
    assert sum(shown.values()) == 20
    assert not {3, 7} & shown.keys()
    assert {s.sample for s in report.skipped} >= {3, 7}
    assert report.skipped[0].reason in ("sample 3 is broken", "sample 7 is broken")


def test_too_many_broken_clips_end_the_run():
    stream = load_clips(Numbered(50, fail_on(*range(0, 50, 2))), batch_size=4, seed=1, on_error="skip", max_skipped=5)
    with pytest.raises(InputError, match="more than 5 samples cannot be read; the last one: sample"):
        take(stream, 20)


def test_a_broken_video_names_file_and_frame_and_can_be_skipped(tmp_path: Path):
    root = write_dataset(map(recorded, (30, 25, 12)), tmp_path / "broken", version="v2.1")
    (video,) = root.glob("videos/*/*top/episode_000001.mp4")
    data = bytearray(video.read_bytes())
    start = data.find(b"mdat") + 40
    end = data.find(b"moov", start)  # the index behind the frames stays whole
    data[start : end if end > 0 else None] = bytes(len(data[start : end if end > 0 else None]))
    video.write_bytes(bytes(data))
    reader = ClipReader(open_dataset(root), PLAIN, WINDOW, is_training=True)
    with pytest.raises(InputError, match=r"frame \d+ of .*episode_000001.mp4"):
        take(load_clips(reader, batch_size=4, seed=0, pool=2), 10)
    stream = load_clips(reader, batch_size=4, seed=0, pool=2, on_error="skip")
    clips = list(itertools.chain(*islice(stream, 10)))
    assert len(clips) == 40
    assert {clip.episode for clip in clips} <= {0, 1, 2}
    assert stream.report().skipped
    stream.close()


def test_a_forgotten_stream_leaves_no_thread(reader):
    before = set(threading.enumerate())  # a thread of an earlier test may still end meanwhile
    for _ in range(3):
        for _batch in load_clips(reader, batch_size=2, seed=0, num_threads=3):
            break
    gc.collect()
    assert not set(threading.enumerate()) - before


def test_a_consumer_that_waits_gets_more_threads(monkeypatch):
    monkeypatch.setattr("wamlab.data.loader.num_cores", lambda: 3)

    def slow(index: int) -> None:
        time.sleep(0.01)

    stream = load_clips(Numbered(200, slow), batch_size=4, seed=0, num_threads=None)
    list(islice(stream, 10))
    report = stream.report()
    stream.close()
    assert report.stages[0].num_threads == 3
    assert report.stages[-1].depth == 2  # a stream that is slower than its consumer gains nothing by reading ahead
    assert report.bottleneck == "decode"
    assert report.wait_fraction > 0.5


@pytest.mark.parametrize(("room", "depths"), [(2**30, range(5, 9)), (4 * 9, [3])])
def test_a_stream_reads_further_ahead_by_the_steps_it_was_late_and_no_more_than_its_room(room, depths, monkeypatch):
    monkeypatch.setattr("wamlab.data.loader.MAX_AHEAD_BYTES", room)

    def stumble(index: int) -> None:
        time.sleep(0.4 * (index == 50))

    stream = load_clips(Numbered(400, stumble), batch_size=4, seed=0, is_shuffled=False, prefetch_batches=1)
    for _ in islice(stream, 14):  # clips of 3 bytes
        time.sleep(0.03)
    depth = stream.report().stages[-1].depth
    stream.close()
    assert depth in depths


def test_memory_of_batches_is_used_again_once_nobody_sees_it(reader):
    pool = BufferPool()
    block = pool.take((4, 8, 8, 3))
    address = block.__array_interface__["data"][0]
    view = block[2, 1:]
    del block
    gc.collect()
    assert pool.take((4, 8, 8, 3)).__array_interface__["data"][0] != address  # the view still looks at it
    del view
    gc.collect()
    blocks = [pool.take((4, 8, 8, 3)) for _ in range(3)]
    assert address in [b.__array_interface__["data"][0] for b in blocks]
    stream = load_clips(reader, batch_size=4, seed=0)
    held = next(stream)
    kept = [clip.frames.copy() for clip in held]
    for _ in islice(stream, 12):
        pass
    for clip, copy in zip(held, kept, strict=True):
        np.testing.assert_array_equal(clip.frames, copy)
    size = 4 * held[0].frames.nbytes
    assert stream.report().buffer_bytes <= (KEPT + 6) * size
    stream.close()


def test_a_mixture_of_readers_shares_a_pool(reader):
    mixed = mix([reader, reader], [2.0, 1.0])
    assert isinstance(mixed, DecodedSource)
    stream = load_clips(mixed, batch_size=4, seed=2, pool=3)
    clips = list(itertools.chain(*take(stream, 10)))
    assert len(clips) == 40
    assert mix([reader, Numbered(3)], balance=0.0).ends[0] == reader.num_samples
    with pytest.raises(InputError, match="balance is 2"):
        mix([reader], balance=2.0)


def test_caches_in_a_mixture_keep_what_the_mixture_needs_soonest(dataset):
    room = 2 * 30 * 32 * 32 * 3 / 2**30  # one or two of the four episodes
    plain = ClipReader(dataset, PLAIN, WINDOW, is_training=True)
    few = ClipReader(dataset, PLAIN, WINDOW, is_training=True, episodes=[1, 3], cache_gib=room)
    all_of_them = ClipReader(dataset, PLAIN, WINDOW, is_training=True, cache_gib=room)
    mixed = mix([few, all_of_them, few], [1.0, 2.0, 1.0])
    options: dict[str, Any] = {"batch_size": 4, "seed": 2, "num_threads": 0}
    stream = load_clips(mixed, **options)
    order = stream._reading.order
    uses: dict[tuple[int, int], list[int]] = {}  # positions at which a source's episode is read
    for position in range(2 * mixed.num_samples):
        source, index, _ = mixed._place(order.draw(position).sample)
        uses.setdefault((id(source), int(source.sample_episodes[index])), []).append(position)
    for (owner, episode), positions in uses.items():
        told = (few if owner == id(few) else all_of_them).cache._eviction._next_use  # pyright: ignore[reportAttributeAccessIssue]
        for after in (-1, 5, mixed.num_samples - 1):
            assert told(episode, after) == next(p for p in positions if p > after)
    for clip in itertools.chain(*take(stream, 40)):
        (sample, *_) = np.flatnonzero((plain.windows[:, :2] == [clip.episode, clip.first_row]).all(axis=1))
        assert_same(clip, plain.read(int(sample), clip.augmentation_seed))
    assert few.cache.report().hits > 0
    assert all_of_them.cache.report().hits > 0


@pytest.mark.parametrize("kind", ["decoded", "stored", "kept", "described wrongly"])
def test_frames_from_anywhere_make_the_same_clips(dataset, tmp_path, kind):
    plain = ClipReader(dataset, PLAIN, WINDOW, is_training=True)
    source = FrameStore(dataset, tmp_path / "frames", 2**26) if kind == "stored" else None
    reader = ClipReader(dataset, PLAIN, WINDOW, is_training=True, source=source, cache_gib=float(kind == "kept"))
    if kind == "described wrongly":  # falls back to tiling by what the video says
        reader._has_stored_size = True
        reader.robot = replace(PLAIN, view_height_px=16, view_width_px=16)
        plain.robot = reader.robot
    for num_threads in (0, 2):  # twice, so that caches are full
        stream = load_clips(reader, batch_size=4, seed=2, num_threads=num_threads)
        for clip in itertools.chain(*take(stream, 30)):
            window = np.array([clip.episode, clip.first_row])
            (sample, *_) = np.flatnonzero((plain.windows[:, :2] == window).all(axis=1))
            assert_same(clip, plain.read(int(sample), clip.augmentation_seed))
    if kind == "kept":
        assert reader.cache.report().hits > 0
    if source is not None:
        source.wait(20)
        assert source.report().hits > 0
        source.close()
