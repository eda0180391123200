"""What was written is what is read: rows exactly, frames by number and within the codec's tolerance."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from barcode import barcode_frames, read_barcodes

from wamlab.data.decode import open_video
from wamlab.data.encode import VideoConfig
from wamlab.data.import_videos import import_videos
from wamlab.data.lerobot import open_dataset
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.types import Episode

VERSIONS = ["v2.1", "v3.0"]


def numbered_episode(
    first: int, length: int, instruction: str = "pick it up", cameras: tuple[str, ...] = ("top", "wrist")
) -> Episode:
    """Make an episode whose frames carry the numbers from ``first`` on, the second camera's 2000 higher."""
    rng = np.random.default_rng(first)
    numbers = np.arange(first, first + length)
    return Episode(
        frames={camera: barcode_frames(numbers + 2000 * n) for n, camera in enumerate(cameras)},
        state=rng.normal(size=(length, 7)).astype(np.float32),
        action=rng.normal(size=(length, 3)).astype(np.float32),
        instruction=instruction,
        fps=10.0,
        signals={
            "next.reward": rng.normal(size=length).astype(np.float32),
            "next.done": np.arange(length) == length - 1,
            "force": rng.normal(size=(length, 2)).astype(np.float32),
        },
    )


EPISODES = [numbered_episode(0, 23), numbered_episode(100, 41, "put it down"), numbered_episode(300, 10)]


@pytest.fixture(scope="module", params=VERSIONS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written") / "set"
    return write_dataset(iter(EPISODES), root, version=request.param, robot_type="tabletop")


def test_rows_tasks_and_lengths_come_back_equal(written: Path) -> None:
    dataset = open_dataset(written)
    assert dataset.lengths.tolist() == [23, 41, 10]
    assert dataset.tasks == {0: "pick it up", 1: "put it down"}
    assert (dataset.fps, dataset.robot_type) == (10.0, "tabletop")
    assert dataset.cameras == ("observation.images.top", "observation.images.wrist")
    for number, episode in enumerate(EPISODES):
        back = dataset.episode(number)
        assert np.array_equal(back.state, episode.state)
        assert np.array_equal(back.action, episode.action)
        assert (back.instruction, back.fps) == (episode.instruction, episode.fps)
        assert back.signals.keys() == episode.signals.keys()
        for name, values in episode.signals.items():
            assert np.array_equal(back.signals[name], values), name
        assert dataset.rows(number, "timestamp") == pytest.approx(np.arange(len(episode.state)) / 10)
        assert dataset.instructions(number) == [episode.instruction] * len(episode.state)


def test_every_frame_is_the_very_one_and_looks_alike(written: Path) -> None:
    dataset = open_dataset(written)
    for number, episode in enumerate(EPISODES):
        for name, frames in episode.frames.items():
            back = dataset.frames(number, f"observation.images.{name}", np.arange(len(frames)))
            assert np.array_equal(read_barcodes(back), read_barcodes(frames))
            error = np.square(back.astype(float) - frames).mean()
            assert 10 * np.log10(255**2 / error) > 30  # dB


def test_frames_are_found_in_any_order(written: Path) -> None:
    rows = np.array([40, 0, 7, 7, 33])
    frames = open_dataset(written).frames(1, "observation.images.wrist", rows)
    assert read_barcodes(frames).tolist() == (2100 + rows).tolist()


def test_statistics_are_those_of_all_rows(written: Path) -> None:
    dataset = open_dataset(written)
    rows = np.concatenate([episode.action for episode in EPISODES])
    stats = dataset.stats("action")
    assert stats["mean"] == pytest.approx(rows.mean(axis=0), abs=1e-6)
    assert stats["std"] == pytest.approx(rows.std(axis=0), abs=1e-6)
    assert stats["q01"] == pytest.approx(np.quantile(rows, 0.01, axis=0), abs=1e-6)
    assert stats["q99"] == pytest.approx(np.quantile(rows, 0.99, axis=0), abs=1e-6)
    assert (stats["min"] == rows.min(axis=0)).all() and (stats["max"] == rows.max(axis=0)).all()
    assert stats["count"].tolist() == [74]


def test_colour_statistics_have_the_shape_and_range_of_lerobot(written: Path) -> None:
    stats = open_dataset(written).stats("observation.images.top")
    frames = np.concatenate([episode.frames["top"] for episode in EPISODES]) / 255
    assert stats["mean"].shape == stats["q99"].shape == (3, 1, 1)
    assert stats["mean"].ravel() == pytest.approx(frames.mean(axis=(0, 1, 2)))
    assert stats["std"].ravel() == pytest.approx(frames.std(axis=(0, 1, 2)))
    assert stats["min"].max() == 0 and stats["max"].min() == 1


def test_statistics_that_the_metadata_lack_are_computed_from_the_rows(written: Path, tmp_path: Path) -> None:
    stored = open_dataset(written).stats("observation.state")
    copy = tmp_path / "copy"
    write_dataset(EPISODES, copy, version="v2.1")
    (copy / "meta/stats.json").unlink()
    computed = open_dataset(copy).stats("observation.state")
    assert computed.keys() == stored.keys()
    assert all(computed[name] == pytest.approx(stored[name]) for name in stored)


def test_both_versions_hold_equal_content(tmp_path: Path) -> None:
    old, new = (open_dataset(write_dataset(EPISODES, tmp_path / v, version=v)) for v in VERSIONS)
    assert (old.lengths == new.lengths).all() and old.tasks == new.tasks and old.cameras == new.cameras
    for name in old.features:
        assert {s: v.tolist() for s, v in old.stats(name).items()} == {
            s: v.tolist() for s, v in new.stats(name).items()
        }
    for number in range(3):
        for column in set(old.features) - set(old.cameras):
            assert np.array_equal(old.rows(number, column), new.rows(number, column)), column
        # x264 chooses bits by all it has seen of a file, so the pixels of its two outputs differ slightly.
        for camera in old.cameras:
            rows = np.arange(old.lengths[number])
            left, right = old.frames(number, camera, rows), new.frames(number, camera, rows)
            assert np.array_equal(read_barcodes(left), read_barcodes(right))
            assert np.abs(left.astype(int) - right).mean() < 3


@pytest.mark.parametrize("version", VERSIONS)
def test_rewriting_a_read_dataset_keeps_its_rows(written: Path, tmp_path: Path, version: str) -> None:
    dataset = open_dataset(written)
    copy = open_dataset(
        write_dataset(map(dataset.episode, range(dataset.num_episodes)), tmp_path / "copy", version=version)
    )
    for number in range(3):
        assert np.array_equal(copy.rows(number, "action"), dataset.rows(number, "action"))
        rows = np.arange(copy.lengths[number])
        numbers = [read_barcodes(d.frames(number, d.cameras[1], rows)).tolist() for d in (copy, dataset)]
        assert numbers[0] == numbers[1]


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_every_codec_keeps_frames_apart(tmp_path: Path, codec: str) -> None:
    episode = numbered_episode(5, 30, cameras=("top",))
    episode = replace(episode, frames={"top": np.repeat(episode.frames["top"], 2, axis=1)})
    dataset = open_dataset(write_dataset([episode, episode], tmp_path / codec, codec=codec, crf=20))
    assert dataset.features["observation.images.top"]["info"]["video.codec"] == codec
    for number in range(2):
        frames = dataset.frames(number, "observation.images.top", np.arange(30))
        assert read_barcodes(frames).tolist() == list(range(5, 35))


def test_files_of_v3_rotate_by_size_and_frames_stay_exact(tmp_path: Path) -> None:
    episodes = [numbered_episode(100 * n, 60) for n in range(5)]
    root = write_dataset(episodes, tmp_path / "set", video_file_mb=0.005)
    folder = root / "videos/observation.images.top/chunk-000"
    assert 1 < len(list(folder.iterdir())) < 5  # some hold several episodes
    dataset = open_dataset(root)
    for number in range(5):
        frames = dataset.frames(number, "observation.images.wrist", np.arange(60))
        assert read_barcodes(frames).tolist() == list(range(2000 + 100 * number, 2060 + 100 * number))


def test_a_fractional_frame_rate_keeps_time_in_later_episodes(tmp_path: Path) -> None:
    episodes = [replace(numbered_episode(500 * n, 400, cameras=("top",)), fps=30000 / 1001) for n in range(3)]
    dataset = open_dataset(write_dataset(episodes, tmp_path / "set"))
    assert dataset.fps == pytest.approx(30000 / 1001, abs=1e-9)
    frames = dataset.frames(2, "observation.images.top", np.array([0, 399]))
    assert read_barcodes(frames).tolist() == [1000, 1399]


def test_episodes_are_written_as_they_come(tmp_path: Path) -> None:
    """The writer asks for the next episode only when it is done with the one before."""
    seen: list[int] = []

    def stream() -> Iterator[Episode]:
        for number in range(3):
            partial = [path for path in tmp_path.iterdir() if ".partial-" in path.name]
            seen.append(sum(len(list(path.glob("data/*/*.parquet"))) for path in partial))
            yield numbered_episode(100 * number, 5)

    write_dataset(stream(), tmp_path / "set", version="v2.1")
    assert seen == [0, 1, 2]


def test_an_episode_without_states_has_no_such_columns(tmp_path: Path) -> None:
    nothing = np.zeros((8, 0), np.float32)
    episode = replace(numbered_episode(0, 8), state=nothing, action=nothing, signals={})
    dataset = open_dataset(write_dataset([episode], tmp_path / "set"))
    assert not dataset.has_column("observation.state") and not dataset.has_column("action")
    assert dataset.episode(0).action.shape == (8, 0)


def test_the_metadata_of_v2_name_the_modalities(tmp_path: Path) -> None:
    root = write_dataset(EPISODES, tmp_path / "set", version="v2.1")
    modality = json.loads((root / "meta/modality.json").read_text())
    assert modality["state"]["state"] == {"start": 0, "end": 7, "original_key": "observation.state"}
    assert modality["action"]["action"] == {"start": 0, "end": 3, "original_key": "action"}
    assert modality["video"]["wrist"] == {"original_key": "observation.images.wrist"}
    assert modality["annotation"]["human.task_description"] == {"original_key": "task_index"}
    info = json.loads((root / "meta/info.json").read_text())
    assert (info["total_episodes"], info["total_frames"], info["total_videos"]) == (3, 74, 6)


def test_vectors_are_fixed_size_lists_and_tasks_a_pandas_index(tmp_path: Path) -> None:
    root = write_dataset(EPISODES, tmp_path / "set")
    schema = pq.read_schema(root / "data/chunk-000/file-000.parquet")
    assert str(schema.field("action").type) == "fixed_size_list<element: float>[3]"
    assert str(schema.field("next.done").type) == "bool"
    tasks = pq.read_schema(root / "meta/tasks.parquet")
    assert tasks.pandas_metadata["index_columns"] == ["__index_level_0__"]
    episodes = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet")
    assert episodes["dataset_from_index"].to_pylist() == [0, 23, 64]
    starts = episodes["videos/observation.images.top/from_timestamp"].to_pylist()
    assert starts == pytest.approx([0, 2.3, 6.4], abs=1e-12)
    assert np.array(episodes["stats/observation.images.top/q50"].to_pylist()[0]).shape == (3, 1, 1)


def with_value(value: float) -> Episode:
    episode = numbered_episode(0, 9)
    state = episode.state.copy()
    state[4, 2] = value
    return replace(episode, state=state)


def larger(episode: Episode, height: int, width: int) -> Episode:
    frames = np.zeros((episode.num_ticks, height, width, 3), np.uint8)
    return replace(episode, frames={"top": frames, "wrist": frames})


GOOD = numbered_episode(0, 9)
WRONG: dict[str, tuple[list[Episode], str]] = {
    "no episodes": ([], "no episode to write"),
    "nan": ([GOOD, with_value(np.nan)], "observation.state of episode 1 is not finite in row 4"),
    "inf": ([with_value(np.inf)], "observation.state of episode 0 is not finite in row 4"),
    "other dimensions": ([GOOD, replace(GOOD, action=GOOD.action[:, :2])], "episode 1 has action dimensions 2"),
    "other cameras": ([GOOD, numbered_episode(0, 9, cameras=("top",))], "episode 1 has camera sizes"),
    "other sizes": ([GOOD, larger(GOOD, 64, 64)], "episode 1 has camera sizes"),
    "other rate": ([GOOD, replace(GOOD, fps=15.0)], r"episode 1 has fps 15.0, episode 0 has 10.0"),
    "other signals": ([GOOD, replace(GOOD, signals={})], "episode 1 has signals"),
    "short signal": ([replace(GOOD, signals={"force": np.zeros(5)})], "9 states but 5 rows of force"),
    "no ticks": ([numbered_episode(0, 0)], "episode 0 has no ticks"),
    "odd size": ([larger(GOOD, 33, 64)], "frames of 64x33 cannot become yuv420p video"),
    "reserved": ([replace(GOOD, signals={"index": np.zeros(9)})], "'index', which LeRobot reserves"),
    "text signal": ([replace(GOOD, signals={"note": np.array(["a"] * 9)})], "column note of episode 0 holds"),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_episodes_are_named_and_leave_nothing_behind(tmp_path: Path, case: str, version: str) -> None:
    episodes, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        write_dataset(episodes, tmp_path / "set", version=version)
    assert not list(tmp_path.iterdir())


def test_a_failing_source_leaves_nothing_behind(tmp_path: Path) -> None:
    def stream() -> Iterator[Episode]:
        yield GOOD
        raise RuntimeError("the simulator died")

    with pytest.raises(RuntimeError, match="the simulator died"):
        write_dataset(stream(), tmp_path / "set")
    assert not list(tmp_path.iterdir())


def test_targets_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="taken exists already"):
        write_dataset([GOOD], tmp_path / "taken")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write into .*file"):
        write_dataset([GOOD], tmp_path / "file/set")
    with pytest.raises(InputError, match=r"dataset version 'v1'; choose one of v2\.1, v3\.0"):
        write_dataset([GOOD], tmp_path / "set", version="v1")
    with pytest.raises(InputError, match="unknown video codec 'xvid'"):
        write_dataset([GOOD], tmp_path / "set", codec="xvid")
    with pytest.raises(InputError, match="keyframe_interval above 0"):
        VideoConfig(keyframe_interval=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


@pytest.mark.parametrize("version", VERSIONS)
def test_real_clips_are_imported_without_re_encoding(shared: Path, tmp_path: Path, version: str) -> None:
    files = {path.stem: path for path in (shared / "data/droid_clip").glob("*.mp4")}
    root = import_videos(files, tmp_path / "set", instruction="tidy up", version=version)
    dataset = open_dataset(root)
    assert dataset.lengths.tolist() == [419] and dataset.fps == 15
    assert dataset.instructions(0) == ["tidy up"] * 419
    assert not dataset.has_column("action") and not dataset.has_column("observation.state")
    assert sorted(path.read_bytes() for path in root.rglob("*.mp4")) == sorted(
        path.read_bytes() for path in files.values()
    )
    assert dataset.frames(0, "observation.images.wrist_image_left", np.array([418, 0])).shape == (
        2, 180, 320, 3,
    )  # fmt: skip
    assert dataset.stats("observation.images.wrist_image_left")["mean"].shape == (3, 1, 1)


def test_files_other_readers_would_mistime_are_encoded_anew(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data/video_edge"
    source = folder / "editlist_cut.mp4"
    dataset = open_dataset(import_videos({"top": source}, tmp_path / "cut", instruction=""))
    assert dataset.lengths.tolist() == [369]
    frame = dataset.frames(0, "observation.images.top", np.array([100]))
    assert np.abs(frame.astype(int) - open_video(source).read(np.array([100]))).mean() < 3
    with pytest.raises(InputError, match=r"vfr_drop\.mp4 does not run at .* frames per second throughout"):
        import_videos({"top": folder / "vfr_drop.mp4"}, tmp_path / "vfr", instruction="")
    with pytest.raises(InputError, match="one frame, which tells no frame rate"):
        import_videos({"top": folder / "one_frame.mp4"}, tmp_path / "one", instruction="")


@pytest.mark.parametrize("version", VERSIONS)
def test_cameras_of_different_lengths_are_refused_or_trimmed(tmp_path: Path, version: str) -> None:
    files = {}
    for camera, length in (("top", 30), ("wrist", 25)):
        episode = numbered_episode(0, length, cameras=(camera,))
        source = write_dataset([episode], tmp_path / camera)
        files[camera] = next(source.rglob("*.mp4"))
    with pytest.raises(InputError, match=r"different numbers of frames \(top 30, wrist 25\)"):
        import_videos(files, tmp_path / "set", instruction="", version=version)
    root = import_videos(files, tmp_path / "set", instruction="", version=version, is_trimmed_to_shortest=True)
    dataset = open_dataset(root)
    assert dataset.lengths.tolist() == [25]
    assert read_barcodes(dataset.frames(0, "observation.images.top", np.array([24]))).tolist() == [24]


def test_what_a_killed_process_left_is_removed_and_a_living_one_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from wamlab.data.recording import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'file').touch(); print(folder, flush=True); time.sleep(100)"
    )

    def begin(name: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / name)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    killed, left = begin("set")
    killed.kill()
    killed.communicate()
    living, kept = begin("set*")
    other, also_kept = begin("set")
    try:
        assert kept.exists() and also_kept.exists() and not left.exists()
        write_dataset([numbered_episode(0, 5)], tmp_path / "set")
        assert (kept / "file").exists() and (also_kept / "file").exists()
        assert (tmp_path / "set/meta/info.json").exists()
    finally:
        for process in (living, other):
            process.kill()
            process.communicate()
