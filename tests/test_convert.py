"""A converted dataset has the same rows and bit for bit the same frames, or there is none."""

import io
import json
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from barcode import barcode_frames, read_barcodes
from PIL import Image
from recordings import edit_json, numbered_episode

from wamlab.data import convert, episode_stats, layout_v3
from wamlab.data.convert import convert_dataset
from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.statistics import measure_rows
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.types import Episode

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (20, 33, 17)
OTHER = {"v2.0": "v3.0", "v2.1": "v3.0", "v3.0": "v2.1"}


def episode(first: int, length: int) -> Episode:
    reward = np.random.default_rng(first + 1).normal(size=length).astype(np.float32)
    return replace(numbered_episode(first, length), signals={"next.reward": reward})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    episodes = [episode(100 * n, length) for n, length in enumerate(LENGTHS)]
    return {version: write_dataset(episodes, folder / version, version=version) for version in ("v2.1", "v3.0")}


@pytest.fixture
def root_v2(sources: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sources["v2.1"], tmp_path / "v2")


@pytest.fixture
def root_v3(sources: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sources["v3.0"], tmp_path / "v3")


def encode(path: Path, numbers: np.ndarray, options: dict[str, str]) -> None:
    """Write a video whose options the library's own writer never uses."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        frames = barcode_frames(numbers)
        stream.height, stream.width, stream.pix_fmt, stream.options = (
            *frames.shape[1:3],
            "yuv420p",
            dict[str, object](options),
        )
        stream.codec_context.time_base = Fraction(1, 10)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def assert_equal(first: RobotDataset, second: RobotDataset) -> None:
    assert first.lengths.tolist() == second.lengths.tolist()
    assert first.tasks == second.tasks and first.fps == second.fps and first.cameras == second.cameras
    for number in range(first.num_episodes):
        assert first.table(number).equals(second.table(number))
        assert first.instructions(number) == second.instructions(number)
        for camera in first.cameras:
            rows = np.arange(first.lengths[number])
            assert np.array_equal(first.frames(number, camera, rows), second.frames(number, camera, rows))
    for name in ("action", TOP):
        for kind, values in first.stats(name).items():
            assert np.array_equal(values, second.stats(name)[kind]), (name, kind)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_there_and_back_frames_are_bit_identical_and_tables_equal(
    sources: dict[str, Path], version: str, tmp_path: Path
) -> None:
    source = open_dataset(sources[version])
    there = open_dataset(convert_dataset(source, tmp_path / "there", OTHER[version]))
    assert there.version == OTHER[version]
    assert_equal(source, there)
    back = open_dataset(convert_dataset(there, tmp_path / "back", version))
    assert_equal(source, back)
    assert back.info == source.info
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    if version == "v2.1":
        for name in ("episodes.jsonl", "tasks.jsonl", "stats.json", "modality.json", "episodes_stats.jsonl"):
            before, after = [
                [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)
                for text in ((r / "meta" / name).read_text() for r in (source.root, back.root))
            ]
            assert before == after, name


def test_v3_videos_go_into_few_files_and_a_full_one_is_followed_by_the_next(root_v2: Path, tmp_path: Path) -> None:
    source = open_dataset(root_v2)
    one = convert_dataset(source, tmp_path / "one", "v3.0")
    assert len(list(one.rglob("*.mp4"))) == 2
    many = convert_dataset(source, tmp_path / "many", "v3.0", video_file_mb=1e-3)
    assert len(list(many.rglob("*.mp4"))) == 6
    assert_equal(source, open_dataset(many))


def test_reordered_frames_survive_both_ways(root_v2: Path, tmp_path: Path) -> None:
    options = {"bf": "3", "g": "8", "x264-params": "open-gop=0:b-pyramid=normal"}
    for number, length in enumerate(LENGTHS):
        path = root_v2 / f"videos/chunk-000/{TOP}/episode_{number:06d}.mp4"
        encode(path, np.arange(100 * number, 100 * number + length), options)
    source = open_dataset(root_v2)
    there = open_dataset(convert_dataset(source, tmp_path / "there", "v3.0"))
    assert_equal(source, there)
    assert_equal(source, open_dataset(convert_dataset(there, tmp_path / "back", "v2.1")))


@pytest.mark.parametrize("codec", ["av1", "hevc"])
def test_other_codecs_are_copied_too(codec: str, tmp_path: Path) -> None:
    written = write_dataset([episode(0, 12), episode(100, 9)], tmp_path / "source", version="v2.1", codec=codec)
    source = open_dataset(written)
    there = open_dataset(convert_dataset(source, tmp_path / "there", "v3.0"))
    assert_equal(source, there)
    assert len(list(there.root.rglob("*.mp4"))) == 2
    assert_equal(source, open_dataset(convert_dataset(there, tmp_path / "back", "v2.1")))


def test_files_of_another_coding_are_not_joined(root_v2: Path, tmp_path: Path) -> None:
    path = root_v2 / f"videos/chunk-000/{TOP}/episode_000001.mp4"
    encode(path, np.arange(100, 133), {"profile": "baseline"})
    source = open_dataset(root_v2)
    written = convert_dataset(source, tmp_path / "out", "v3.0")
    assert len(list((written / "videos" / TOP).rglob("*.mp4"))) == 3
    assert_equal(source, open_dataset(written))


def test_longer_videos_and_gaps_in_the_numbers_are_kept(root_v2: Path, tmp_path: Path) -> None:
    (root_v2 / "data/chunk-000/episode_000001.parquet").unlink()
    encode(root_v2 / f"videos/chunk-000/{TOP}/episode_000000.mp4", np.arange(25), {"bf": "0"})  # for 20 rows
    for name in ("episodes.jsonl", "episodes_stats.jsonl"):
        path = root_v2 / "meta" / name
        lines = path.read_text().splitlines()
        path.write_text("\n".join(lines[::2]) + "\n")
    source = open_dataset(root_v2)
    there = open_dataset(convert_dataset(source, tmp_path / "there", "v3.0"))
    assert_equal(source, there)
    back = open_dataset(convert_dataset(there, tmp_path / "back", "v2.1"))
    assert_equal(source, back)
    assert back.episode_index.tolist() == [0, 2]
    assert (back.root / "data/chunk-000/episode_000002.parquet").exists()


def test_an_episode_that_begins_between_key_frames_is_refused(root_v3: Path, tmp_path: Path) -> None:
    encode(root_v3 / f"videos/{TOP}/chunk-000/file-000.mp4", np.arange(sum(LENGTHS)), {"g": "250", "bf": "0"})
    with pytest.raises(InputError, match=r"episode 1 does not begin on a key frame of its own in .*file-000\.mp4"):
        convert_dataset(open_dataset(root_v3), tmp_path / "out", "v2.1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v3"]


def test_frames_that_need_those_of_the_next_episode_are_refused(root_v3: Path, tmp_path: Path) -> None:
    options = {"g": "10", "bf": "3", "x264-params": "open-gop=1:keyint=20:min-keyint=20:scenecut=0"}
    encode(root_v3 / f"videos/{TOP}/chunk-000/file-000.mp4", np.arange(sum(LENGTHS)), options)
    with pytest.raises(InputError, match=r"episode [01] does not begin on a key frame of its own"):
        convert_dataset(open_dataset(root_v3), tmp_path / "out", "v2.1")


def test_v2_0_gains_the_statistics_of_each_episode(root_v2: Path, tmp_path: Path) -> None:
    expected = [json.loads(line) for line in (root_v2 / "meta/episodes_stats.jsonl").read_text().splitlines()]
    edit_json(root_v2 / "meta/info.json", lambda info: info.update(codebase_version="v2.0"))
    (root_v2 / "meta/episodes_stats.jsonl").unlink()
    source = open_dataset(root_v2)
    for version in ("v2.1", "v3.0"):
        written = convert_dataset(source, tmp_path / version, version)
        assert_equal(source, open_dataset(written))
    found = [json.loads(line) for line in (tmp_path / "v2.1/meta/episodes_stats.jsonl").read_text().splitlines()]
    for before, after in zip(expected, found, strict=True):
        assert before["stats"]["action"] == after["stats"]["action"]
        assert np.allclose(before["stats"][TOP]["mean"], after["stats"][TOP]["mean"], atol=0.02)  # decoded frames


def test_images_in_tables_and_further_metadata_come_along(root_v2: Path, tmp_path: Path) -> None:
    for camera in (TOP, WRIST):
        edit_json(root_v2 / "meta/info.json", lambda info, c=camera: info["features"][c].update(dtype="image"))
    for number, length in enumerate(LENGTHS):
        path = root_v2 / f"data/chunk-000/episode_{number:06d}.parquet"
        table = pq.read_table(path)
        for camera in (TOP, WRIST):
            cells = []
            for pixels in barcode_frames(np.arange(100 * number, 100 * number + length)):
                Image.fromarray(pixels).save(buffer := io.BytesIO(), "png")
                cells.append({"bytes": buffer.getvalue(), "path": None})
            table = table.append_column(camera, pa.array(cells, pa.struct({"bytes": pa.binary(), "path": pa.string()})))
        pq.write_table(table, path)
    (root_v2 / "meta/embodiment.json").write_text('{"embodiment_tag": "yam"}')
    (root_v2 / "meta/relative_stats_dreamzero.json").write_text("{}")
    shutil.rmtree(root_v2 / "videos")
    source = open_dataset(root_v2)
    written = open_dataset(convert_dataset(source, tmp_path / "out", "v3.0"))
    assert_equal(source, written)
    assert read_barcodes(written.frames(1, TOP, np.arange(3))).tolist() == [100, 101, 102]
    for name in ("embodiment.json", "relative_stats_dreamzero.json", "modality.json"):
        assert (written.root / "meta" / name).read_bytes() == (root_v2 / "meta" / name).read_bytes()


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(root_v2: Path, tmp_path: Path) -> None:
    source = open_dataset(root_v2)
    with pytest.raises(InputError, match=r"is v2\.1 already"):
        convert_dataset(source, tmp_path / "out", "v2.1")
    with pytest.raises(InputError, match=r"cannot write dataset version 'v2\.0'"):
        convert_dataset(source, tmp_path / "out", "v2.0")
    with pytest.raises(InputError, match="exists already"):
        convert_dataset(source, root_v2, "v3.0")
    (root_v2 / f"videos/chunk-000/{WRIST}/episode_000002.mp4").unlink()
    with pytest.raises(InputError, match=r"episode_000002\.mp4"):
        convert_dataset(source, tmp_path / "out", "v3.0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v2"]


def add_keys(root: Path, keys: list[dict[str, object]]) -> None:
    path = root / "meta/episodes.jsonl"
    lines = [json.loads(line) | more for line, more in zip(path.read_text().splitlines(), keys, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_else_the_list_says_of_episodes_comes_along_both_ways(root_v2: Path, tmp_path: Path) -> None:
    steps = [{"start_frame": 0, "end_frame": 9, "text": "grasp"}, {"start_frame": 9, "end_frame": 20, "text": "lift"}]
    keys = [{"action_config": steps, "grade": 1}, {}, {"grade": 2.5, "is_success": True, "operator": "é"}]
    add_keys(root_v2, keys)
    source = open_dataset(root_v2)
    there = open_dataset(convert_dataset(source, tmp_path / "there", "v3.0"))
    names = pq.read_schema(there.root / "meta/episodes/chunk-000/file-000.parquet").names
    assert {"action_config", "grade", "is_success", "operator"} <= set(names)
    back = open_dataset(convert_dataset(there, tmp_path / "back", "v2.1"))
    for dataset in (source, there, back):
        assert [dataset.extras_of(number) for number in range(3)] == keys
    lines = [(root / "meta/episodes.jsonl").read_text().splitlines() for root in (root_v2, back.root)]
    assert [json.loads(line) for line in lines[0]] == [json.loads(line) for line in lines[1]]


def test_what_the_other_version_cannot_say_of_episodes_is_refused(root_v2: Path, root_v3: Path, tmp_path: Path) -> None:
    add_keys(root_v2, [{"grade": 1}, {"grade": "good"}, {}])
    with pytest.raises(InputError, match=r"the episodes' grade is no column of one kind .*: mend or remove it"):
        convert_dataset(open_dataset(root_v2), tmp_path / "out", "v3.0")
    path = root_v3 / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).append_column("raw", pa.array([b"1", b"2", b"3"])), path)
    with pytest.raises(InputError, match=r"the episode list says of episode 0 what v2\.1 cannot hold .*bytes"):
        convert_dataset(open_dataset(root_v3), tmp_path / "out", "v2.1")
    assert not (tmp_path / "out").exists()


class Kept(dict):
    """A dictionary of which one can tell whether somebody still holds it."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_few_episodes_statistics_are_in_memory(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = [replace(episode(number, 2), frames={}) for number in range(40)]
    source = open_dataset(write_dataset(bare, tmp_path / "source", version=version))
    monkeypatch.setattr(layout_v3, "EPISODES_AT_ONCE", 4)
    monkeypatch.setattr(episode_stats, "EPISODES_AT_ONCE", 4)
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()
    most = 0

    def counted(dataset: RobotDataset) -> Iterator[Kept]:
        nonlocal most
        for stats in episode_stats.episode_stats(dataset):
            alive.add(kept := Kept(stats))
            most = max(most, len(alive))
            yield kept

    monkeypatch.setattr(convert, "episode_stats", counted)
    there = open_dataset(convert_dataset(source, tmp_path / "there", OTHER[version]))
    assert 1 <= most <= 6
    monkeypatch.undo()
    before, after = (list(episode_stats.episode_stats(dataset)) for dataset in (source, there))
    assert before == after and len(after) == 40


def test_statistics_in_any_order_are_found_and_missing_ones_measured(root_v2: Path, tmp_path: Path) -> None:
    path = root_v2 / "meta/episodes_stats.jsonl"
    expected = [json.loads(line)["stats"]["action"] for line in path.read_text().splitlines()]
    path.write_text("\n".join(path.read_text().splitlines()[:0:-1]) + "\n")  # of episodes 2 and 1
    there = open_dataset(convert_dataset(open_dataset(root_v2), tmp_path / "there", "v3.0"))
    assert [stats["action"] for stats in episode_stats.episode_stats(there)] == expected
    path = there.root / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).take([2, 0, 1]), path, row_group_size=1)
    assert [stats["action"] for stats in episode_stats.episode_stats(open_dataset(there.root))] == expected


def test_parts_pool_to_the_statistics_of_all_rows() -> None:
    rows = np.random.default_rng(0).normal(size=(90, 3)) + np.array([0, 100, -5])
    pool = episode_stats.Pool()
    for part in (rows[:10], rows[10:70], rows[70:]):
        pool.add(measure_rows(part))
    for name, values in measure_rows(rows).items():
        if name in ("mean", "std", "min", "max", "count"):
            assert pool.measure()[name] == pytest.approx(values, rel=1e-12), name
