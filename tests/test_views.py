"""Views: where the pixels of each camera land, and what crop, resize and colours do to them."""

import colorsys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from wamlab.data.robot import RobotConfig
from wamlab.data.views import (
    CENTRE,
    Augmentation,
    Jitter,
    affine_colors,
    canvas_of,
    change_colors,
    crop,
    draw_augmentation,
    resize,
    tile,
    untile,
)
from wamlab.errors import InputError

PLAIN = RobotConfig(cameras=("top", "wrist"), view_height_px=6, view_width_px=8, crop_fraction=1.0)
STILL = Jitter(1.0, 1.0, 1.0, 0.0)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    """Return one frame [1 h w 3] without detail that resizing would lose."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    return (255 * np.stack([y, x, (x + y) / 2], axis=-1)).astype(np.uint8)[None]


@pytest.mark.parametrize(
    ("layout", "num_views"),
    [("single", 1), ("row", 1), ("row", 3), ("grid", 2), ("grid", 3), ("grid", 4), ("droid", 3)],
)
def test_cutting_a_canvas_returns_the_views_it_was_tiled_from(layout, num_views):
    views = noise(num_views, 5, 6, 8)
    canvas = tile(views, layout)
    np.testing.assert_array_equal(untile(canvas, layout, num_views), views)
    robot = RobotConfig(cameras=tuple("abcd"[:num_views]), layout=layout, view_height_px=6, view_width_px=8)
    assert canvas.shape == (5, robot.canvas_height_px, robot.canvas_width_px, 3)


def test_droid_has_the_wrist_on_the_whole_top_row():
    left, right, wrist = views = noise(3, 2, 6, 8)
    canvas = tile(views, "droid")
    np.testing.assert_array_equal(canvas[:, :6, 0::2], wrist)
    np.testing.assert_array_equal(canvas[:, :6, 1::2], wrist)
    np.testing.assert_array_equal(canvas[:, 6:, :8], left)
    np.testing.assert_array_equal(canvas[:, 6:, 8:], right)


def test_a_grid_goes_down_before_it_goes_right_and_ends_in_black():
    first, second, third = views = noise(3, 2, 6, 8)
    canvas = tile(views, "grid")
    np.testing.assert_array_equal(canvas[:, :6, :8], first)
    np.testing.assert_array_equal(canvas[:, 6:, :8], second)
    np.testing.assert_array_equal(canvas[:, :6, 8:], third)
    assert not canvas[:, 6:, 8:].any()


def test_views_of_the_right_size_come_through_untouched():
    frames = {"top": noise(3, 6, 8, seed=1), "wrist": noise(3, 6, 8, seed=2)}
    canvas = canvas_of(frames, PLAIN)
    np.testing.assert_array_equal(untile(canvas, "row", 2), np.stack(list(frames.values())))


def test_cameras_go_by_short_and_by_full_name_in_the_order_of_the_layout():
    top, wrist = noise(3, 6, 8, seed=1), noise(3, 6, 8, seed=2)
    short = canvas_of({"wrist": wrist, "top": top, "unused": wrist}, PLAIN)
    full = canvas_of({"observation.images.top": top, "observation.images.wrist": wrist}, PLAIN)
    np.testing.assert_array_equal(short, full)
    renamed = replace(PLAIN, cameras=("observation.images.top", "observation.images.wrist"))
    np.testing.assert_array_equal(canvas_of({"top": top, "wrist": wrist}, renamed), short)


def test_a_missing_camera_is_named():
    with pytest.raises(InputError, match="no frames of camera 'wrist'; there are top"):
        canvas_of({"top": noise(1, 6, 8)}, PLAIN)


def test_cameras_of_different_lengths_are_refused():
    with pytest.raises(InputError, match=r"different numbers of frames: .*'top': 1, 'wrist': 2"):
        canvas_of({"top": noise(1, 6, 8), "wrist": noise(2, 6, 8)}, PLAIN)


@pytest.mark.parametrize(("down", "right", "top", "left"), [(0, 0, 0, 0), (0.5, 0.5, 2, 4), (1, 1, 5, 8)])
def test_a_crop_keeps_its_share_and_lies_where_it_was_drawn(down, right, top, left):
    frames = noise(2, 100, 160)
    cropped = crop(frames, 0.95, Augmentation(float(down), float(right), None))
    np.testing.assert_array_equal(cropped, frames[:, top : top + 95, left : left + 152])


def test_one_crop_serves_all_views_and_frames():
    frames = smooth(60, 80).repeat(4, axis=0)
    drawn = draw_augmentation(np.random.default_rng(3), has_color_jitter=False)
    robot = replace(PLAIN, crop_fraction=0.8, view_height_px=60, view_width_px=80)
    first, second = untile(canvas_of({"top": frames, "wrist": frames}, robot, drawn), "row", 2)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, first[:1].repeat(4, axis=0))
    centre = untile(canvas_of({"top": frames, "wrist": frames}, robot), "row", 2)[0]
    assert (first != centre).any()


@pytest.mark.parametrize("size", [(24, 40), (60, 100), (90, 33)])
def test_resizing_agrees_with_pillow_to_one_level(size):
    frames = noise(2, 45, 80)
    resized = resize(frames[:, 2:40, 3:70], *size)
    for frame, ours in zip(frames[:, 2:40, 3:70], resized, strict=True):
        theirs = Image.fromarray(frame).resize(size[::-1], Image.Resampling.BILINEAR)
        assert np.abs(ours.astype(int) - np.asarray(theirs)).max() <= 1


def test_frames_that_may_not_be_written_to_are_resized_too():
    frames = noise(2, 45, 80)
    expected = resize(frames, 24, 40)
    frames.flags.writeable = False
    np.testing.assert_array_equal(resize(frames, 24, 40), expected)


def test_no_change_of_colors_changes_nothing():
    views = noise(2, 3, 6, 8)
    np.testing.assert_array_equal(change_colors(views, STILL), views)


def test_brightness_scales_every_channel():
    views = noise(1, 2, 6, 8) // 2
    changed = change_colors(views, replace(STILL, brightness=1.2))
    assert np.abs(changed - 1.2 * views).max() <= 0.51


def test_contrast_pivots_on_the_mean_luma():
    views = noise(1, 2, 8, 8)
    mean = views[:, :, ::4, ::4].reshape(-1, 3).mean(axis=0) @ [0.299, 0.587, 0.114]
    changed = change_colors(views, replace(STILL, contrast=0.6))
    assert np.abs(changed - (mean + 0.6 * (views - mean))).max() <= 0.51


def test_no_saturation_is_grey_of_the_same_luma():
    views = noise(1, 2, 6, 8)
    changed = change_colors(views, replace(STILL, saturation=0.0))
    assert np.abs(changed - views @ np.array([0.299, 0.587, 0.114])[:, None]).max() <= 1


@pytest.mark.parametrize("turn", [1 / 12, -1 / 12, 1 / 4])
def test_hue_turns_as_it_does_in_hsv_and_keeps_luma(turn):
    colors = np.array([[200, 90, 80], [80, 190, 110], [90, 100, 180], [128, 128, 128]])
    matrix, offset = affine_colors(replace(STILL, hue=turn), np.zeros(3))
    turned = colors @ matrix.T + offset
    np.testing.assert_allclose(turned @ [0.299, 0.587, 0.114], colors @ [0.299, 0.587, 0.114], atol=1e-3)
    np.testing.assert_allclose(turned[3], colors[3], atol=1e-3)
    for before, after in zip(colors[:3], turned[:3], strict=True):
        hues = [colorsys.rgb_to_hsv(*np.clip(color / 255, 0, 1))[0] for color in (before, after)]
        assert abs((hues[1] - hues[0] - turn + 0.5) % 1 - 0.5) < 0.06  # the two colour wheels differ a little


def test_every_frame_and_view_gets_the_same_colors():
    views = smooth(16, 16).repeat(6, axis=0).reshape(2, 3, 16, 16, 3)
    changed = change_colors(views, Jitter(1.2, 0.7, 1.4, 0.05))
    np.testing.assert_array_equal(changed, np.broadcast_to(changed[:1, :1], changed.shape))
    assert (changed != views).any()


def test_augmentations_are_drawn_inside_their_ranges():
    drawn = [draw_augmentation(np.random.default_rng(i), has_color_jitter=True) for i in range(300)]
    for name, middle, reach in [("brightness", 1, 0.3), ("contrast", 1, 0.4), ("saturation", 1, 0.5), ("hue", 0, 0.08)]:
        values = np.array([getattr(augmentation.jitter, name) for augmentation in drawn])
        assert np.abs(values - middle).max() <= reach
        assert np.ptp(values) > 1.8 * reach
    places = np.array([(augmentation.down, augmentation.right) for augmentation in drawn])
    assert places.min() >= 0
    assert places.max() <= 1
    assert np.ptp(places, axis=0).min() > 0.9


def test_color_jitter_does_not_move_the_crop():
    plain, colored = (draw_augmentation(np.random.default_rng(7), has_color_jitter=on) for on in (False, True))
    assert (plain.down, plain.right) == (colored.down, colored.right)
    assert plain.jitter is None
    assert CENTRE.jitter is None
