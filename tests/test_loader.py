"""Clips and their stream: the right rows, the same order and content however they are read."""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wamlab.data.clips import ClipReader, split_episodes
from wamlab.data.frame_cache import FrameCache
from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.loader import load_clips
from wamlab.data.mixture import mix
from wamlab.data.normalize import to_relative
from wamlab.data.robot import RobotConfig
from wamlab.data.views import untile
from wamlab.data.windows import WindowConfig
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.types import Clip, Episode

LENGTHS = (20, 9, 17, 5)  # the last is too short for a window
ROBOT = RobotConfig(
    cameras=("top", "wrist"),
    view_height_px=32,
    view_width_px=32,
    relative_dims=(0,),
    prompt="The robot does: {task}",
    max_action_dim=4,
    max_state_dim=5,
)
PLAIN = replace(ROBOT, crop_fraction=1.0, has_color_jitter=False)
WINDOW = WindowConfig(frame_stride=1, latents_per_block=1, actions_per_block=4, max_blocks=2)


def recorded(num_ticks: int) -> Episode:
    rng = np.random.default_rng(num_ticks)
    shade = np.linspace(20, 230, num_ticks)[:, None, None, None] * np.ones((1, 32, 32, 3))
    return Episode(
        frames={"top": shade.astype(np.uint8), "wrist": 255 - shade.astype(np.uint8)},
        state=rng.normal(size=(num_ticks, 3)).astype(np.float32),
        action=rng.normal(size=(num_ticks, 2)).astype(np.float32),
        instruction=f"task {num_ticks}",
        fps=10.0,
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> RobotDataset:
    root = tmp_path_factory.mktemp("loader") / "robot"
    return open_dataset(write_dataset(map(recorded, LENGTHS), root))


@pytest.fixture(scope="module")
def reader(dataset: RobotDataset) -> ClipReader:
    return ClipReader(dataset, ROBOT, WINDOW, is_training=True)


class Numbered:
    """Clips that are nothing but a number, with a hook on each read."""

    def __init__(self, num_samples: int, hook: Callable[[int], None] = lambda index: None):
        self.num_samples, self.hook = num_samples, hook

    def read(self, sample_index: int, seed: int) -> Clip:
        self.hook(sample_index)
        nothing = np.zeros((0, 0), np.float32)
        frames = np.zeros((1, 1, 1, 3), np.uint8)
        return Clip(frames, nothing, nothing.astype(bool), nothing, f"{seed}", sample_index, 0)


def numbers(batches: list[list[Clip]]) -> list[list[tuple[int, str]]]:
    return [[(clip.episode, clip.instruction) for clip in batch] for batch in batches]


def load(source: Numbered, count: int, **options: Any) -> list[list[tuple[int, str]]]:
    settings: dict[str, Any] = {"batch_size": 4, "seed": 1} | options
    stream = load_clips(source, **settings)
    batches = numbers(list(islice(stream, count)))
    stream.close()
    return batches


def assert_same(ours: Clip, theirs: Clip) -> None:
    for field in fields(Clip):
        np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name))


def test_a_clip_holds_the_rows_of_its_window(dataset):
    reader = ClipReader(dataset, PLAIN, WINDOW, is_training=False)
    for index in range(reader.num_samples):
        clip = reader.read(index, seed=0)
        frame_rows = clip.first_row + np.arange(9)
        views = untile(clip.frames, "row", 2)
        for view, camera in zip(views, ("top", "wrist"), strict=True):
            frames = dataset.frames(clip.episode, f"observation.images.{camera}", frame_rows)
            np.testing.assert_array_equal(view, frames)
        states = dataset.rows(clip.episode, "observation.state")[[clip.first_row, clip.first_row + 4]]
        actions = dataset.rows(clip.episode, "action")[clip.first_row : clip.first_row + 8].reshape(2, 4, 2)
        relative = to_relative(actions, states, (0,))
        scale = reader.normalizers.action
        np.testing.assert_allclose(clip.actions[:, :2], scale.to_model(relative).reshape(8, 2))
        np.testing.assert_allclose(clip.state[:, :3], reader.normalizers.state.to_model(states))
        assert clip.action_mask.tolist() == [[True, True, False, False]] * 8
        assert not clip.actions[:, 2:].any()
        assert not clip.state[:, 3:].any()
        assert clip.state.shape == (2, 5)
        assert clip.instruction == f"The robot does: task {LENGTHS[clip.episode]}"


def test_a_clip_turns_back_into_the_robot_actions_it_was_made_of(dataset):
    reader = ClipReader(dataset, replace(PLAIN, normalization="min_max"), WINDOW, is_training=False)
    clip = reader.read(0, seed=0)
    states = dataset.rows(clip.episode, "observation.state")[[clip.first_row, clip.first_row + 4]]
    returned = reader.normalizers.actions_to_robot(clip.actions.reshape(2, 4, 4), states)
    recorded = dataset.rows(clip.episode, "action")[clip.first_row : clip.first_row + 8]
    np.testing.assert_allclose(returned.reshape(8, 2), recorded, atol=1e-5)


def test_a_reader_lists_every_base_with_a_full_window_and_counts_the_rest(reader):
    # a window has 9 rows: in an episode of 9 only bases 0 and 4 find both blocks and the closing frame
    assert [reader.read(i, 0).episode for i in range(reader.num_samples)] == [0] * 16 + [1] * 2 + [2] * 13
    assert reader.num_unusable_episodes == 1


def test_the_seed_changes_pixels_in_training_only(dataset, reader):
    assert_same(reader.read(3, seed=1), reader.read(3, seed=1))
    assert (reader.read(3, seed=1).frames != reader.read(3, seed=2).frames).any()
    evaluated = ClipReader(dataset, ROBOT, WINDOW, is_training=False)
    assert_same(evaluated.read(3, seed=1), evaluated.read(3, seed=2))


def test_a_cache_of_any_size_changes_no_clip(dataset, reader):
    episode_bytes = 20 * 32 * 32 * 3
    for cache_bytes in (episode_bytes, 3 * episode_bytes, 2**30):
        cached = ClipReader(dataset, ROBOT, WINDOW, is_training=True, cache_gib=cache_bytes / 2**30)
        for _ in range(2):
            for index in range(0, reader.num_samples, 5):
                assert_same(cached.read(index, seed=1), reader.read(index, seed=1))


def test_a_cache_keeps_whole_episodes_and_never_more_than_its_room(dataset):
    cache = FrameCache(dataset, 60_000 + 20 * 32 * 32 * 3)
    rows = np.array([4, 1, 1])
    for episode in (0, 0, 2, 1):
        expected = dataset.frames(episode, "observation.images.top", rows)
        np.testing.assert_array_equal(cache.frames(episode, "observation.images.top", rows), expected)
    assert cache.used_bytes == (20 + 17) * 32 * 32 * 3  # episode 1 found no room


def test_video_only_clips_have_no_actions_to_learn(tmp_path: Path):
    silent = [
        replace(recorded(n), state=np.zeros((n, 0), np.float32), action=np.zeros((n, 0), np.float32)) for n in (9,)
    ]
    dataset = open_dataset(write_dataset(silent, tmp_path / "video"))
    robot = replace(PLAIN, state_column=None, action_column=None, relative_dims=())
    clip = ClipReader(dataset, robot, WINDOW, is_training=True).read(0, seed=0)
    assert clip.actions.shape == clip.action_mask.shape == (8, 4)
    assert not clip.actions.any()
    assert not clip.action_mask.any()
    assert clip.state.shape == (2, 5)
    assert not clip.state.any()


def test_a_fingerprint_changes_with_all_that_changes_clips(dataset, reader):
    assert ClipReader(dataset, ROBOT, WINDOW, is_training=True).fingerprint() == reader.fingerprint()
    others = [
        ClipReader(dataset, ROBOT, WINDOW, is_training=False),
        ClipReader(dataset, PLAIN, WINDOW, is_training=True),
        ClipReader(dataset, ROBOT, WINDOW, is_training=True, episodes=[0, 1]),
        ClipReader(dataset, ROBOT, replace(WINDOW, max_blocks=1), is_training=True),
    ]
    assert len({other.fingerprint() for other in [reader, *others]}) == 5


def test_a_reader_says_why_it_has_no_window(dataset):
    with pytest.raises(InputError, match=r"none of 1 episodes .* window of 9 rows .* the longest has 5 rows"):
        ClipReader(dataset, ROBOT, WINDOW, is_training=True, episodes=[3])
    with pytest.raises(InputError, match=r"4 episodes, none numbered \[4\]"):
        ClipReader(dataset, ROBOT, WINDOW, is_training=True, episodes=[0, 4])


@pytest.mark.parametrize(("fraction", "num_held_out"), [(0.0, 0), (0.01, 1), (0.5, 2), (0.99, 3)])
def test_a_split_takes_whole_episodes_and_leaves_none_out(dataset, fraction, num_held_out):
    train, held_out = split_episodes(dataset, fraction, seed=3)
    assert len(held_out) == num_held_out
    assert sorted(train + held_out) == [0, 1, 2, 3]
    assert split_episodes(dataset, fraction, seed=3) == (train, held_out)


def test_another_seed_splits_differently(dataset):
    assert len({split_episodes(dataset, 0.5, seed) for seed in range(10)}) > 1


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_threads_and_resuming_change_no_clip(reader, num_threads):
    plain = list(islice(load_clips(reader, batch_size=3, seed=5, num_threads=0), 6))
    stream = load_clips(reader, batch_size=3, seed=5, start_batch=2, num_threads=num_threads)
    for ours, theirs in zip(islice(stream, 4), plain[2:], strict=True):
        for clip, other in zip(ours, theirs, strict=True):
            assert_same(clip, other)
    stream.close()


@pytest.mark.parametrize("start", [0, 1, 7, 40])
def test_a_stream_continues_where_any_other_was(start):
    assert load(Numbered(10), 5, start_batch=start) == load(Numbered(10), start + 5)[start:]


def test_an_epoch_shows_every_sample_once_and_no_two_are_alike():
    drawn = [index for batch in load(Numbered(10), 10) for index, _ in batch]
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_every_epoch_augments_with_another_seed():
    seeds = [seed for batch in load(Numbered(10), 10) for _, seed in batch]
    assert [len(set(seeds[start : start + 10])) for start in range(0, 40, 10)] == [1] * 4
    assert len(set(seeds)) == 4


def test_an_unshuffled_stream_goes_in_order_and_starts_again():
    drawn = [index for batch in load(Numbered(6), 3, is_shuffled=False) for index, _ in batch]
    assert drawn == [0, 1, 2, 3, 4, 5] * 2


def test_another_seed_is_another_order():
    assert load(Numbered(10), 3) != load(Numbered(10), 3, seed=2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_what_one_rank_would_see(world_size):
    size = 8 // world_size
    ranks = [load(Numbered(50), 5, batch_size=size, rank=r, world_size=world_size) for r in range(world_size)]
    joint = [[clip for batch in batches for clip in batch] for batches in zip(*ranks, strict=True)]
    assert joint == load(Numbered(50), 5, batch_size=8)


def test_a_batch_may_be_larger_than_the_data():
    (batch,) = load(Numbered(3), 1, batch_size=7)
    assert Counter(index for index, _ in batch[:6]) == {0: 2, 1: 2, 2: 2}


def test_an_error_in_a_thread_reaches_the_consumer_as_it_was():
    def fail(index: int) -> None:
        if index == 5:
            raise InputError("episode 5 is broken")

    before = set(threading.enumerate())
    stream = load_clips(Numbered(8, fail), batch_size=2, seed=1, is_shuffled=False)
    assert [clip.episode for batch in islice(stream, 2) for clip in batch] == [0, 1, 2, 3]
    with pytest.raises(InputError, match="episode 5 is broken"):
        next(stream)
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_closing_the_stream_ends_its_threads(num_read):
    before = set(threading.enumerate())
    stream = load_clips(Numbered(100, lambda index: time.sleep(0.002)), batch_size=4, seed=1, num_threads=3)
    assert len(list(islice(stream, num_read))) == num_read
    stream.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(StopIteration):
        next(stream)


def test_a_forgotten_stream_ends_its_threads_too():
    before = set(threading.enumerate())
    next(load_clips(Numbered(100), batch_size=4, seed=1))
    assert not set(threading.enumerate()) - before


def test_no_more_is_read_ahead_than_was_asked_for():
    reads = []
    stream = load_clips(Numbered(1000, reads.append), batch_size=4, seed=1, prefetch_batches=3)
    next(stream)
    time.sleep(0.1)
    stream.close()
    assert len(reads) == 16 + 3 + 2  # the batch given and three more; the queues before them


def test_the_clips_of_one_batch_are_read_at_the_same_time():
    meeting = threading.Barrier(4, timeout=20)

    def meet(index: int) -> None:
        if index < 4:
            meeting.wait()  # for the three others

    stream = load_clips(Numbered(100, meet), batch_size=4, seed=1, num_threads=4, is_shuffled=False)
    assert len(next(stream)) == 4
    stream.close()


def test_an_interpreter_ends_while_a_stream_is_open():
    code = """
from tests.test_loader import Numbered, load_clips
import time
stream = load_clips(Numbered(100, lambda index: time.sleep(0.01)), batch_size=4, seed=1)
next(stream)
"""
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, need at least 1"),
        ({"num_threads": -1}, "num_threads is -1, need at least 0"),
        ({"prefetch_batches": 0}, "prefetch_batches is 0, need at least 1"),
        ({"rank": 2, "world_size": 2}, r"rank is 2, need 0\.\.1"),
    ],
)
def test_a_wrong_number_is_refused_before_anything_is_read(options, message):
    with pytest.raises(InputError, match=message):
        load_clips(Numbered(4), **({"batch_size": 4, "seed": 1} | options))


def test_a_mixture_gives_each_source_its_share_and_shows_every_sample():
    mixed = mix([Numbered(30), Numbered(5)], [1.0, 1.0])
    drawn = [mixed.read(index, 100) for index in range(mixed.num_samples)]
    assert mixed.num_samples == 60
    assert [clip.episode for clip in drawn] == [*range(30), *list(range(5)) * 6]
    assert [clip.instruction for clip in drawn[30:]] == [str(100 + repeat) for repeat in range(6) for _ in range(5)]


@pytest.mark.parametrize("weights", [[3.0, 1.0], [0.2, 0.8], [0.5, 0.5]])
def test_a_mixture_keeps_its_proportions(weights):
    mixed = mix([Numbered(40), Numbered(25)], weights)
    share = mixed.ends[0] / mixed.num_samples
    assert abs(share - weights[0] / sum(weights)) < 0.01


def test_a_mixture_needs_a_weight_for_each_source():
    with pytest.raises(InputError, match="a weight above 0 for each of 2 sources"):
        mix([Numbered(3), Numbered(4)], [1.0])
