"""Windows: DreamZero's vectors, and the vectorised list against one choice at a time."""

import numpy as np
import pytest

from wamlab.data.windows import Window, WindowConfig, list_windows, window_at
from wamlab.errors import InputError

DROID = WindowConfig()
SMALL = WindowConfig(frame_stride=1, latents_per_block=1, actions_per_block=4, max_blocks=3)


def labels(length: int, changes_at: int | None = None) -> np.ndarray:
    return np.arange(length) >= (length if changes_at is None else changes_at)


def choose_window(base: int, length: int, tasks: np.ndarray, config: WindowConfig) -> Window | None:
    """Grow the window around one base block by block, as DreamZero does; None where not even one block fits."""
    ticks = config.block_ticks

    def is_block(anchor: int) -> bool:
        is_inside = 0 <= anchor <= length - max(ticks, config.actions_per_block)
        return bool(is_inside and tasks[anchor] == tasks[base])

    anchors, grows_back, grows_forth = [base] if is_block(base) else [], True, True
    while anchors and len(anchors) < config.max_blocks and (grows_back or grows_forth):
        if grows_back := grows_back and is_block(anchors[0] - ticks):
            anchors.insert(0, anchors[0] - ticks)
        if grows_forth := grows_forth and len(anchors) < config.max_blocks and is_block(anchors[-1] + ticks):
            anchors.append(anchors[-1] + ticks)
    if anchors and anchors[-1] + ticks >= length:  # the frame that closes the last block is not there
        anchors.pop()
    return window_at(anchors[0], len(anchors), config) if anchors else None


@pytest.mark.parametrize(
    ("base", "length", "changes_at", "first", "last", "num_frames", "anchors"),
    [
        (100, 300, None, 52, 148, 33, [52, 76, 100, 124]),
        (0, 300, None, 0, 96, 33, [0, 24, 48, 72]),
        (276, 300, None, 204, 276, 25, [204, 228, 252]),  # the base's own block is dropped
        (52, 100, None, 4, 76, 25, [4, 28, 52]),
        (30, 60, None, 6, 54, 17, [6, 30]),
        (100, 300, 120, 28, 124, 33, [28, 52, 76, 100]),
        (130, 300, 120, 130, 226, 33, [130, 154, 178, 202]),
    ],
)
def test_windows_are_where_dreamzero_puts_them(base, length, changes_at, first, last, num_frames, anchors):
    window = choose_window(base, length, labels(length, changes_at), DROID)
    assert window is not None
    assert window.anchors.tolist() == anchors
    assert window.frame_rows.tolist() == list(range(first, last + 1, 3))
    assert len(window.frame_rows) == num_frames


@pytest.mark.parametrize(("base", "length"), [(10, 30), (0, 24), (6, 30)])
def test_no_window_where_no_block_fits(base, length):
    # at base 6 of 30 rows the actions 6..29 fit, but the frame that closes the block would be row 30
    assert choose_window(base, length, labels(length), DROID) is None


def test_one_more_row_lets_the_closing_frame_in():
    window = choose_window(0, 25, labels(25), DROID)
    assert window is not None
    assert window.frame_rows.tolist() == list(range(0, 25, 3))


@pytest.mark.parametrize("is_full_only", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_the_list_of_windows_is_what_one_choice_at_a_time_gives(seed, is_full_only):
    rng = np.random.default_rng(seed)
    config = WindowConfig(2, 1, 11, int(rng.integers(1, 5)), is_full_only=is_full_only, is_action_span_free=True)
    length = int(rng.integers(1, 90))
    tasks = np.sort(rng.integers(0, 3, length)).astype(str)
    chosen = [choose_window(base, length, tasks, config) for base in range(length)]
    wanted = [
        (int(w.anchors[0]), len(w.anchors))
        for w in chosen
        if w is not None and (len(w.anchors) == config.max_blocks or not is_full_only)
    ]
    first, num_blocks = list_windows(length, tasks, config)
    assert list(zip(first.tolist(), num_blocks.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("config", [DROID, SMALL, WindowConfig(2, 1, 12, 2, is_action_span_free=True)])
def test_every_listed_window_reads_inside_the_episode_and_under_one_label(config):
    length = 2 * config.num_rows + 5
    tasks = labels(length, config.num_rows + 3)
    first, num_blocks = list_windows(length, tasks, config)
    assert len(first)
    assert (num_blocks == config.max_blocks).all()
    for row in first.tolist():
        window = window_at(row, config.max_blocks, config)
        assert len(window.frame_rows) == config.num_frames
        assert len(set(tasks[window.anchors].tolist())) == 1
        assert window.frame_rows[0] >= 0
        assert window.frame_rows[-1] < length
        assert window.anchors[-1] + config.actions_per_block <= length


@pytest.mark.parametrize("config", [DROID, SMALL])
def test_num_rows_is_the_shortest_episode_with_a_full_window(config):
    assert len(list_windows(config.num_rows, labels(config.num_rows), config)[0])
    assert not len(list_windows(config.num_rows - 1, labels(config.num_rows - 1), config)[0])


def test_actions_that_do_not_fill_the_frames_are_refused_with_the_numbers():
    with pytest.raises(InputError, match=r"3 x 8 frames = 24 ticks but its actions 16"):
        WindowConfig(actions_per_block=16)
    assert WindowConfig(actions_per_block=16, is_action_span_free=True).block_ticks == 24


def test_a_count_below_one_is_refused():
    with pytest.raises(InputError, match=r"max_blocks is 0"):
        WindowConfig(max_blocks=0)


def test_labels_must_be_one_a_row():
    with pytest.raises(InputError, match=r"30 rows has 29 labels"):
        list_windows(30, labels(29), DROID)
