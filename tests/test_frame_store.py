"""Decoded frames on disk: what was decoded comes back, and nothing that befalls files or disk stops a run."""

import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from wamlab.data.frame_cache import FrameCache, FrameSource
from wamlab.data.frame_store import FrameStore
from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.store_kind import measure_kinds
from wamlab.data.stored_frames import pack, unpack
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.types import Episode

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (12, 7, 9)
FILE_BYTES = 4096 + 12 * 64 * 96 * 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> RobotDataset:
    rng = np.random.default_rng(0)

    def recorded(length: int) -> Episode:
        vectors = rng.normal(size=(length, 2)).astype(np.float32)
        shade = np.linspace(20, 230, length)[:, None, None, None] + np.linspace(0, 25, 96)[:, None]
        frames = {"top": (shade + np.zeros((64, 96, 3))).astype(np.uint8)}
        frames["wrist"] = 255 - frames["top"][:, :32, :32]
        return Episode(frames=frames, state=vectors, action=vectors, instruction="go", fps=10.0)

    return open_dataset(write_dataset(map(recorded, LENGTHS), tmp_path_factory.mktemp("store") / "robot"))


def filled(dataset: RobotDataset, folder: Path, **options) -> FrameStore:
    store = FrameStore(dataset, folder, 10**8, **options)
    for episode in range(3):
        for camera in (TOP, WRIST):
            store.frames(episode, camera, np.array([0]))
    assert store.wait(20)
    return store


def assert_exact(store: FrameStore | FrameCache, dataset: RobotDataset, episodes: tuple[int, ...] = (0, 1, 2)) -> None:
    for episode in episodes:
        rows = np.array([5, 0, 6, 6, 2])
        for camera in (TOP, WRIST):
            np.testing.assert_array_equal(store.frames(episode, camera, rows), dataset.frames(episode, camera, rows))


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_store_gives_the_decoders_frames_from_its_files(dataset, tmp_path):
    store = filled(dataset, tmp_path)
    assert_exact(store, dataset)
    report = store.report()
    assert (report.hits, report.misses, report.written, report.damaged, report.num_files) == (6, 6, 6, 0, 6)
    assert report.used_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    again = pickle.loads(pickle.dumps(FrameStore(dataset, tmp_path, 10**8, is_filling=False)))
    assert_exact(again, dataset)
    assert again.report().misses == 0
    assert isinstance(store, FrameSource)
    store.close()


def test_frames_are_read_into_memory_that_is_given(dataset, tmp_path):
    store = filled(dataset, tmp_path)
    rows, out = np.array([3, 1]), np.zeros((2, 64, 96, 3), np.uint8)
    assert store.frames(0, TOP, rows, out=out) is out
    np.testing.assert_array_equal(out, dataset.frames(0, TOP, rows))
    empty = FrameStore(dataset, tmp_path / "none", 10**8)
    out[:] = 0
    assert empty.frames(0, TOP, rows, out=out) is out
    np.testing.assert_array_equal(out, dataset.frames(0, TOP, rows))


def test_threads_share_a_store_under_a_cache_while_it_fills(dataset, tmp_path):
    store = FrameStore(dataset, tmp_path, 10**8)
    cache = FrameCache(store, 2 * FILE_BYTES)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: assert_exact(cache, dataset), range(4)))
    assert store.wait(20)
    assert_exact(FrameCache(store, 0), dataset)
    assert not list(tmp_path.glob(".*"))
    store.close()


def test_an_episode_decoded_as_a_whole_is_written_by_who_did(dataset, tmp_path):
    store = FrameStore(dataset, tmp_path, 10**8)
    FrameCache(store, 10**8).frames(0, TOP, np.array([1]))
    assert store.wait(20)  # the filling thread, asked for the frame's size before, may write it as well
    report = store.report()
    assert report.written >= 1 == report.num_files
    np.testing.assert_array_equal(store.frames(0, TOP, np.arange(12)), dataset.frames(0, TOP, np.arange(12)))
    assert store.report().hits > report.hits


def test_jpeg_frames_are_the_same_stored_or_not_and_close_to_the_decoders(dataset, tmp_path):
    store = FrameStore(dataset, tmp_path, 10**8, kind="mjpeg")
    rows = np.array([4, 1])
    before = {camera: store.frames(0, camera, rows) for camera in (TOP, WRIST)}
    assert store.wait(20)
    for camera in (TOP, WRIST):
        np.testing.assert_array_equal(store.frames(0, camera, rows), before[camera])
        error = before[camera].astype(float) - dataset.frames(0, camera, rows)
        assert 10 * np.log10(255**2 / (error**2).mean()) > 38
    assert store.report().hits == 2
    assert store.pixels
    assert store.report().used_bytes < 2 * FILE_BYTES / 5


def test_jpeg_takes_pictures_of_any_size():
    rng = np.random.default_rng(0)
    for height, width in ((33, 47), (8, 8), (64, 90), (33, 47)):
        frames = np.full((2, height, width, 3), rng.integers(0, 256, 3), np.uint8)
        out = unpack(pack(frames), np.empty_like(frames))
        assert abs(out.astype(int) - frames).max() <= 3


def test_a_store_never_grows_beyond_its_budget_and_says_so_once(dataset, tmp_path):
    store = FrameStore(dataset, tmp_path, FILE_BYTES + 4096 + 12 * 32 * 32 * 3)
    for camera in (TOP, WRIST, TOP):
        store.frames(0, camera, np.array([0]))
    store.frames(2, TOP, np.array([0]))
    assert store.wait(20)
    with pytest.warns(UserWarning, match=r"takes no more frames: the .* GiB given to it, or the disk, are full"):
        store.frames(1, TOP, np.array([0]))
    assert_exact(store, dataset)  # a second warning would raise
    report = store.report()
    assert report.num_files == 2
    assert report.used_bytes <= report.max_bytes
    assert report.stopped


def test_no_room_at_all_is_only_decoding(dataset, tmp_path):
    store = FrameStore(dataset, tmp_path / "never", 0)
    assert_exact(store, dataset)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("kind", ["raw", "mjpeg"])
@pytest.mark.parametrize("place", [0, 20, 4096 + 50, -1])
def test_a_damaged_file_is_told_once_and_made_again(dataset, tmp_path, kind, place):
    store = FrameStore(dataset, tmp_path, 10**8, kind=kind)
    rows = np.arange(11)
    expected = store.frames(0, TOP, rows)
    assert store.wait(20)
    path = only_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)
    damaged = FrameStore(dataset, tmp_path, 10**8, kind=kind)
    all_rows = np.arange(12)
    with pytest.warns(UserWarning, match="decoded again") as told:
        np.testing.assert_array_equal(damaged.frames(0, TOP, all_rows)[:11], expected)
    assert len(told) == 1
    np.testing.assert_array_equal(damaged.frames(0, TOP, rows), expected)
    assert (damaged.report().damaged, damaged.report().written, damaged.report().hits) == (1, 1, 1)


@pytest.mark.parametrize("size", [0, 10, 3000, 9000])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_truncated_file_is_told_once_and_made_again(dataset, tmp_path, size, is_mapped):
    store = filled(dataset, tmp_path)
    if not is_mapped:
        store = FrameStore(dataset, tmp_path, 10**8)
    path = store._path((0, TOP))
    if is_mapped:
        store.frames(0, TOP, np.array([0]))
    os.truncate(path, size)
    with pytest.warns(UserWarning, match="decoded again") as told:
        np.testing.assert_array_equal(store.frames(0, TOP, np.array([3])), dataset.frames(0, TOP, np.array([3])))
    assert len(told) == 1
    assert store.wait(20)
    assert path.stat().st_size == FILE_BYTES
    assert_exact(store, dataset)
    assert store.report().damaged == 1


def test_another_video_is_decoded_anew(dataset, tmp_path):
    filled(dataset, tmp_path)
    for path in dataset.root.rglob("*.mp4"):
        os.utime(path)
    store = FrameStore(dataset, tmp_path, 10**8)
    assert_exact(store, dataset)
    assert store.report().hits == 0
    assert store.wait(20)
    assert_exact(store, dataset)
    assert (store.report().hits, store.report().num_files) == (6, 6)


def test_a_full_disk_stops_the_filling_only(dataset, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=False).returncode
    ):
        pytest.skip("only root can make a small disk")
    try:
        store = FrameStore(dataset, disk, 10**8)
        for episode in range(3):
            store.frames(episode, TOP, np.array([0]))
        assert store.wait(20)
        with pytest.warns(UserWarning, match="takes no more frames: No space left on device; reading goes on"):
            store.frames(2, TOP, np.array([0]))
        assert_exact(store, dataset)
        assert store.report().num_files == 1
        assert store.report().hits > 0
        del store
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_folder_closed_to_writing_is_read_only(dataset, tmp_path):
    filled(dataset, tmp_path)
    closed = tmp_path / "closed"
    if not os.geteuid():  # root may write anywhere but where no file system can
        closed = Path("/proc/frames")
    else:
        closed.mkdir(mode=0o500)
    store = FrameStore(dataset, closed, 10**8)
    store.frames(0, TOP, np.array([0]))
    assert store.wait(20)
    with pytest.warns(UserWarning, match="takes no more frames"):
        assert_exact(store, dataset)
    tmp_path.chmod(0o500)
    try:
        readable = FrameStore(dataset, tmp_path, 10**8)
        assert_exact(readable, dataset)
        assert readable.report().misses == 0
    finally:
        tmp_path.chmod(0o700)


def in_child(work: Callable[[], None]) -> int:
    """Do something in a forked process; return its number. It exits with 1 on an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking beside threads
        child = os.fork()
    if not child:
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return child


def test_processes_share_a_store_and_one_killed_leaves_it_whole(dataset, tmp_path):
    def read(num_rounds: int) -> None:
        store = FrameStore(dataset, tmp_path, 10**8)
        for _ in range(num_rounds):
            assert_exact(store, dataset)
        assert store.wait(20)
        assert not store.report().damaged

    killed = in_child(lambda: read(10**9))
    while not list(tmp_path.iterdir()):
        time.sleep(0.001)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    shared = [in_child(lambda: read(3)) for _ in range(2)]
    assert [os.waitpid(child, 0)[1] for child in shared] == [0, 0]
    leftover = tmp_path / f".x.raw@1@{os.uname().nodename}@{killed}.tmp"
    leftover.touch()
    store = filled(dataset, tmp_path)
    assert not list(tmp_path.glob(".*"))
    assert_exact(store, dataset)
    assert (store.report().num_files, store.report().damaged) == (6, 0)


def test_what_a_killed_writer_left_of_an_episode_is_no_obstacle(dataset, tmp_path):
    path = FrameStore(dataset, tmp_path, 10**8)._path((0, TOP))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    store = FrameStore(dataset, tmp_path, 10**8)
    (tmp_path / f".{path.name}@1@{os.uname().nodename}@{gone.pid}.tmp").write_bytes(b"half")
    alive = tmp_path / f".{store._path((1, TOP)).name}@1@{os.uname().nodename}@{os.getpid()}.tmp"
    alive.touch()
    for episode in (0, 1):
        store.frames(episode, TOP, np.array([0]))
    assert store.wait(20)
    assert sorted(tmp_path.iterdir()) == sorted([path, alive])  # what another one writes is left to it


def test_a_forked_child_fills_as_well(dataset, tmp_path):
    store = filled(dataset, tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    store._open.cache_clear()

    def fill() -> None:
        store.frames(0, WRIST, np.array([1]))
        assert store.wait(10)

    assert os.waitpid(in_child(fill), 0)[1] == 0
    assert store.frames(0, WRIST, np.array([1])).any()
    assert only_file(tmp_path) == store._path((0, WRIST))


def test_auto_is_raw_where_all_fits_and_says_why(dataset, tmp_path):
    said: list[str] = []
    store = FrameStore(dataset, tmp_path, 10**8, kind="auto", say=said.append)
    assert store.kind in ("raw", "none")  # "none" where a busy machine copies as slowly as it decodes
    assert "decoding takes" in said[0]
    assert "100% fit in" in said[0]


def test_the_kind_with_the_largest_saving_is_jpeg_where_little_fits(dataset):
    frames = dataset.frames(0, TOP, np.arange(12))
    slow_s = 0.005

    def window() -> np.ndarray:
        end_s = time.thread_time() + slow_s * len(frames)
        while time.thread_time() < end_s:
            pass
        return frames

    decode_ms, costs = measure_kinds([window], num_frames=1000, room=1000 * frames[0].nbytes // 10)
    assert decode_ms > 0.9e3 * slow_s
    assert costs["raw"].share == pytest.approx(0.1)
    assert costs["mjpeg"].share > 0.5
    assert costs["mjpeg"].saved_ms > costs["raw"].saved_ms > 0
    assert costs["mjpeg"].psnr_db > 35


@pytest.mark.parametrize(("episode", "camera", "row"), [(9, TOP, 0), (0, "no", 0), (0, TOP, 99), (0, TOP, -1)])
def test_a_wrong_request_is_told_as_the_dataset_does(dataset, tmp_path, episode, camera, row):
    store = FrameStore(dataset, tmp_path, 10**8)
    with pytest.raises(InputError) as direct:
        dataset.frames(episode, camera, np.array([row]))
    with pytest.raises(InputError) as stored:
        store.frames(episode, camera, np.array([row]))
    assert str(stored.value) == str(direct.value)


def test_a_wrong_setting_is_one_sentence(dataset, tmp_path):
    with pytest.raises(InputError, match='the kind of a frame store is "gif": give raw, mjpeg or auto'):
        FrameStore(dataset, tmp_path, 1, kind="gif")
    with pytest.raises(InputError, match="-1 bytes of room"):
        FrameStore(dataset, tmp_path, -1)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file: give the frame store a folder"):
        FrameStore(dataset, tmp_path / "file", 1)
