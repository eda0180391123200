"""Small datasets to measure loaders on: the published DROID clip, as it is or encoded anew, in several episodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from wamlab.data.decode import open_video
from wamlab.data.encode import ordinary_scheduling, video_feature
from wamlab.data.layout import VideoFeature, VideoPlace
from wamlab.data.recording import Recording, layout_of, new_folder
from wamlab.data.views import resize

IMAGES = "observation.images."
CAMERAS = ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left")
FPS, NUM_FRAMES = 15, 419  # of the DROID clip
STATS = {name: [[[0.5]]] * 3 for name in ("min", "max", "mean", "std")} | {"count": [1]}
SVT = {"preset": "10", "crf": "30", "svtav1-params": "lp=1"}
# LeRobot's default is AV1 in groups of 2; DROID's h264 comes from FFmpeg's defaults, B-frames and all.
ENCODERS: Mapping[str, tuple[str, dict[str, str]]] = {
    "h264": ("libx264", {"preset": "medium", "crf": "23", "threads": "1"}),
    "av1": ("libsvtav1", SVT),
}


@dataclass(frozen=True)
class Videos:
    """How the episodes are stored; no codec: as published."""

    codec: str | None = None
    group: int = 0  # frames from key frame to key frame
    height_px: int = 180
    width_px: int = 320
    num_episodes: int = 2

    @property
    def name(self) -> str:
        if self.codec is None:
            return f"published h264 {self.height_px}p"
        return f"{self.codec} {self.height_px}p, group {self.group}"


def cache_folder() -> Path:
    """Return where encoded videos are kept from run to run."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "wamlab" / "bench"


def find_clip() -> Path | None:
    """Return the folder of the DROID clip: ``WAMLAB_DROID_CLIP``, or ``shared/data`` in or beside the checkout."""
    checkout = Path(__file__).parents[3]
    named = os.environ.get("WAMLAB_DROID_CLIP")
    folders = [Path(named)] if named else [root / "shared/data/droid_clip" for root in (checkout, checkout.parent)]
    return next((folder for folder in folders if all((folder / f"{c}.mp4").exists() for c in CAMERAS)), None)


def make_dataset(videos: Videos) -> Path:
    """Return a LeRobot v2.1 dataset of such videos, one file a camera and episode; made once."""
    clip = find_clip()
    source = "droid" if clip else "synthetic"
    root = cache_folder() / f"{source}-{videos.name}-{videos.num_episodes}".replace(", ", "-").replace(" ", "-")
    if root.exists():
        return root
    layout = layout_of("v2.1")
    with new_folder(root) as partial, Recording(partial, layout, float(FPS)) as recording:
        features = {}
        firsts = {camera: layout.video_path(partial, IMAGES + camera, layout.place_of(0)) for camera in CAMERAS}

        def make_first(number: int, camera: str) -> None:
            firsts[camera].parent.mkdir(parents=True, exist_ok=True)
            if clip and videos.codec is None:
                shutil.copyfile(clip / f"{camera}.mp4", firsts[camera])
            else:
                encode(firsts[camera], read_frames(clip, camera, number, videos), videos)

        with ThreadPoolExecutor(len(CAMERAS)) as threads:
            list(threads.map(make_first, range(len(CAMERAS)), CAMERAS))
        for camera, first in firsts.items():
            for episode in range(1, videos.num_episodes):
                target = layout.video_path(partial, IMAGES + camera, layout.place_of(episode))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.hardlink_to(first)
            size = videos.height_px, videos.width_px
            features[IMAGES + camera] = VideoFeature(
                video_feature(*size, FPS, videos.codec or "h264", "yuv420p"), STATS
            )
        for episode in range(videos.num_episodes):
            place = VideoPlace(layout.place_of(episode), 0.0, NUM_FRAMES / FPS, STATS)
            recording.add({}, NUM_FRAMES, "put the marker into the bowl", {IMAGES + c: place for c in CAMERAS})
        recording.finish("droid", features)
    return root


def read_frames(clip: Path | None, camera: str, number: int, videos: Videos) -> Iterator[np.ndarray]:
    """Yield a camera's frames at the wanted size, or synthetic ones where there is no clip."""
    if clip is None:
        yield from moving_texture(number, videos)
        return
    path = clip / f"{camera}.mp4"
    reader = open_video(path)
    rng = np.random.default_rng(number)
    for start in range(0, NUM_FRAMES, 32):
        frames = reader.read(np.arange(start, min(start + 32, NUM_FRAMES)))
        if frames.shape[1] != videos.height_px:  # enlarged pictures lack a sensor's noise, which costs bits
            frames = resize(frames, videos.height_px, videos.width_px)
            noise = rng.integers(-2, 3, frames.shape[1:], dtype=np.int16)
            frames = np.clip(frames + noise, 0, 255).astype(np.uint8)
        yield from frames
    reader.close()


def moving_texture(seed: int, videos: Videos) -> Iterator[np.ndarray]:
    """Yield frames of a smooth texture that drifts, with a faster square and a little noise."""
    rng = np.random.default_rng(seed)
    height, width = videos.height_px, videos.width_px
    coarse = rng.integers(0, 256, (1, height // 8 + 9, width // 8 + 9, 3), dtype=np.uint8)
    texture = resize(coarse, 2 * height, 2 * width)[0]
    for tick in range(NUM_FRAMES):
        top, left = tick % height, (2 * tick) % width
        frame = texture[top : top + height, left : left + width].astype(np.int16)
        x = (5 * tick) % (width - 40)
        frame[height // 3 : height // 3 + 40, x : x + 40] = 255 - frame[height // 3 : height // 3 + 40, x : x + 40]
        yield np.clip(frame + rng.integers(-3, 4, frame.shape, dtype=np.int16), 0, 255).astype(np.uint8)


def encode(path: Path, frames: Iterator[np.ndarray], videos: Videos) -> None:
    """Write frames as an mp4 file."""
    os.environ.setdefault("SVT_LOG", "1")  # errors only: it tells the terminal about every file
    encoder, options = ENCODERS[videos.codec or "h264"]
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(encoder, rate=FPS)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = videos.height_px, videos.width_px, "yuv420p"
        stream.codec_context.gop_size = videos.group or 250
        stream.options = dict(options)
        with ordinary_scheduling():
            stream.codec_context.open()
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def joined(path: Path, target: Path, times: int) -> Path:
    """Write a video that shows another one so many times, by copying its packets, as LeRobot v3.0 joins episodes."""
    with av.open(str(path)) as source, av.open(str(target), "w", format="mp4") as container:
        stream = source.streams.video[0]
        out = container.add_stream_from_template(stream)
        packets = [packet for packet in source.demux(stream) if packet.size]
        assert stream.time_base is not None
        length = round(len(packets) / (stream.average_rate or FPS) / stream.time_base)
        for turn in range(times):
            source.seek(0)
            for packet in source.demux(stream):
                if packet.size and packet.pts is not None and packet.dts is not None:
                    packet.pts, packet.dts = packet.pts + turn * length, packet.dts + turn * length
                    packet.stream = out
                    container.mux(packet)
    return target
