"""Names that GR00T's and DreamZero's extra metadata give, and datasets as a hub's cache keeps them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recordings import single_camera_episode

from wamlab.data.check_rows import row_faults
from wamlab.data.lerobot import open_dataset
from wamlab.data.normalize import Quantiles, measure_normalizers, read_vectors
from wamlab.data.robot import RobotConfig, check_robot
from wamlab.data.write import write_dataset
from wamlab.errors import InputError

MODALITY = {
    "state": {"joint_position": {"start": 0, "end": 3}, "gripper": {"start": 3, "end": 4, "absolute": True}},
    "action": {"joint_position": {"original_key": "action", "start": 0, "end": 3}},
    "video": {"exterior_1_left": {"original_key": "observation.images.top"}},
    "annotation": {
        "text": {},
        "number": {"original_key": "annotation.number"},
        "absent": {"original_key": "annotation.absent"},
    },
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(
        [single_camera_episode(0, 8), single_camera_episode(100, 6)],
        tmp_path_factory.mktemp("gear") / "set",
        version="v2.1",
    )


@pytest.fixture
def gear(plain: Path, tmp_path: Path) -> Path:
    """Return a dataset with DreamZero's additions: named slices, annotation columns and an embodiment."""
    root = shutil.copytree(plain, tmp_path / "set")
    info = json.loads((root / "meta/info.json").read_text())
    info["robot_type"] = None
    info["features"]["annotation.text"] = {"dtype": "string", "shape": [1], "names": None}
    info["features"]["annotation.number"] = {"dtype": "int64", "shape": [1], "names": None}
    del info["features"]["task_index"]
    (root / "meta/info.json").write_text(json.dumps(info))
    for path in root.glob("data/*/*.parquet"):
        table = pq.read_table(path).drop_columns(["task_index"])
        table = table.append_column("annotation.text", pa.array(["pour"] * len(table)))
        pq.write_table(table.append_column("annotation.number", pa.array([1] * len(table))), path)
    write_modality(root, MODALITY)
    (root / "meta/embodiment.json").write_text('{"robot_type": "oxe_droid", "embodiment_tag": "oxe_droid"}')
    return root


def write_modality(root: Path, content: Any) -> None:
    (root / "meta/modality.json").write_text(json.dumps(content))


def test_slices_cameras_and_languages_go_by_their_names(gear: Path) -> None:
    dataset = open_dataset(gear)
    whole = dataset.rows(1, "observation.state")
    assert dataset.has_column("state.joint_position") and not dataset.has_column("state.other")
    assert np.array_equal(dataset.rows(1, "state.joint_position"), whole[:, :3])
    assert np.array_equal(dataset.rows(1, "state.gripper"), whole[:, 3:])
    assert dataset.stats("action.joint_position")["q01"] == pytest.approx(dataset.stats("action")["q01"][:3])
    for name in ("exterior_1_left", "video.exterior_1_left", "top", "observation.images.top"):
        assert dataset.camera_named(name) == "observation.images.top"
    assert dataset.camera_named("wrist") is None
    assert dataset.instructions(0, "annotation.text") == ["pour"] * 8
    assert dataset.instructions(0, "annotation.number") == ["task of 100"] * 8
    assert not dataset.has_column("annotation.absent")
    assert dataset.instructions(0) == ["pour"] * 8, "without task_index the first annotation serves"
    assert dataset.robot_type == "oxe_droid"


def test_a_robot_may_use_the_names(gear: Path) -> None:
    robot = RobotConfig(
        cameras=("exterior_1_left",),
        layout="single",
        state_column="state.gripper + state.joint_position",
        action_column="action.joint_position",
    )
    dataset = open_dataset(gear)
    check_robot(robot, dataset)
    rows = dataset.rows(0, "observation.state")
    assert np.array_equal(read_vectors(dataset, 0, robot.state_column), rows[:, [3, 0, 1, 2]])
    scale = measure_normalizers(dataset, robot, 4).action
    assert isinstance(scale, Quantiles) and scale.low == pytest.approx(dataset.stats("action")["q01"][:3])
    with pytest.raises(InputError, match=r"no camera 'exterior_2_left'.*no column 'state\.torque'"):
        check_robot(replace(robot, cameras=("exterior_2_left",), state_column="state.torque"), dataset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"modality\.json is no JSON object"),
        ({"state": [1]}, "does not map names to objects under 'state'"),
        ({"state": {"arm": {"start": 2, "end": 9}}}, r"state\.arm as 2:9, observation\.state has dimensions 0:4"),
        ({"action": {"arm": {"start": 0}}}, r"action\.arm as 0:None"),
        ({"action": {"arm": {"original_key": "torque"}}}, "the column 'torque', which info.json does not list"),
        ({"video": {"left": {}}}, "the camera 'observation.images.left', which info.json does not list"),
    ],
)
def test_a_wrong_modality_is_described(gear: Path, content: Any, message: str) -> None:
    write_modality(gear, content)
    with pytest.raises(InputError, match=message):
        open_dataset(gear)


def test_a_wrong_embodiment_is_described(gear: Path) -> None:
    (gear / "meta/embodiment.json").write_text("[]")
    with pytest.raises(InputError, match="has no text under embodiment_tag"):
        open_dataset(gear)


def test_the_one_listed_task_labels_an_episode_without_its_table(plain: Path, tmp_path: Path) -> None:
    v3 = write_dataset([single_camera_episode(0, 8), single_camera_episode(100, 6)], tmp_path / "v3", version="v3.0")
    v2 = shutil.copytree(plain, tmp_path / "v2")
    for root in (v2, v3):
        shutil.rmtree(root / "data")
        dataset = open_dataset(root)
        assert [dataset.sole_instruction(e) for e in range(2)] == ["task of 0", "task of 100"]
    path = v2 / "meta/episodes.jsonl"
    path.write_text('{"episode_index": 0, "length": 8, "tasks": ["a", "b"]}\n{"episode_index": 1, "length": 6}\n')
    dataset = open_dataset(v2)
    assert [dataset.sole_instruction(e) for e in range(2)] == [None, None]


def test_labels_come_from_the_rows_where_the_list_does_not_decide(plain: Path, gear: Path, tmp_path: Path) -> None:
    dataset = open_dataset(gear)
    assert dataset.sole_instruction(0) is None, "an annotation stands in for task_index"
    assert dataset.labels(0) == dataset.instructions(0) == ["pour"] * 8
    root = shutil.copytree(plain, tmp_path / "two")
    path = root / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(path)
    place = table.column_names.index("task_index")
    pq.write_table(table.set_column(place, "task_index", pa.array([0] * 5 + [1] * 3)), path)
    faults = list(row_faults(open_dataset(root), 0))
    assert [fault.wrong for fault in faults] == [
        "rows have the task 'task of 100', the episode list says 'task of 0' alone"
    ]
    episodes = root / "meta/episodes.jsonl"
    episodes.write_text(episodes.read_text().replace('["task of 0"]', '["task of 0", "task of 100"]'))
    dataset = open_dataset(root)
    assert dataset.labels(0) == ["task of 0"] * 5 + ["task of 100"] * 3
    assert not list(row_faults(dataset, 0))


def test_a_hub_cache_opens_by_its_main_snapshot(plain: Path, tmp_path: Path) -> None:
    hub = tmp_path / "datasets--user--set"
    (hub / "blobs").mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("abc\n")
    (hub / "snapshots/older").mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in plain.rglob("*") if p.is_file())):
        blob, link = hub / f"blobs/{number:040x}", hub / "snapshots/abc" / path.relative_to(plain)
        shutil.copyfile(path, blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    for root in (hub, hub / "snapshots/abc"):
        assert np.array_equal(
            open_dataset(root).frames(1, "observation.images.top", np.arange(6)),
            open_dataset(plain).frames(1, "observation.images.top", np.arange(6)),
        )
    (hub / "refs/main").unlink()
    with pytest.raises(InputError, match=r"holds 2 snapshots and refs/main names none of them; give one's path"):
        open_dataset(hub)
    (hub / "snapshots/abc/data/chunk-000/episode_000001.parquet").resolve().unlink()  # a download not finished
    (hub / "refs/main").write_text("abc")
    with pytest.raises(InputError, match="is missing although the metadata lists it"):
        open_dataset(hub).rows(1, "action")
