"""Load a v3.0 dataset in the real lerobot and print as JSON what it sees; runs without wamlab.

Usage: python read_with_lerobot.py DATASET_FOLDER OUTPUT.npz   (needs lerobot >= 0.4 with its dataset extra)
Frames come back as uint8 in the .npz, the rest on standard output.
"""

import json
import sys
from pathlib import Path

import numpy as np
from lerobot import __version__  # pyright: ignore[reportMissingImports]
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # pyright: ignore[reportMissingImports]


def as_uint8(image):
    return (image.permute(1, 2, 0) * 255).round().byte().numpy()


def main(root: Path, output: Path) -> None:
    dataset = LeRobotDataset("wamlab/interop", root=root, video_backend="pyav")
    items = [dataset[row] for row in range(len(dataset))]
    cameras = dataset.meta.video_keys
    vectors = [key for key in ("observation.state", "action", "next.reward") if key in dataset.features]
    fps = dataset.fps
    windowed = LeRobotDataset(
        "wamlab/interop",
        root=root,
        video_backend="pyav",
        delta_timestamps={cameras[0]: [-1 / fps, 0.0, 1 / fps], "action": [0.0, 1 / fps]},
    )
    # A row inside, one at the dataset's start and one at its end: only the middle one needs no padding.
    windows = {row: windowed[row] for row in (0, len(dataset) // 2, len(dataset) - 1)}
    np.savez_compressed(
        output, allow_pickle=False, **{camera: np.stack([as_uint8(i[camera]) for i in items]) for camera in cameras}
    )
    report = {
        "lerobot": __version__,
        "len": len(dataset),
        "num_episodes": dataset.num_episodes,
        "fps": fps,
        "robot_type": dataset.meta.robot_type,
        "cameras": cameras,
        "tasks": [item["task"] for item in items],
        "episode_index": [int(item["episode_index"]) for item in items],
        "timestamp": [float(item["timestamp"]) for item in items],
        "vectors": {key: [np.atleast_1d(item[key].numpy()).tolist() for item in items] for key in vectors},
        "stats": {
            key: {name: np.asarray(value).tolist() for name, value in dataset.meta.stats[key].items()}
            for key in [*vectors, *cameras]
        },
        "windows": {
            row: {
                "means": [float(frame.mean()) for frame in item[cameras[0]]],
                "action": item["action"].tolist(),
                "frame_is_pad": item[f"{cameras[0]}_is_pad"].tolist(),
                "action_is_pad": item["action_is_pad"].tolist(),
            }
            for row, item in windows.items()
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
