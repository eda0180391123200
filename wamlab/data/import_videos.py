"""Bare video files of one episode into a LeRobot dataset without states or actions, re-encoded only if need be."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np

from wamlab.data.encode import VideoConfig, VideoWriter, exact_rate, video_feature
from wamlab.data.frame_index import FrameIndex, open_container, read_frame_index
from wamlab.data.layout import VideoFeature, VideoPlace
from wamlab.data.pyav_reader import PyAVReader
from wamlab.data.recording import Recording, layout_of, new_folder
from wamlab.data.statistics import FRAMES_AN_EPISODE, ColourHistogram, as_lists
from wamlab.data.write import IMAGES
from wamlab.errors import InputError

COPIED_CODECS = ("h264", "hevc", "av1", "vp9")
TIME_TOLERANCE_S = 1e-4  # by which lerobot lets a frame be off its row
BATCH = 32  # frames re-encoded at a time


@dataclass(frozen=True)
class Source:
    """A video file to import and what its header says."""

    path: Path
    index: FrameIndex
    is_mp4: bool
    codec: str
    pixel_format: str
    height_px: int
    width_px: int


def import_videos(
    files: Mapping[str, Path | str],
    root: Path | str,
    *,
    instruction: str,
    fps: float | None = None,
    version: str = "v3.0",
    robot_type: str | None = "unknown",
    is_trimmed_to_shortest: bool = False,
) -> Path:
    """Make a one-episode, video-only dataset of one video file per camera; return its folder.

    An mp4 file whose frame i is shown at i / fps is copied as it is; any other of constant rate is encoded
    anew, frame by frame. The frame rate is the files' own unless given.
    Raises InputError for files that are no video, of different frame counts or rates, or of a varying rate.
    """
    if not files:
        raise InputError("there is no video file to import: name at least one camera")
    layout, root = layout_of(version), Path(root)
    sources = {camera: read_source(Path(path)) for camera, path in files.items()}
    counts = {camera: len(source.index) for camera, source in sources.items()}
    if len(set(counts.values())) > 1 and not is_trimmed_to_shortest:
        listed = ", ".join(f"{camera} {count}" for camera, count in counts.items())
        raise InputError(
            f"the cameras have different numbers of frames ({listed}); cut the files, or pass "
            "is_trimmed_to_shortest=True if they start together"
        )
    length = min(counts.values())
    rate = fps or rate_of(next(iter(sources.values())))
    for source in sources.values():
        check_regular(source, rate)
    with new_folder(root) as partial, Recording(partial, layout, rate) as recording:
        places, features = {}, {}
        for camera, source in sources.items():
            places[IMAGES + camera], features[IMAGES + camera] = place_video(
                source, IMAGES + camera, partial, layout, rate, length
            )
        recording.add({}, length, instruction, places)
        recording.finish(robot_type, features)
    return root


def read_source(path: Path) -> Source:
    """Read the header and the frame index of a video file."""
    index = read_frame_index(path)
    with open_container(path) as container:
        codec = container.streams.video[0].codec_context
        return Source(
            path=path,
            index=index,
            is_mp4="mp4" in container.format.name.split(","),
            codec=codec.codec.canonical_name,
            pixel_format=codec.pix_fmt or "",
            height_px=codec.height,
            width_px=codec.width,
        )


def rate_of(source: Source) -> float:
    """Return frames per second from first to last frame, taken as whole or over 1001 where that close."""
    times_s = source.index.times_s
    if len(times_s) < 2:
        raise InputError(f"{source.path} has one frame, which tells no frame rate: pass fps")
    mean = (len(times_s) - 1) / (times_s[-1] - times_s[0])
    nearest = min((round(mean), Fraction(round(mean) * 1000, 1001)), key=lambda rate: abs(rate - mean))
    return float(nearest) if abs(nearest - mean) < 1e-3 * mean else float(exact_rate(mean))


def check_regular(source: Source, fps: float) -> None:
    """Raise InputError unless every frame is shown within a quarter frame of its turn."""
    off_s = _off_s(source, fps) - source.index.times_s[0]
    if np.abs(off_s).max() > 0.25 / fps:
        frame = int(np.abs(off_s).argmax())
        raise InputError(
            f"{source.path} does not run at {fps:g} frames per second throughout: frame {frame} is "
            f"{off_s[frame]:+.3f} s off; give its true fps, or convert it to a constant rate first"
        )


def _off_s(source: Source, fps: float) -> np.ndarray:
    return source.index.times_s - np.arange(len(source.index)) / fps


def place_video(
    source: Source, camera: str, root: Path, layout: ModuleType, fps: float, length: int
) -> tuple[VideoPlace, VideoFeature]:
    """Copy a file into the dataset, or encode its frames anew where other readers would mistake their times."""
    place = layout.place_of(0)
    target = layout.video_path(root, camera, place)
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = PyAVReader(source.path, source.index)
    codec, pixel_format = source.codec, source.pixel_format
    if is_copied(source, fps):
        shutil.copyfile(source.path, target)
    else:
        codec, pixel_format = VideoConfig.codec, "yuv420p"
        writer = VideoWriter(target, fps, source.height_px, source.width_px, VideoConfig())
        for start in range(0, length, BATCH):
            writer.append(reader.read(np.arange(start, min(start + BATCH, length))))
        writer.close()
    colours = ColourHistogram()
    colours.add(reader.read(np.unique(np.linspace(0, length - 1, FRAMES_AN_EPISODE).astype(int))))
    reader.close()
    stats = as_lists(colours.measure())
    feature = video_feature(source.height_px, source.width_px, fps, codec, pixel_format)
    return VideoPlace(place, 0.0, length / fps, stats), VideoFeature(feature, stats)


def is_copied(source: Source, fps: float) -> bool:
    """Say whether a file can serve as it is."""
    is_punctual = bool(np.abs(_off_s(source, fps)).max() <= TIME_TOLERANCE_S)
    return source.is_mp4 and source.codec in COPIED_CODECS and is_punctual and source.index.num_hidden == 0
