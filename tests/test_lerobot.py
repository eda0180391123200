"""Datasets as others leave them: renamed columns, drifting files, lies in the totals, and every kind of damage."""

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from barcode import barcode_frames, read_barcodes
from PIL import Image
from recordings import edit_json, numbered_episode

from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.matching import DriftWarning
from wamlab.data.write import write_dataset
from wamlab.errors import InputError

TOP = "observation.images.top"
VERSIONS = ["v2.1", "v3.0"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    episodes = [numbered_episode(0, 20), numbered_episode(100, 30), numbered_episode(200, 25)]
    return {version: write_dataset(episodes, folder / version, version=version) for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def root(request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of a sound dataset, to be spoilt."""
    return shutil.copytree(sources[request.param], tmp_path / "set")


@pytest.fixture
def root_v2(sources: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sources["v2.1"], tmp_path / "set")


@pytest.fixture
def root_v3(sources: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sources["v3.0"], tmp_path / "set")


def edit_table(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema if rows else None), path)


def episodes_file(root: Path) -> Path:
    return root / "meta/episodes/chunk-000/file-000.parquet"


def numbers(dataset: RobotDataset, number: int, camera: str = TOP) -> list[int]:
    return read_barcodes(dataset.frames(number, camera, np.arange(dataset.lengths[number]))).tolist()


def test_opening_touches_no_video_and_no_data_file(root: Path) -> None:
    shutil.rmtree(root / "videos")
    shutil.rmtree(root / "data")
    dataset = open_dataset(root)
    assert dataset.num_episodes == 3 and dataset.lengths.tolist() == [20, 30, 25]


def test_totals_in_the_info_are_not_trusted(root: Path) -> None:
    edit_json(root / "meta/info.json", lambda info: info.update(total_episodes=50, total_frames=14983))
    assert open_dataset(root).num_episodes == 3


def test_unknown_keys_are_named_in_one_warning(root: Path) -> None:
    edit_json(root / "meta/info.json", lambda info: info.update(flavour="vanilla", colour=1))
    with pytest.warns(UserWarning, match=r"unknown keys, which are ignored: colour, flavour") as caught:
        open_dataset(root)
    assert len(caught) == 1


def test_a_set_of_v2_0_reads_like_one_of_v2_1(root_v2: Path) -> None:
    edit_json(root_v2 / "meta/info.json", lambda info: info.update(codebase_version="v2.0"))
    (root_v2 / "meta/episodes_stats.jsonl").unlink()
    dataset = open_dataset(root_v2)
    assert dataset.version == "v2.0" and numbers(dataset, 1) == list(range(100, 130))


def test_path_templates_of_the_info_are_followed(root_v2: Path) -> None:
    def flatten(info: dict[str, Any]) -> None:
        info["data_path"] = "rows/{episode_index:03d}.parquet"
        info["video_path"] = "film/{video_key}-{episode_index}.mp4"

    edit_json(root_v2 / "meta/info.json", flatten)
    (root_v2 / "rows").mkdir()
    (root_v2 / "film").mkdir()
    for number in range(3):
        name = f"episode_{number:06d}"
        (root_v2 / f"data/chunk-000/{name}.parquet").rename(root_v2 / f"rows/{number:03d}.parquet")
        (root_v2 / f"videos/chunk-000/{TOP}/{name}.mp4").rename(root_v2 / f"film/{TOP}-{number}.mp4")
    assert numbers(open_dataset(root_v2), 2) == list(range(200, 225))


def test_cameras_have_file_numbers_of_their_own(root_v3: Path) -> None:
    """The wrist camera's file gets another number and chunk than its rows and the top camera's file."""
    folder = root_v3 / "videos/observation.images.wrist"
    (folder / "chunk-002").mkdir()
    (folder / "chunk-000/file-000.mp4").rename(folder / "chunk-002/file-007.mp4")

    def renumber(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["videos/observation.images.wrist/chunk_index"] = 2
            row["videos/observation.images.wrist/file_index"] = 7

    edit_table(episodes_file(root_v3), renumber)
    dataset = open_dataset(root_v3)
    assert numbers(dataset, 1, "observation.images.wrist") == list(range(2100, 2130))
    assert numbers(dataset, 1) == list(range(100, 130))


def test_drift_of_less_than_half_a_frame_finds_the_nearest_frame(root_v3: Path) -> None:
    def drift(rows: list[dict[str, Any]]) -> None:
        rows[1][f"videos/{TOP}/from_timestamp"] += 0.04
        rows[1][f"videos/{TOP}/to_timestamp"] += 0.04

    edit_table(episodes_file(root_v3), drift)
    with pytest.warns(DriftWarning, match=r"up to 40\.0 ms \(0\.40 frames\) off the frames"):
        assert numbers(open_dataset(root_v3), 1) == list(range(100, 130))


def test_episodes_in_another_order_and_with_gaps_are_found(root_v3: Path) -> None:
    edit_table(episodes_file(root_v3), lambda rows: (rows.pop(1), rows.reverse()))
    dataset = open_dataset(root_v3)
    assert dataset.lengths.tolist() == [20, 25]
    assert numbers(dataset, 1) == list(range(200, 225))
    assert dataset.rows(1, "episode_index").tolist() == [2] * 25
    assert dataset.instructions(1)[0] == "task of 200"


def test_rows_are_found_whatever_the_row_groups(root_v3: Path) -> None:
    path = root_v3 / "data/chunk-000/file-000.parquet"
    expected = open_dataset(root_v3).rows(1, "action")
    for size in (7, 10_000):
        pq.write_table(pq.read_table(path), path, row_group_size=size)
        assert np.array_equal(open_dataset(root_v3).rows(1, "action"), expected)
    pq.write_table(pq.read_table(path), path, write_statistics=False)
    assert np.array_equal(open_dataset(root_v3).rows(1, "action"), expected)


def test_variable_lists_and_language_columns_are_read(root_v2: Path) -> None:
    edit_json(
        root_v2 / "meta/info.json",
        lambda info: info["features"].update(
            {
                "annotation.text": {"dtype": "string", "shape": [1], "names": None},
                "annotation.number": {"dtype": "int64", "shape": [1], "names": None},
            }
        ),
    )
    for number in range(3):
        path = root_v2 / f"data/chunk-000/episode_{number:06d}.parquet"
        table = pq.read_table(path)
        action = pa.array(table["action"].to_pylist(), pa.list_(pa.float32()))
        table = table.set_column(table.column_names.index("action"), "action", action)
        table = table.append_column("annotation.text", pa.array(["pour"] * len(table)))
        table = table.append_column("annotation.number", pa.array([2] * len(table)))
        pq.write_table(table, path)
    dataset = open_dataset(root_v2)
    assert np.array_equal(dataset.rows(0, "action"), numbered_episode(0, 20).action)
    assert dataset.instructions(0, "annotation.text") == ["pour"] * 20
    assert dataset.instructions(0, "annotation.number") == ["task of 200"] * 20
    assert dataset.instructions(1) == ["task of 100"] * 30


def test_tasks_may_be_a_plain_column(root_v3: Path) -> None:
    table = pa.table({"task": ["task of 0", "task of 100", "task of 200"], "task_index": [0, 1, 2]})
    pq.write_table(table, root_v3 / "meta/tasks.parquet")
    assert open_dataset(root_v3).instructions(2)[0] == "task of 200"


def test_images_in_the_table_are_decoded(root_v2: Path, tmp_path: Path) -> None:
    edit_json(root_v2 / "meta/info.json", lambda info: info["features"][TOP].update(dtype="image"))
    frames = barcode_frames(np.arange(20))
    cells = []
    for number, frame in enumerate(frames):
        path = tmp_path / f"{number}.png"
        Image.fromarray(frame).save(path)
        cells.append({"bytes": path.read_bytes(), "path": path.name})
    path = root_v2 / "data/chunk-000/episode_000000.parquet"
    pq.write_table(pq.read_table(path).append_column(TOP, pa.array(cells)), path)
    dataset = open_dataset(root_v2)
    assert np.array_equal(dataset.frames(0, TOP, np.array([19, 3, 3])), frames[[19, 3, 3]])
    with pytest.raises(InputError, match=r"lacks the image column observation.images.top of episode 1"):
        dataset.frames(1, TOP, np.array([0]))


def test_threads_share_a_dataset(root: Path) -> None:
    dataset = open_dataset(root)
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            number = int(rng.integers(3))
            rows = rng.integers(0, dataset.lengths[number], 3)
            found = read_barcodes(dataset.frames(number, TOP, rows))
            if not np.array_equal(found, 100 * number + rows) or len(dataset.rows(number, "action")) < 20:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_dataset_travels_to_a_spawned_worker(root: Path) -> None:
    dataset = open_dataset(root)
    numbers(dataset, 0)
    assert numbers(pickle.loads(pickle.dumps(dataset)), 2) == list(range(200, 225))


def test_cached_rows_cannot_be_changed(root: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        open_dataset(root).rows(0, "action")[0] = 1


def test_the_fingerprint_is_stable_and_notices_changes(root: Path, tmp_path: Path) -> None:
    before = open_dataset(root).fingerprint()
    copy = shutil.copytree(root, tmp_path / "elsewhere")
    assert open_dataset(root).fingerprint() == before == open_dataset(copy).fingerprint()
    video = next(copy.rglob("*.mp4"))
    video.write_bytes(video.read_bytes() + b"\0")
    assert open_dataset(copy).fingerprint() != before
    edit_json(root / "meta/info.json", lambda info: info.update(robot_type="other"))
    assert open_dataset(root).fingerprint() != before


def test_folders_that_are_no_dataset_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no dataset folder .*nowhere"):
        open_dataset(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"is no LeRobot dataset: it lacks meta/info\.json"):
        open_dataset(tmp_path)


def spoil(root: Path, what: str) -> None:
    info = root / "meta/info.json"
    if what == "json":
        info.write_text('{"fps": 10,\n  "features": }')
    elif what == "list":
        info.write_text("[]")
    else:
        key, value = json.loads(what)
        edit_json(info, lambda content: content.update({key: value}))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("json", r"info\.json is malformed JSON at line 2, column 15"),
        ("list", r"info\.json is no JSON object"),
        ('["codebase_version", "v9.9"]', r"codebase_version 'v9\.9'; known are v2\.0, v2\.1, v3\.0"),
        ('["codebase_version", null]', "codebase_version None"),
        ('["fps", 0]', "gives fps as 0"),
        ('["fps", "ten"]', "gives fps as 'ten'"),
        ('["features", []]', "does not give every feature a dtype"),
        ('["features", {"action": {}}]', "does not give every feature a dtype"),
        ('["features", {"action": {"dtype": "float32", "shape": "7"}}]', "gives action the shape '7', need a list of"),
        ('["features", {"action": {"dtype": "float32", "shape": [[7]]}}]', r"gives action the shape \[\[7\]\]"),
        ('["features", {"top": {"dtype": "video", "info": [1]}}]', "gives top info that is no JSON object"),
        ('["chunks_size", 0]', "gives chunks_size as 0, need a whole number above 0"),
    ],
)
def test_a_wrong_info_is_described(root: Path, what: str, message: str) -> None:
    spoil(root, what)
    with pytest.raises(InputError, match=message):
        open_dataset(root)


def test_wrong_path_templates_are_described(root: Path) -> None:
    edit_json(root / "meta/info.json", lambda info: info.update(data_path="data/{episode}.parquet"))
    with pytest.raises(InputError, match=r"the path template 'data/\{episode\}\.parquet' of .* is wrong"):
        open_dataset(root).rows(0, "action")
    edit_json(root / "meta/info.json", lambda info: info.update(video_path=None))
    with pytest.raises(InputError, match="gives no path template"):
        open_dataset(root)._layout.video_span(0, TOP)


@pytest.mark.parametrize("name", ["meta/episodes.jsonl", "meta/tasks.jsonl"])
def test_a_missing_list_of_v2_is_named(root_v2: Path, name: str) -> None:
    (root_v2 / name).unlink()
    with pytest.raises(InputError, match=f"{name} is missing"):
        open_dataset(root_v2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no episode: the dataset is empty"),
        ('{"episode_index": 0, "length": 20}\n{broken', "malformed JSON at line 2"),
        ('{"episode_index": 0}', "lacks an integer episode_index or length"),
        ("[1, 2]", "line 1 of .* is no JSON object"),
        ('{"episode_index": 0, "length": 20}\n{"episode_index": 0, "length": 20}', "lists an episode twice"),
        ('{"episode_index": 0, "length": 0}', "says episode 0 has no rows"),
    ],
)
def test_a_wrong_episode_list_of_v2_is_described(root_v2: Path, text: str, message: str) -> None:
    (root_v2 / "meta/episodes.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        open_dataset(root_v2)


def test_wrong_episode_tables_of_v3_are_described(root_v3: Path) -> None:
    path = episodes_file(root_v3)
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["length"]), path)
    with pytest.raises(InputError, match="lacks the column length"):
        open_dataset(root_v3)
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(InputError, match="lists no episode"):
        open_dataset(root_v3)
    pq.write_table(table.drop_columns([f"videos/{TOP}/file_index"]), path)
    with pytest.raises(InputError, match=f"lacks the column videos/{TOP}/file_index"):
        numbers(open_dataset(root_v3), 0)
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(InputError, match=r"cannot read .*file-000\.parquet"):
        open_dataset(root_v3)
    path.unlink()
    with pytest.raises(InputError, match="holds no episodes parquet file"):
        open_dataset(root_v3)


def test_wrong_task_tables_of_v3_are_described(root_v3: Path) -> None:
    path = root_v3 / "meta/tasks.parquet"
    pq.write_table(pa.table({"task_index": [0, 1]}), path)
    with pytest.raises(InputError, match="lacks the column task_index or a column of task strings"):
        open_dataset(root_v3)
    pq.write_table(pa.table({"task_index": [0, 0], "task": ["a", "b"]}), path)
    with pytest.raises(InputError, match="gives task 0 as 'b'; need one string per integer index"):
        open_dataset(root_v3)
    pq.write_table(pa.table({"task_index": [0], "task": ["a"]}), path)
    with pytest.raises(InputError, match=r"episode 2 of .* names task 2, which has no text"):
        open_dataset(root_v3).instructions(2)
    path.unlink()
    with pytest.raises(InputError, match=r"tasks\.parquet is missing"):
        open_dataset(root_v3)


def test_what_is_asked_for_and_not_there_is_named(root: Path) -> None:
    dataset = open_dataset(root)
    with pytest.raises(InputError, match=r"has no column torque in episode 1; it has observation.state, action"):
        dataset.rows(1, "torque")
    with pytest.raises(InputError, match=r"has no camera observation.images.left .*it has observation.images.top"):
        dataset.frames(0, "observation.images.left", np.array([0]))
    with pytest.raises(InputError, match=r"has episodes 0\.\.2, got episode 3"):
        dataset.rows(3, "action")
    with pytest.raises(InputError, match=r"episode 1 of .* has rows 0\.\.29, got row 30"):
        dataset.frames(1, TOP, np.array([4, 30]))
    with pytest.raises(InputError, match="unknown video backend 'ffmpeg'"):
        open_dataset(root, backend="ffmpeg")


def test_missing_and_damaged_files_are_named(root: Path) -> None:
    tables, videos = sorted((root / "data").rglob("*.parquet")), sorted(root.rglob(f"*{TOP}*/**/*.mp4"))
    table, video = tables[0], videos[0]
    video.rename(video.with_suffix(".away"))
    with pytest.raises(InputError, match=f"the video of episode 0, camera {TOP} .* is missing"):
        numbers(open_dataset(root), 0)
    video.write_bytes(b"no video at all")
    with pytest.raises(InputError, match=f"cannot open the video .*{video.name}"):
        numbers(open_dataset(root), 0)
    table.write_bytes(b"PAR1 nothing")
    with pytest.raises(InputError, match=f"cannot read .*{table.name}"):
        open_dataset(root).rows(0, "action")
    table.unlink()
    with pytest.raises(InputError, match=f"{table.name} is missing although the metadata lists it"):
        open_dataset(root).rows(0, "action")


def test_a_table_of_another_length_is_named(root: Path) -> None:
    path = sorted((root / "data").rglob("*.parquet"))[0]
    edit_table(path, lambda rows: rows.pop(3))
    with pytest.raises(InputError, match=r"episode 0 has 19 rows in .*, the episode list says 20"):
        open_dataset(root).rows(0, "action")


def test_columns_with_gaps_or_ragged_lists_are_named(root_v2: Path) -> None:
    path = root_v2 / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(path)
    for values, message in (
        ([[1.0, 2.0]] * 19 + [[1.0]], "rows of different lengths"),
        ([[1.0, 2.0]] * 19 + [None], "has empty rows"),
    ):
        action = pa.array(values, pa.list_(pa.float32()))
        pq.write_table(table.set_column(table.column_names.index("action"), "action", action), path)
        with pytest.raises(InputError, match=f"column action of episode 0 in .* {message}"):
            open_dataset(root_v2).rows(0, "action")


def test_a_video_shorter_than_its_rows_is_named(root_v2: Path, tmp_path: Path) -> None:
    short = write_dataset([numbered_episode(0, 17)], tmp_path / "short", version="v2.1")
    name = f"videos/chunk-000/{TOP}/episode_000000.mp4"
    shutil.copyfile(short / name, root_v2 / name)
    dataset = open_dataset(root_v2)
    with pytest.raises(InputError, match=f"episode 0, camera {TOP} .* has 20 rows but 17 frames"):
        dataset.frames(0, TOP, np.array([0]))
    assert numbers(dataset, 0, "observation.images.wrist") == list(range(2000, 2020))


def test_a_short_episode_amid_a_file_does_not_show_the_next_one(root_v3: Path) -> None:
    """Where episode 1 has 27 frames for 30 rows, its last rows would show frames of episode 2."""

    def shorten(rows: list[dict[str, Any]]) -> None:
        rows[1][f"videos/{TOP}/to_timestamp"] -= 0.3

    edit_table(episodes_file(root_v3), shorten)
    with pytest.raises(InputError, match=f"episode 1, camera {TOP} .* has 30 rows but 27 frames"):
        numbers(open_dataset(root_v3), 1)


def test_rows_more_than_half_a_frame_from_any_frame_are_named(root_v2: Path) -> None:
    path = root_v2 / "data/chunk-000/episode_000000.parquet"

    def delay(rows: list[dict[str, Any]]) -> None:
        rows[0]["timestamp"] = -0.07

    edit_table(path, delay)
    with pytest.raises(InputError, match=r"row 0 is at -0\.0700 s, more than half a frame from the nearest"):
        numbers(open_dataset(root_v2), 0)


def test_stored_statistics_of_wrong_shape_are_described(root: Path) -> None:
    (root / "meta/stats.json").write_text("[]")
    with pytest.raises(InputError, match=r"stats\.json does not map features to their statistics"):
        open_dataset(root).stats("action")
    (root / "meta/stats.json").unlink()
    with pytest.raises(InputError, match=f"has no quantiles of {TOP}"):
        open_dataset(root).stats(TOP)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission_is_named(root: Path) -> None:
    (root / "meta/info.json").chmod(0)
    with pytest.raises(InputError, match=r"info\.json cannot be read"):
        open_dataset(root)
