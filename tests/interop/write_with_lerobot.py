"""Record a v3.0 dataset with the real lerobot from arrays; runs without wamlab.

Usage: python write_with_lerobot.py INPUT.npz DATASET_FOLDER
INPUT.npz holds frames [n h w 3], action [n j] and episode [n]; episode e gets the task "task of e".
"""

import sys
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # pyright: ignore[reportMissingImports]


def main(source: Path, root: Path) -> None:
    with np.load(source) as file:
        recorded = dict(file)
    height, width = recorded["frames"].shape[1:3]
    names = [f"joint_{n}" for n in range(recorded["action"].shape[1])]
    image = {"dtype": "video", "shape": (height, width, 3), "names": ["height", "width", "channels"]}
    dataset = LeRobotDataset.create(
        "wamlab/interop",
        fps=10,
        root=root,
        features={
            "observation.images.top": image,
            "action": {"dtype": "float32", "shape": (len(names),), "names": names},
        },
    )
    for episode in np.unique(recorded["episode"]):
        for row in np.flatnonzero(recorded["episode"] == episode):
            dataset.add_frame(
                {
                    "observation.images.top": recorded["frames"][row],
                    "action": recorded["action"][row],
                    "task": f"task of {episode}",
                }
            )
        dataset.save_episode()
    dataset.finalize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
