"""Augmentation on the device: the loader hands over frames as they are stored, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from wamlab.codec.clips import ClipEncoder, check_shapes
from wamlab.data.augment import augmented, split_row
from wamlab.data.clips import augmentation_at
from wamlab.data.robot import RobotConfig
from wamlab.types import Batch, Clip


class AugmentingEncoder:
    """The ``Encode`` of a run whose clips come from a reader with ``has_stored_views``."""

    def __init__(self, encoder: ClipEncoder, robot: RobotConfig):
        self.encoder, self.robot = encoder, robot

    @torch.no_grad()
    def __call__(self, clips: Sequence[Clip]) -> Batch:
        """Augment and encode clips of one shape."""
        check_shapes(clips)
        frames = torch.from_numpy(np.stack([clip.frames for clip in clips]))
        views = split_row(frames.to(self.encoder.device, non_blocking=True), len(self.robot.cameras))
        draws = [augmentation_at(self.robot, c.augmentation_seed, c.episode, c.first_row) for c in clips]
        return self.encoder.batch_of(clips, self.encoder.encode_window(augmented(views, draws, self.robot)))
