"""Indices and verdicts outlive the process, soundly; opening a video costs little and leaks nothing."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from encoded import decode_all, encode

from wamlab.data import frame_index, rgb
from wamlab.data.decode import open_video
from wamlab.data.frame_index import index_by_demuxing, index_by_moov, read_frame_index
from wamlab.data.readers import Readers
from wamlab.data.rgb import RgbConverter
from wamlab.data.video_notes import notes_folder, read_note, write_note
from wamlab.errors import InputError


@pytest.fixture(autouse=True)
def own_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fragmented(tmp_path: Path) -> Path:
    """Return a file whose header does not tell when frames are shown."""
    return encode(tmp_path / "fragmented.mp4", movflags="frag_keyframe+empty_moov")


def forbid(*_: object) -> None:
    raise AssertionError("the packets were walked again")


def same(one: frame_index.FrameIndex, other: frame_index.FrameIndex) -> bool:
    arrays = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("pts", "key_pts", "key_dts"))
    return arrays and all(
        getattr(one, name) == getattr(other, name) for name in ("time_base", "has_leading_frames", "num_hidden")
    )


def test_a_walked_index_is_walked_once(fragmented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert index_by_moov(fragmented) is None
    first = read_frame_index(fragmented)
    monkeypatch.setattr(frame_index, "index_by_demuxing", forbid)
    second = read_frame_index(fragmented)
    assert same(first, second) and same(first, index_by_demuxing(fragmented))


def test_a_note_is_of_one_content_of_a_file(fragmented: Path) -> None:
    read_frame_index(fragmented)
    encode(fragmented, movflags="frag_keyframe+empty_moov", pts=range(0, 120, 2), g=5)
    assert same(read_frame_index(fragmented), index_by_demuxing(fragmented))


DAMAGES = {
    "cut": lambda note: note[: len(note) // 2],
    "empty": lambda note: b"",
    "head": lambda note: b"\x93" + note[1:],
    "flipped": lambda note: note[:400] + b"\xff" * 40 + note[440:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_note_is_made_anew_with_a_warning(fragmented: Path, damage: Callable[[bytes], bytes]) -> None:
    first = read_frame_index(fragmented)
    (note,) = notes_folder().iterdir()
    sound = note.read_bytes()
    note.write_bytes(damage(sound))
    with pytest.warns(UserWarning, match="is damaged and made anew"):
        assert same(read_frame_index(fragmented), first)
    assert same(read_frame_index(fragmented), first)  # no warning: mended
    assert [file.name for file in notes_folder().iterdir()] == [note.name]  # no temporary file is left


def test_where_nothing_can_be_noted_the_index_is_the_same(fragmented: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert same(read_frame_index(fragmented), index_by_demuxing(fragmented))


def test_notes_are_plain_arrays(tmp_path: Path) -> None:
    (tmp_path / "video.mp4").write_bytes(b"any")
    write_note(tmp_path / "video.mp4", "verdict", reason=np.array("it errs"))
    note = read_note(tmp_path / "video.mp4", "verdict", ("reason",))
    assert note is not None and str(note["reason"]) == "it errs"
    assert read_note(tmp_path / "video.mp4", "index", ("reason",)) is None
    (file,) = notes_folder().iterdir()
    with np.load(file, allow_pickle=False) as arrays:
        assert set(arrays) == {"key", "reason"}


def joined(path: Path, clip: Path, times: int) -> Path:
    """Write a clip's packets several times, one after another."""
    start = 0
    with av.open(str(path), "w") as out:
        stream = None
        for _ in range(times):
            with av.open(str(clip)) as part:
                source = part.streams.video[0]
                stream = stream or out.add_stream_from_template(source)
                end = start
                for packet in part.demux(source):
                    if packet.size and packet.pts is not None and packet.dts is not None:
                        end = max(end, start + packet.pts + (packet.duration or 0))
                        packet.pts, packet.dts, packet.stream = packet.pts + start, packet.dts + start, stream
                        out.mux(packet)
                start = end
    return path


def test_the_header_of_a_long_file_is_read_far_faster_than_its_packets(tmp_path: Path) -> None:
    """A law and a bar: the same index for a fiftieth of the walk (about 1/250 where it was measured, 2026-12)."""
    path = joined(tmp_path / "long.mp4", encode(tmp_path / "clip.mp4"), 170)

    def cost_s(read: Callable[[Path], object], times: int) -> float:
        costs = []
        for _ in range(times):
            start = time.thread_time()
            read(path)
            costs.append(time.thread_time() - start)
        return min(costs)

    index = index_by_moov(path)
    assert index is not None and len(index) == 10_200 and same(index, index_by_demuxing(path))
    assert cost_s(index_by_moov, 20) * 50 < cost_s(index_by_demuxing, 3)


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc, which is not here")
def test_opening_and_closing_leaks_neither_memory_nor_files(tmp_path: Path) -> None:
    """WAMLAB_OPENS=3000 tries more often."""
    paths = [encode(tmp_path / f"{n}.mp4", size=(32, 96 + 16 * n)) for n in range(3)]
    num_opens = int(os.environ.get("WAMLAB_OPENS", "150"))

    def open_many(num: int) -> None:
        readers = Readers(max_bytes=1)  # one reader at a time
        for n in range(num):
            readers.read(paths[n % 3], np.array([n % 60]))
        readers.close()

    open_many(50)
    memory, files = memory_bytes(), len(list(Path("/proc/self/fd").iterdir()))
    open_many(num_opens)
    assert memory_bytes() - memory < (4 << 20) + 2048 * num_opens  # the heap settles; a reader holds 2 MB
    assert len(list(Path("/proc/self/fd").iterdir())) <= files


@pytest.mark.parametrize("size", [(32, 96), (18, 112), (33, 97), (64, 130)])
@pytest.mark.parametrize("library", ["PyAV's", "none"])
def test_pixels_are_the_same_written_directly_or_not(
    tmp_path: Path, size: tuple[int, int], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "none":
        monkeypatch.setattr(rgb, "_library", lambda: None)
    is_odd = size[0] % 2 == 1
    path = encode(tmp_path / "clip.mp4", size=size, pix_fmt="yuv444p" if is_odd else "yuv420p")
    canvas = np.full((9, size[0] + 2, size[1], 3), 7, np.uint8)
    out = canvas[:, 1:-1]
    reader = open_video(path)
    assert reader.read(np.arange(20, 29), out=out) is out
    truth = np.stack(list(decode_all(path).values()))[20:29]
    assert np.array_equal(out, truth) and np.array_equal(canvas[:, 1:-1], truth)
    assert (canvas[:, 0] == 7).all() and (canvas[:, -1] == 7).all()  # nothing is written beside the frames


@pytest.mark.skipif(rgb._library() is None, reason="this PyAV does not bring its own libswscale")
def test_frames_of_plain_video_are_written_directly(tmp_path: Path) -> None:
    with av.open(str(encode(tmp_path / "clip.mp4"))) as container:
        frame = next(container.decode(video=0))
    converter, pixels = RgbConverter(), np.empty((32, 96, 3), np.uint8)
    converter.write(frame, pixels)
    assert converter._is_direct
    converter.close()
    converter.write(frame, pixels)  # the other way still works
    assert np.array_equal(pixels, frame.to_ndarray(format="rgb24"))


def test_a_buffer_of_another_shape_is_refused(tmp_path: Path) -> None:
    reader = open_video(encode(tmp_path / "clip.mp4"))
    for buffer in (np.empty((3, 32, 98, 3), np.uint8), np.empty((3, 30, 96, 3), np.uint8)):
        with pytest.raises(InputError, match=r"frames of .* are uint8 \(3, 32, 96, 3\), the buffer for them is"):
            reader.read(np.arange(3), out=buffer)


def test_frames_are_exact_whatever_was_skipped_drained_or_read_before(tmp_path: Path) -> None:
    """Skipped frames nobody refers to, drained decoders and readers that go on leave no trace in the pixels."""
    for name, options in {
        "pyramid": {"g": 30, "x264_params": "b-pyramid=normal:bframes=3:b-adapt=0"},
        "short": {"g": 2, "bf": 1},
        "one_group": {"g": 250},
    }.items():
        path = encode(tmp_path / f"{name}.mp4", **options)
        truth = np.stack(list(decode_all(path).values()))
        reader, rng = open_video(path), np.random.default_rng(0)
        for _ in range(60):
            step, length = int(rng.integers(1, 7)), int(rng.integers(1, 9))
            asked = rng.integers(0, 60 - step * (length - 1)) + step * np.arange(length)
            if rng.random() < 0.3:
                asked = rng.permutation(np.concatenate([asked, asked[:2]]))
            assert np.array_equal(reader.read(asked), truth[asked]), (name, asked)
