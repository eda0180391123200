"""Every kind of damage is found, placed and given a repair; sound datasets are called sound."""

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from barcode import barcode_frames
from PIL import Image
from recordings import edit_json, numbered_episode

from wamlab.cli import main
from wamlab.data.check import check_dataset
from wamlab.data.check_rows import Fault
from wamlab.data.describe import describe_dataset
from wamlab.data.lerobot import open_dataset
from wamlab.data.matching import DriftWarning
from wamlab.data.write import write_dataset

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (12, 9, 15)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    episodes = [numbered_episode(100 * n, length) for n, length in enumerate(LENGTHS)]
    return {version: write_dataset(episodes, folder / version, version=version) for version in ("v2.1", "v3.0")}


@pytest.fixture(params=["v2.1", "v3.0"])
def root(request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sources[request.param], tmp_path / "set")


@pytest.fixture
def root_v2(sources: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sources["v2.1"], tmp_path / "set")


@pytest.fixture
def root_v3(sources: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sources["v3.0"], tmp_path / "set")


def faults_of(root: Path, **options: bool) -> list[Fault]:
    dataset = open_dataset(root)
    found = list(check_dataset(dataset, **options))
    assert len(found) == 1 + dataset.num_episodes, "as many steps as a progress bar is told"
    return [fault for faults in found for fault in faults]


def assert_only(faults: list[Fault], number: int | None, place: str, wrong: str, *, is_broken: bool = True) -> None:
    assert len(faults) == 1, faults
    fault = faults[0]
    assert (fault.episode, fault.place, fault.is_broken) == (number, place, is_broken), fault
    assert re.search(wrong, fault.wrong), fault.wrong
    assert fault.repair


def edit_rows(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def table_of(root: Path, number: int) -> Path:
    return root / f"data/chunk-000/episode_{number:06d}.parquet"


def video_of(root: Path, number: int, camera: str = TOP) -> Path:
    return root / f"videos/chunk-000/{camera}/episode_{number:06d}.mp4"


def test_a_sound_dataset_has_no_faults(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not faults_of(root) and not faults_of(root, is_decoding_all=True)
    assert main(["data", "check", str(root)]) == 0
    assert "3 episodes are sound" in capsys.readouterr().out


def set_to(row: int, name: str, value: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda rows: rows[row].update({name: value})


@pytest.mark.parametrize(
    ("change", "place", "wrong"),
    [
        (set_to(3, "action", [0.0, float("nan")]), "action", "NaN or infinity in 1 of 9 rows, first in row 3"),
        (set_to(4, "frame_index", 3), "frame_index", "repeats frames: row 4 is numbered 3"),
        (set_to(4, "frame_index", 44), "frame_index", "skips or reorders frames: row 4 is numbered 44"),
        (set_to(4, "index", 1), "index", "row 4 does not follow row 3: 1"),
        (set_to(4, "timestamp", 0.3), "timestamp", "row 4 is at 0.3000 s, not after row 3"),
        (set_to(4, "timestamp", 0.46), "timestamp", r"row 4 is at 0\.4600 s, at 10 fps it would be 0\.4000 s"),
        (set_to(4, "task_index", 9), "task_index", "task 9 has no text"),
        (lambda rows: rows.pop(4), "rows", "has 8 rows in .*, the episode list says 9"),
        (
            lambda rows: [row.update(timestamp=row["timestamp"] * 1.2) for row in rows],
            "timestamp",
            r"rows run at 8\.333 fps, info\.json says 10: 160 ms of drift",
        ),
    ],
)
def test_faults_of_rows_are_found(root_v2: Path, change: Callable, place: str, wrong: str) -> None:
    edit_rows(table_of(root_v2, 1), change)
    assert_only(faults_of(root_v2), 1, place, wrong)


def test_wrong_columns_are_found(root_v2: Path) -> None:
    edit_json(root_v2 / "meta/info.json", lambda info: info["features"]["action"].update(shape=[3]))
    found = [fault for fault in faults_of(root_v2) if fault.episode is not None]
    assert {(fault.episode, fault.place) for fault in found} == {(n, "action") for n in range(3)}
    assert found[0].wrong == "rows have 2 dimensions, info.json says 3"
    edit_json(root_v2 / "meta/info.json", lambda info: info["features"]["action"].update(shape=[2]))
    table = pq.read_table(table_of(root_v2, 2))
    pq.write_table(table.drop_columns(["action"]), table_of(root_v2, 2))
    assert_only(faults_of(root_v2), 2, "action", "the rows lack it")
    ragged = pa.array([[1.0, 2.0]] * 14 + [[1.0]], pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index("action"), "action", ragged), table_of(root_v2, 2))
    assert_only(faults_of(root_v2), 2, "action", "rows of different lengths")


def test_missing_and_damaged_files_are_found(root_v2: Path) -> None:
    whole = video_of(root_v2, 1).read_bytes()
    video_of(root_v2, 1).unlink()
    assert_only(faults_of(root_v2), 1, TOP, "does not exist|is missing")
    video_of(root_v2, 1).write_bytes(b"no video")
    assert_only(faults_of(root_v2), 1, TOP, "cannot open the video")
    damaged = bytearray(whole)
    start = damaged.index(b"mdat") + 4
    damaged[start + 200 : start + 1200] = bytes(1000)
    video_of(root_v2, 1).write_bytes(damaged)
    assert_only(faults_of(root_v2, is_decoding_all=True), 1, TOP, "damaged")
    video_of(root_v2, 1).write_bytes(whole)
    table_of(root_v2, 0).write_bytes(b"PAR1")
    assert_only(faults_of(root_v2), 0, "rows", "cannot read")
    table_of(root_v2, 0).unlink()
    assert_only(faults_of(root_v2), 0, "rows", "is missing although the metadata lists it")


def test_videos_of_another_length_or_size_are_found(root_v2: Path) -> None:
    shutil.copyfile(video_of(root_v2, 1), video_of(root_v2, 2))
    assert_only(faults_of(root_v2), 2, TOP, "has 15 rows but 9 frames")
    shutil.copyfile(video_of(root_v2, 0), video_of(root_v2, 2))
    shutil.copyfile(video_of(root_v2, 0), video_of(root_v2, 1))
    faults = [fault for fault in faults_of(root_v2) if fault.episode == 1]
    assert_only(faults, 1, TOP, "the video has 12 frames for 9 rows", is_broken=False)


def test_a_wrong_size_is_found(root_v2: Path) -> None:
    edit_json(root_v2 / "meta/info.json", lambda info: info["features"][WRIST].update(shape=[30, 40, 3]))
    faults = faults_of(root_v2)
    assert {(fault.episode, fault.place) for fault in faults} == {(n, WRIST) for n in range(3)}
    assert "info.json says 40 x 30" in faults[0].wrong


def test_images_in_tables_are_checked(root_v2: Path) -> None:
    for camera in (TOP, WRIST):
        edit_json(root_v2 / "meta/info.json", lambda info, c=camera: info["features"][c].update(dtype="image"))
    for number, length in enumerate(LENGTHS):
        table = pq.read_table(table_of(root_v2, number))
        Image.fromarray(barcode_frames(np.arange(1))[0]).save(buffer := io.BytesIO(), "png")
        cells = pa.array([{"bytes": buffer.getvalue(), "path": None}] * length)
        pq.write_table(table.append_column(TOP, cells).append_column(WRIST, cells), table_of(root_v2, number))
    assert not faults_of(root_v2)
    edit_rows(table_of(root_v2, 1), set_to(4, TOP, {"bytes": b"no image", "path": None}))
    assert not faults_of(root_v2)
    assert_only(faults_of(root_v2, is_decoding_all=True), 1, TOP, "damaged image in row 4")
    edit_rows(table_of(root_v2, 1), set_to(4, TOP, None))
    assert_only(faults_of(root_v2), 1, TOP, "1 of 9 rows have no image")


def test_another_rate_than_the_info_says_is_found(root_v2: Path) -> None:
    edit_json(root_v2 / "meta/info.json", lambda info: info.update(fps=30))
    assert {fault.place for fault in faults_of(root_v2) if fault.is_broken} == {"timestamp"}


def test_spans_that_drift_overlap_or_are_short_are_found(root_v3: Path) -> None:
    path = root_v3 / "meta/episodes/chunk-000/file-000.parquet"
    whole = path.read_bytes()

    def move(start_s: float, end_s: float) -> list[Fault]:
        def change(rows: list[dict[str, Any]]) -> None:
            rows[1][f"videos/{TOP}/from_timestamp"] += start_s
            rows[1][f"videos/{TOP}/to_timestamp"] += end_s

        path.write_bytes(whole)
        edit_rows(path, change)
        return faults_of(root_v3)

    assert_only(move(0.03, 0.03), 1, TOP, r"up to 30\.0 ms off their frames", is_broken=False)
    assert_only(move(-0.3, -0.3), 1, TOP, "begins before that of episode 0 ends")
    assert_only(move(0, -0.3), 1, TOP, "has 9 rows but 6 frames")


def test_the_largest_drift_is_told_once_and_shown_for_each_camera(
    root_v3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for camera, number, off_s in ((TOP, 1, 0.03), (TOP, 2, 0.02), (WRIST, 0, 0.004)):
            rows[number][f"videos/{camera}/from_timestamp"] += off_s
            rows[number][f"videos/{camera}/to_timestamp"] += off_s

    edit_rows(root_v3 / "meta/episodes/chunk-000/file-000.parquet", change)
    dataset = open_dataset(root_v3)
    with pytest.warns(
        DriftWarning, match=r"^rows of .*set are up to 30\.0 ms \(0\.30 frames\) off .*data check"
    ) as told:
        for episode in range(3):
            for camera in (WRIST, TOP):
                dataset.frame_numbers(episode, camera)
    assert len(told) == 1
    found = {camera: (round(off_s, 4), path.parts[-3]) for camera, (off_s, path) in dataset.drifts.by_camera().items()}
    assert found == {TOP: (0.03, TOP), WRIST: (0.004, WRIST)}
    assert main(["data", "check", str(root_v3)]) == 0
    out = capsys.readouterr().out
    assert "30.00 ms, 0.30 frames" in out and "4.00 ms, 0.04 frames" in out
    assert f"videos/{WRIST}/chunk-000/file-000.mp4" in out


def test_wrong_totals_are_noted_and_wrong_statistics_found(root: Path) -> None:
    edit_json(root / "meta/info.json", lambda info: info.update(total_frames=14983))
    assert_only(faults_of(root), None, "meta/info.json", "total_frames is 14983, .* have 36", is_broken=False)
    edit_json(root / "meta/info.json", lambda info: info.update(total_frames=36))
    edit_json(root / "meta/stats.json", lambda stats: stats["action"].update(q01=[1.0], q99=[float("nan"), 1.0]))
    faults = faults_of(root)
    assert [fault.wrong for fault in faults] == ["q01 of action has 1 dimensions, not 2", "q99 of action is not finite"]
    (root / "meta/stats.json").write_text("[]")
    assert_only(faults_of(root), None, "meta/stats.json", "does not map features")
    (root / "meta/stats.json").unlink()
    assert_only(faults_of(root), None, "meta/stats.json", "is missing", is_broken=False)


def test_the_command_prints_what_is_broken_and_returns_1(root_v2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video_of(root_v2, 1).unlink()
    assert main(["data", "check", str(root_v2)]) == 1
    out = capsys.readouterr().out
    assert "1 thing is broken, in 1 of 3 episodes" in out and TOP in out and "copy the file again" in out
    assert main(["data", "check", str(root_v2 / "nowhere")]) == 2
    assert "there is no dataset folder" in capsys.readouterr().err


def test_info_describes_a_dataset(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = describe_dataset(open_dataset(root))
    assert figures["episodes"] == 3 and figures["frames"] == "36, 9 to 15 an episode, median 12"
    height, width = barcode_frames(np.arange(1)).shape[1:3]
    assert figures[f"camera {TOP}"] == f"{width} x {height} px, h264"
    assert figures["column action"] == "float32 [2]"
    assert figures["tasks"] == "3; 'task of 0'; 'task of 100'; 'task of 200'"
    edit_json(root / "meta/info.json", lambda info: info["features"][TOP].update(info={}, shape=None))
    assert describe_dataset(open_dataset(root))[f"camera {TOP}"] == f"{width} x {height} px, h264", "read from the file"
    assert main(["data", "info", str(root)]) == 0
    assert "observation.images.wrist" in capsys.readouterr().out


def test_convert_is_a_command(root_v2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["data", "convert", str(root_v2), str(out), "--version", "v3.0"]) == 0
    assert "3 episodes as v3.0" in capsys.readouterr().out
    assert not faults_of(out)
    assert main(["data", "convert", str(root_v2), str(out), "--version", "v3.0"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_columns_that_the_info_leaves_out_or_mistakes_are_found(root_v2: Path) -> None:
    path = root_v2 / "meta/info.json"
    edit_json(path, lambda info: info["features"].pop("timestamp"))
    assert_only(faults_of(root_v2), None, "meta/info.json", "features lack timestamp, which every LeRobot dataset has")
    stamp = {"dtype": "string", "shape": [1], "names": None}
    edit_json(path, lambda info: info["features"].update(timestamp=stamp))
    wrong = [(fault.episode, fault.place, fault.wrong) for fault in faults_of(root_v2)]
    said = "rows hold numbers, info.json says texts (string)"
    assert wrong == [(number, "timestamp", said) for number in range(3)]
    (root_v2 / "meta/modality.json").unlink()
    edit_json(path, lambda info: info.update(features={}))
    assert_only(faults_of(root_v2), None, "meta/info.json", "it lists no column and no camera")
