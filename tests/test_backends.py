"""The compatibility table of the video backends: what each makes of every codec and oddity, a row a test.

A cell is "exact" (every asked frame equals the sequential decode), "close" (another converter: a few levels off,
still the right frame) or a part of the sentence by which the backend is refused for that file.
"""

from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from encoded import SYNTHETIC, decode_all, encode

from wamlab.data import foreign_comparison
from wamlab.data.decode import open_video
from wamlab.data.foreign_probe import Probe, is_gradual_refresh, probe, refuse
from wamlab.errors import InputError

HEVC = {"codec": "libx265", "x265_params": "log-level=none:keyint=12:open-gop=0:pools=1"}
MORE = SYNTHETIC | {
    "hevc_closed_gop.mp4": HEVC,
    "hevc_gray12.mp4": {"codec": "libx265", "pix_fmt": "gray12le", "g": 2, "x265_params": "log-level=none:pools=1"},
    "h264_10bit.mp4": {"pix_fmt": "yuv420p10le"},
    "mpeg4.mp4": {"codec": "mpeg4", "bf": 0},
    "mjpeg.mp4": {"codec": "mjpeg", "pix_fmt": "yuvj420p", "bf": 0},
    "vp9.webm": {"codec": "libvpx-vp9", "bf": 0},
    "vp8.webm": {"codec": "libvpx", "bf": 0},
    "all_intra.mp4": {"g": 1, "bf": 0},
    "faststart.mp4": {"movflags": "faststart"},
}

EXACT, EDITS, TURNS, AVI = "exact", "an edit list cuts frames off", "turns frames", "neither mp4 nor Matroska"
OPEN, HEVC_CODEC, NO_AV1 = "groups of pictures are open", "codec is HEVC", "cannot read AV1"
REFRESH, FAILS = "gradual refresh", "it fails at frame"

# file: (PyAV, torchcodec 0.13, decord 0.6)
TABLE: dict[str, tuple[str, str, str]] = {
    "b_frames.mp4": (EXACT, EXACT, EXACT),
    "open_gop.mp4": (EXACT, EXACT, OPEN),
    "short_open_groups.mp4": (EXACT, FAILS, OPEN),
    "every_second_a_key.mp4": (EXACT, EXACT, EXACT),
    "all_intra.mp4": (EXACT, EXACT, EXACT),
    "faststart.mp4": (EXACT, EXACT, EXACT),
    "varying_rate.mp4": (EXACT, EXACT, EXACT),
    "start_offset.mp4": (EXACT, EXACT, EXACT),
    "tiny.mp4": (EXACT, EXACT, EXACT),
    "odd_size.mp4": (EXACT, "close", "close"),
    "fragmented.mp4": (EXACT, EXACT, EXACT),
    "hevc_closed_gop.mp4": (EXACT, EXACT, HEVC_CODEC),
    "hevc_open_gop.mp4": (EXACT, EXACT, HEVC_CODEC),
    "hevc_gray12.mp4": (EXACT, "close", HEVC_CODEC),
    "h264_10bit.mp4": (EXACT, "close", "close"),
    "mpeg4.mp4": (EXACT, "close", "close"),
    "mpeg4_b_frames.mp4": (EXACT, EXACT, OPEN),
    "mpeg4_b_frames.avi": (EXACT, AVI, AVI),
    "mjpeg.mp4": (EXACT, EXACT, EXACT),
    "vp9.webm": (EXACT, EXACT, EXACT),
    "vp8.webm": (EXACT, EXACT, EXACT),
    "av1.mp4": (EXACT, EXACT, NO_AV1),
    "intra_refresh.mp4": (EXACT, REFRESH, REFRESH),
    "transport_stream.ts": (EXACT, AVI, AVI),
    "rotated.mp4": (EXACT, TURNS, TURNS),
    "edit_list_cut.mp4": (EXACT, EDITS, EDITS),
}
BACKENDS = ("pyav", "torchcodec", "decord")


def rotated(folder: Path) -> Path:
    """Write a file whose track header turns the picture by 90 degrees."""
    path = encode(folder / "rotated.mp4")
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    turn = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
    data[matrix : matrix + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in turn)
    path.write_bytes(data)
    return path


def cut_by_edit_list(folder: Path) -> Path:
    """Copy a file's packets but start showing it five frames after its first key frame."""
    path = folder / "edit_list_cut.mp4"
    with (
        av.open(str(encode(folder / "uncut.mp4"))) as whole,
        av.open(str(path), "w", options={"use_editlist": "1", "avoid_negative_ts": "disabled"}) as cut,
    ):
        source = whole.streams.video[0]
        stream = cut.add_stream_from_template(source)
        for packet in whole.demux(source):
            if packet.size and packet.pts is not None and packet.dts is not None:
                shift = 5 * (packet.duration or 0)
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, stream
                cut.mux(packet)
    return path


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the path of a file of the table, encoding it when it is first asked for."""
    folder = tmp_path_factory.mktemp("table")
    found: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in found:
            made = {"rotated.mp4": rotated, "edit_list_cut.mp4": cut_by_edit_list}
            found[name] = made[name](folder) if name in made else encode(folder / name, **MORE[name])
        return found[name]

    return path_of


def skip_unless_loaded(backend: str, path: Path) -> None:
    try:
        open_video(path, backend=backend)
    except InputError as error:
        if "does not load" in str(error):
            assert "pip install" in str(error)
            pytest.skip(f"{backend} does not load here: {error}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TABLE)
def test_a_backend_gives_exact_frames_or_is_refused(file_of: Callable[[str], Path], name: str, backend: str) -> None:
    expected = TABLE[name][BACKENDS.index(backend)]
    skip_unless_loaded(backend, file_of("b_frames.mp4"))
    path = file_of(name)
    if expected not in (EXACT, "close"):
        for _ in range(2):  # the second time from the note
            with pytest.raises(InputError, match=rf"(does not give exact frames of .*: )?.*{expected}.*; use backend="):
                open_video(path, backend=backend)
        return
    truth = decode_all(path)
    reader = open_video(path, backend=backend)
    times = reader.index.pts.tolist()
    assert times == sorted(truth)
    last = len(times) - 1
    for asked in ([last, 0, last // 2], range(0, last, 4), range(last // 3, last // 3 + 9), [7, 7, 3], [last]):
        frames = reader.read(np.array(asked))
        whole = np.stack([truth[times[number]] for number in asked])
        if expected == EXACT:
            assert np.array_equal(frames, whole), (name, list(asked))
        else:
            assert np.abs(frames.astype(int) - whole).mean() < 3
    reader.close()


def test_a_verdict_is_remembered_and_holds_for_that_file_only(
    file_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_loaded("decord", file_of("b_frames.mp4"))
    path = tmp_path / "clip.mp4"
    path.write_bytes(file_of("b_frames.mp4").read_bytes())
    open_video(path, backend="decord")
    monkeypatch.setattr(foreign_comparison, "_difference", lambda *_: "it was compared again")
    open_video(path, backend="decord")  # from the note
    path.write_bytes(file_of("all_intra.mp4").read_bytes())
    with pytest.raises(InputError, match="it was compared again"):
        open_video(path, backend="decord")


def test_a_backend_that_gives_another_frame_is_refused_by_comparison(file_of: Callable[[str], Path]) -> None:
    path = file_of("b_frames.mp4")
    reader = open_video(path)
    with pytest.raises(InputError, match=r"shifted does not give exact frames of .*: its frame \d+ differs"):
        foreign_comparison.compare_frames(
            "shifted 1",
            path,
            reader.index,
            probe(path, reader.index),
            lambda frames: reader.read(np.minimum(frames + 1, 59)),
        )


def test_decord_is_refused_av1_but_decord2_is_not() -> None:
    found = Probe("mov", "av1", "yuv420p", 0, False, 0, False, False)
    with pytest.raises(InputError, match=r'^decord cannot read AV1 \(a\.mp4\); use backend="pyav", or decord2$'):
        refuse("decord", Path("a.mp4"), found)
    refuse("decord2", Path("a.mp4"), found)


def test_a_gradual_refresh_is_told_from_a_key_frame() -> None:
    def packet(payload: int) -> bytes:
        unit = bytes([6, 6, 1, payload, 0x80])  # supplemental unit, recovery point, one byte
        return len(unit).to_bytes(4, "big") + unit

    assert not is_gradual_refresh(packet(0b1100_0000))  # recovers at once
    assert is_gradual_refresh(packet(0b0001_1010))  # recovers after some frames
    assert not is_gradual_refresh(len(b"\x65abc").to_bytes(4, "big") + b"\x65abc")
