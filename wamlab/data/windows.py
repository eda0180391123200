"""Where a training window starts and which rows of an episode it covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int64, Shaped

from wamlab.errors import InputError

FRAMES_A_LATENT = 4  # of the causal video codec; its first latent holds one frame


@dataclass(frozen=True)
class WindowConfig:
    """How a window divides into blocks: one frame, then up to ``max_blocks`` blocks of frames and actions."""

    frame_stride: int = 3  # ticks from one frame to the next
    latents_per_block: int = 2
    actions_per_block: int = 24  # ticks, from the block's first on
    max_blocks: int = 4
    is_full_only: bool = field(default=True, kw_only=True)  # drop windows cut short by the episode or its task
    is_action_span_free: bool = field(default=False, kw_only=True)  # actions may end before or after the frames

    def __post_init__(self) -> None:
        for name in ("frame_stride", "latents_per_block", "actions_per_block", "max_blocks"):
            if getattr(self, name) < 1:
                raise InputError(f"window.{name} is {getattr(self, name)}, need at least 1")
        if self.block_ticks != self.actions_per_block and not self.is_action_span_free:
            raise InputError(
                f"a block's frames span frame_stride {self.frame_stride} x {self.frames_per_block} frames "
                f"= {self.block_ticks} ticks but its actions {self.actions_per_block}: make them equal, "
                "or set is_action_span_free"
            )

    @property
    def frames_per_block(self) -> int:
        return FRAMES_A_LATENT * self.latents_per_block

    @property
    def block_ticks(self) -> int:
        """Ticks from one block's first frame to the next block's."""
        return self.frame_stride * self.frames_per_block

    @property
    def num_frames(self) -> int:
        """Frames of a full window."""
        return 1 + self.max_blocks * self.frames_per_block

    @property
    def num_rows(self) -> int:
        """Rows an episode needs, at least, to hold a full window."""
        last_actions = (self.max_blocks - 1) * self.block_ticks + self.actions_per_block
        return max(self.max_blocks * self.block_ticks + 1, last_actions)


@dataclass(frozen=True)
class Window:
    """The rows of an episode that one clip shows."""

    anchors: Int64[np.ndarray, " blocks"]  # first row of each block: its state, and where its actions start
    frame_rows: Int64[np.ndarray, " t"]


def window_at(first_row: int, num_blocks: int, config: WindowConfig) -> Window:
    """Return the window of so many blocks whose first frame shows ``first_row``."""
    return Window(
        anchors=first_row + config.block_ticks * np.arange(num_blocks),
        frame_rows=first_row + config.frame_stride * np.arange(1 + num_blocks * config.frames_per_block),
    )


def list_windows(
    length: int, labels: Sequence | np.ndarray, config: WindowConfig
) -> tuple[Int64[np.ndarray, " bases"], Int64[np.ndarray, " bases"]]:
    """Return the first row and the number of blocks of every usable base row's window, in order of the bases.

    Blocks are added before and after a base in turn, as long as they lie inside the episode of ``length`` rows and
    start under the base's label (one label a row), so a window is centred where it can be. The rule, and where it
    leaves windows short, is DreamZero's. Several bases may share a window; it is then drawn that much more often.
    """
    first, num_blocks = _place(np.arange(length), _coded(labels, length), config)
    is_usable = num_blocks >= (config.max_blocks if config.is_full_only else 1)
    return first[is_usable], num_blocks[is_usable]


def _coded(labels: Sequence | np.ndarray, length: int) -> Int64[np.ndarray, " rows"]:
    """Replace labels of any type by numbers that compare fast."""
    codes: dict = {}
    coded = np.array([codes.setdefault(label, len(codes)) for label in labels], dtype=np.int64)
    if len(coded) != length:
        raise InputError(f"an episode of {length} rows has {len(coded)} labels, need one a row")
    return coded


def _place(
    bases: Int64[np.ndarray, " bases"], labels: Shaped[np.ndarray, " rows"], config: WindowConfig
) -> tuple[Int64[np.ndarray, " bases"], Int64[np.ndarray, " bases"]]:
    """Place a window around each base; one of 0 blocks has no place."""
    length, ticks = len(labels), config.block_ticks
    reach = max(ticks, config.actions_per_block)

    def is_block(anchors: np.ndarray) -> np.ndarray:
        is_inside = (anchors >= 0) & (anchors + reach <= length)
        return is_inside & (labels[np.where(is_inside, anchors, 0)] == labels[bases])

    is_placed = is_block(bases)
    num_blocks = is_placed.astype(np.int64)
    first, last = bases.copy(), bases.copy()
    grows_back, grows_forth = is_placed.copy(), is_placed.copy()
    for _ in range(config.max_blocks - 1):
        grows_back &= (num_blocks < config.max_blocks) & is_block(first - ticks)
        first -= ticks * grows_back
        num_blocks += grows_back
        grows_forth &= (num_blocks < config.max_blocks) & is_block(last + ticks)
        last += ticks * grows_forth
        num_blocks += grows_forth
    # A block's last frame is the row after it; where the episode ends before, the window does without the block.
    num_blocks -= is_placed & (last + ticks >= length)
    return first, num_blocks
