"""Augmentation of whole batches: what the loader's does to each clip, whatever the batch, on any device."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from test_recipes import small

from wamlab.data.augment import augmented, split_row
from wamlab.data.loader import load_clips
from wamlab.data.robot import RobotConfig
from wamlab.data.views import canvas_of, draw_augmentation
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.run import read_metrics
from wamlab.recipes.build import Workbench
from wamlab.recipes.fit import fit, start_run
from wamlab.sim.experts import play_episodes

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CAMERAS = ("one", "two", "three")


def robot_of(layout: str, size: tuple[int, int], **changes) -> RobotConfig:
    cameras = CAMERAS[:1] if layout == "single" else CAMERAS
    return RobotConfig(cameras, layout, view_height_px=size[0], view_width_px=size[1], **changes)


def scenes(num: int, robot: RobotConfig, height: int, width: int) -> np.ndarray:
    """Return smooth colours with noise on them, [b v t h w 3]."""
    rng = np.random.default_rng(height)
    y, x = np.mgrid[:height, :width][..., None]
    waves = rng.uniform(-0.2, 0.2, (2, num, len(robot.cameras), 3, 1, 1, 3))
    shade = 128 + 90 * np.sin(waves[0] * y + waves[1] * x) + rng.normal(0, 8, (1, 1, 1, height, width, 3))
    return shade.clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["single", "row", "grid", "droid"])
@pytest.mark.parametrize(("stored", "view"), [((48, 64), (48, 64)), ((90, 120), (32, 48)), ((40, 40), (40, 40))])
@pytest.mark.parametrize("has_color_jitter", [True, False])
def test_a_batch_is_augmented_as_each_clip_would_be(device, layout, stored, view, has_color_jitter):
    robot = robot_of(layout, view, has_color_jitter=has_color_jitter)
    frames = scenes(5, robot, *stored)
    draws = [draw_augmentation(np.random.default_rng(i), has_color_jitter=has_color_jitter) for i in range(5)]
    wanted = np.stack(
        [
            canvas_of(dict(zip(robot.cameras, clip, strict=True)), robot, draw)
            for clip, draw in zip(frames, draws, strict=True)
        ]
    )
    views = torch.from_numpy(frames).to(device)
    found = augmented(views, draws, robot)
    difference = np.abs(found.cpu().numpy().astype(int) - wanted)
    assert difference.max() <= (3 if has_color_jitter else 1)
    assert difference.mean() < 0.4  # where two roundings of a resize meet one, one level in five pixels
    for i in (0, 3):  # whatever the batch is made of
        alone = augmented(views[i : i + 1], draws[i : i + 1], robot)
        pair = augmented(views[[4, i]], [draws[4], draws[i]], robot)
        assert torch.equal(alone[0], found[i])
        assert torch.equal(pair[1], found[i])


def test_views_side_by_side_are_taken_apart():
    views = torch.arange(2 * 3 * 2 * 4 * 5 * 3).reshape(2, 3, 2, 4, 5, 3).to(torch.uint8)
    assert torch.equal(split_row(torch.cat(views.unbind(1), dim=3), 3), views)


def test_training_with_either_is_the_same_within_rounding(tmp_path):
    root = write_dataset(play_episodes(("reach",), 8, seed=0, size=48), tmp_path / "reach")
    recipe = small(root, num_steps=4)
    recipe = replace(recipe, robot=replace(recipe.robot, crop_fraction=0.9, has_color_jitter=True))
    losses, batches = [], []
    for place in ("loader", "device"):
        own = replace(recipe, data=replace(recipe.data, augment_on=place))
        bench = Workbench(own)
        stream = load_clips(bench.source[0], batch_size=4, seed=0, num_threads=2)
        batches.append([bench.source[1](clips).latents for clips in islice(stream, 3)])
        stream.close()
        with start_run(bench, tmp_path / place) as run:
            list(fit(bench, run))
        losses.append([record["loss"] for record in read_metrics(run)[0]])
    for ours, theirs in zip(*batches, strict=True):
        assert (ours - theirs).abs().mean() < 0.02 * theirs.abs().mean()
    np.testing.assert_allclose(*losses, rtol=0.02)
    with pytest.raises(InputError, match=r"needs features\.mode online"):
        replace(own, features=replace(own.features, mode="cached"))
    with pytest.raises(InputError, match='augment_on is "gpu"'):
        replace(own.data, augment_on="gpu")
