"""Every frame that is asked for is the one a full sequential decode gives, or one clear error."""

import multiprocessing
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from encoded import SYNTHETIC, decode_all, encode

from wamlab.data.decode import open_video
from wamlab.data.frame_index import index_by_demuxing, index_by_moov, read_frame_index
from wamlab.data.pyav_reader import PyAVReader
from wamlab.data.readers import Readers
from wamlab.errors import InputError

DECODABLE = [
    "h264_bframes.mp4", "h264_opengop.mp4", "tiny_h264.mp4", "av1.mp4", "vp9.webm", "hevc_10bit.mp4",
    "vfr_drop.mp4", "ntsc2997.mp4", "start_offset.mp4", "editlist_cut.mp4", "rot90.mp4", "one_frame.mp4",
    "three_frames.mp4",
]  # fmt: skip
NO_VIDEO = {
    "zero_frames.mp4": "holds no video stream",
    "zero_bytes.mp4": "cannot open the video",
    "text.mp4": "cannot open the video",
    "audio_only.mp4": "holds no video stream",
    "trunc_nomoov.mp4": "cannot open the video",
    "reschange.ts": "same time stamp",
}


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the SYNTHETIC files, encoded once."""
    folder = tmp_path_factory.mktemp("synthetic")
    return {name: encode(folder / name, **options) for name, options in SYNTHETIC.items()}


def questions(num_frames: int) -> list[np.ndarray]:
    """Ask for single frames, the last ones, dense and strided clips, all of it reversed, and repeats."""
    rng = np.random.default_rng(0)
    singles = [np.array([n]) for n in rng.integers(0, num_frames, 8)]
    strided = [np.minimum(rng.integers(0, num_frames) + 4 * np.arange(9), num_frames - 1) for _ in range(2)]
    ends = np.arange(max(0, num_frames - 4), num_frames)
    return [*singles, *strided, ends, ends[::-1], np.arange(0, num_frames, 7), np.zeros(3, int)]


def assert_exact(path: Path) -> None:
    truth = decode_all(path)
    reader = open_video(path)
    assert reader.index.pts.tolist() == sorted(truth)
    for asked in questions(len(reader.index)):
        expected = [truth[pts] for pts in reader.index.pts[asked].tolist()]
        assert np.array_equal(reader.read(asked), expected)
    reader.close()


@pytest.mark.parametrize("name", DECODABLE)
def test_any_frame_of_an_awkward_file_equals_the_sequential_decode(shared: Path, name: str) -> None:
    assert_exact(shared / "data/video_edge" / name)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_any_frame_of_an_encoded_file_equals_the_sequential_decode(synthetic: dict[str, Path], name: str) -> None:
    assert_exact(synthetic[name])


@pytest.mark.parametrize("name", NO_VIDEO)
def test_what_is_no_video_raises_one_clear_error(shared: Path, name: str) -> None:
    with pytest.raises(InputError, match=NO_VIDEO[name]):
        open_video(shared / "data/video_edge" / name)


def test_a_damaged_file_gives_exact_frames_or_an_error(shared: Path) -> None:
    path = shared / "data/video_edge/corrupt_zeros.mp4"
    truth, reader = decode_all(path), open_video(path)
    num_exact = 0
    for number in range(200, 260):
        try:
            frame = reader.read(np.array([number]))[0]
        except InputError as error:
            assert re.search(f"frame {number} of .* is damaged", str(error))
        else:
            assert np.array_equal(frame, truth[int(reader.index.pts[number])])
            num_exact += 1
    assert 0 < num_exact < 60
    last = len(reader.index) - 1
    assert np.array_equal(reader.read(np.array([last]))[0], truth[int(reader.index.pts[last])])


def test_reading_past_what_a_cut_file_holds_raises(tmp_path: Path) -> None:
    path = encode(tmp_path / "cut.mp4", movflags="faststart")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 6 // 10])
    reader = open_video(path)
    assert len(reader.index) == 60
    assert len(reader.read(np.arange(5))) == 5
    with pytest.raises(InputError, match=r"frame 59 of .*cannot be decoded"):
        reader.read(np.array([59]))


def test_frames_that_a_file_does_not_have_are_refused(tmp_path: Path) -> None:
    reader = open_video(encode(tmp_path / "clip.mp4"))
    with pytest.raises(InputError, match=r"has frames 0\.\.59, frame 60 was asked for"):
        reader.read(np.array([3, 60]))
    with pytest.raises(InputError, match=r"frame -1 was asked for"):
        reader.read(np.array([-1]))


def test_the_moov_box_gives_the_same_index_as_demuxing(shared: Path, synthetic: dict[str, Path]) -> None:
    files = [*sorted((shared / "data").glob("*/*.mp4"))]
    files += synthetic.values()
    num_fast = 0
    for path in files:
        index = index_by_moov(path) if path.name not in NO_VIDEO else None
        if index is None:
            continue
        slow = index_by_demuxing(path)
        for field in ("pts", "key_pts", "key_dts"):
            assert np.array_equal(getattr(index, field), getattr(slow, field)), (path, field)
        assert index.time_base == slow.time_base
        assert index.has_leading_frames == slow.has_leading_frames
        assert index.num_hidden == slow.num_hidden == 0
        num_fast += 1
    assert num_fast >= 18  # most files take the fast way
    for name in ("editlist_cut.mp4", "start_offset.mp4", "vfr_drop.mp4"):
        assert index_by_moov(shared / "data/video_edge" / name) is None


def test_open_groups_and_cuts_are_noticed(shared: Path) -> None:
    folder = shared / "data/video_edge"
    assert read_frame_index(folder / "h264_opengop.mp4").has_leading_frames
    assert not read_frame_index(folder / "h264_bframes.mp4").has_leading_frames
    assert read_frame_index(folder / "editlist_cut.mp4").num_hidden == 20


def test_the_nearest_frame_is_found_by_time_not_by_rate(tmp_path: Path) -> None:
    index = read_frame_index(encode(tmp_path / "vfr.mp4", pts=[0, 1, *range(10, 68)]))
    frames, off_s = index.nearest(np.array([0.0, 1.2 / 15, 5 / 15, 10.4 / 15, 99.0]))
    assert frames.tolist() == [0, 1, 1, 2, 59]
    assert off_s[:4] == pytest.approx([0, 0.2 / 15, 4 / 15, 0.4 / 15], abs=1e-9)


def test_every_thread_reads_exact_frames_through_a_bounded_pool(tmp_path: Path) -> None:
    paths = [encode(tmp_path / f"{n}.mp4", size=(32, 96 + 2 * n)) for n in range(5)]
    truth = [np.stack(list(decode_all(path).values())) for path in paths]
    readers = Readers(max_bytes=5 << 20)
    failures: list[str] = []

    def read_some(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            file, frames = rng.integers(5), rng.integers(0, 60, 4)
            if not np.array_equal(readers.read(paths[file], frames), truth[file][frames]):
                failures.append(f"file {file} frames {frames}")

    threads = [threading.Thread(target=read_some, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)


def _read_in_child(readers: Readers, path: Path, expected: np.ndarray) -> None:
    if not np.array_equal(readers.read(path, np.array([40, 3])), expected):
        raise SystemExit(1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_opens_its_own_readers(tmp_path: Path) -> None:
    path = encode(tmp_path / "clip.mp4")
    readers = Readers()
    expected = readers.read(path, np.array([40, 3]))
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(readers, path, expected))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert np.array_equal(readers.read(path, np.array([40, 3])), expected)


def test_an_unknown_backend_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'opencv'; choose one of pyav, torchcodec, decord"):
        open_video(tmp_path / "any.mp4", backend="opencv")


def test_converting_only_asked_frames_returns_an_empty_array_for_none(tmp_path: Path) -> None:
    path = encode(tmp_path / "clip.mp4")
    reader = PyAVReader(path, read_frame_index(path))
    assert reader.read(np.array([], dtype=np.int64)).shape == (0, 32, 96, 3)
