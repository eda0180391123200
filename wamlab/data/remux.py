"""Video files joined and cut by copying their packets, so that every frame stays what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from pathlib import Path

import av
from av.container import InputContainer, OutputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.video.stream import VideoStream

from wamlab.data.frame_index import open_container
from wamlab.errors import InputError

MB = 2**20


@dataclass(frozen=True)
class Cut:
    """An episode's stretch of a longer file, and the file it becomes."""

    episode: int  # for messages
    first_pts: int  # of its first and last frame, in the file's time base
    last_pts: int
    num_frames: int
    target: Path


def cut_video(source: Path, cuts: Sequence[Cut]) -> None:
    """Copy stretches of a file into files of their own, whose first frame is shown at 0 s.

    That is exact only where a stretch begins on a key frame and its packets follow one another.
    Raises InputError naming the episode where it is not so, and for stretches that overlap.
    """
    cuts = sorted(cuts, key=lambda cut: cut.first_pts)
    for before, after in pairwise(cuts):
        if after.first_pts <= before.last_pts:
            raise InputError(f"episodes {before.episode} and {after.episode} share frames of {source}: leave one out")
    with open_container(source) as container:
        stream, writer, place = container.streams.video[0], None, -1
        try:
            for packet in _packets(container, source):
                pts = _time(packet, source)
                while place + 1 < len(cuts) and pts >= cuts[place + 1].first_pts:
                    writer, place = _closed(writer, source), place + 1
                    if not packet.is_keyframe or pts != cuts[place].first_pts:
                        raise _inexact(cuts[place], source)
                    writer = _PacketWriter(cuts[place], stream)
                if writer is not None and writer.cut.first_pts <= pts <= writer.cut.last_pts:
                    writer.write(packet)
                elif place >= 0 and pts <= cuts[place].last_pts:  # frames stored in another order than shown
                    raise _inexact(cuts[place], source)
                else:
                    writer = _closed(writer, source)
        finally:
            if writer is not None:
                writer.container.close()
        _closed(writer, source)
    if place + 1 < len(cuts):
        raise _inexact(cuts[place + 1], source)


class _PacketWriter:
    """Write one stretch; its packets must come without a gap."""

    def __init__(self, cut: Cut, stream: VideoStream):
        self.cut, self.num_packets = cut, 0
        self.container, self._stream = _open_copy(cut.target, stream)

    def write(self, packet: Packet) -> None:
        _mux(packet, -self.cut.first_pts, self.container, self._stream)
        self.num_packets += 1


def _closed(writer: _PacketWriter | None, source: Path) -> None:
    if writer is not None:
        writer.container.close()
        if writer.num_packets != writer.cut.num_frames:
            raise _inexact(writer.cut, source)


def _inexact(cut: Cut, source: Path) -> InputError:
    return InputError(
        f"episode {cut.episode} does not begin on a key frame of its own in {source}: it cannot be cut out "
        "exactly without encoding it again"
    )


class JoinedVideos:
    """Append whole files one after another; a file grown too large or of another coding starts the next."""

    def __init__(self, path_of: Callable[[int], Path], file_mb: float):
        self._path_of, self._max_bytes = path_of, file_mb * MB
        self._output: tuple[OutputContainer, VideoStream] | None = None
        self._coding: tuple[object, ...] = ()
        self._num_files, self._num_bytes = 0, 0
        self._end, self._last_dts = 0, None

    def __enter__(self) -> JoinedVideos:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, source: Path, duration_s: float) -> tuple[int, float, float]:
        """Copy a file's packets and return the output's number and where the copy starts and ends in it.

        The copy lasts at least ``duration_s``. Raises InputError for a file that hides frames, lacks time stamps or
        does not begin on a key frame.
        """
        num_bytes = source.stat().st_size if source.exists() else 0
        with open_container(source) as container:
            stream = container.streams.video[0]
            coding = _coding(stream)
            if coding != self._coding or self._num_bytes + num_bytes > self._max_bytes:
                self.close()
            if self._output is None:
                self._output = _open_copy(self._path_of(self._num_files), stream)
                self._coding, self._num_bytes, self._end, self._last_dts = coding, 0, 0, None
                self._num_files += 1
            base = stream.time_base or Fraction(1)
            first, end = True, ceil(Fraction(duration_s).limit_denominator(10**6) / base)
            start = self._end
            for packet in _packets(container, source):
                if packet.is_discard:
                    raise InputError(f"{source} hides frames by an edit list: encode it again first")
                pts = _time(packet, source)
                dts = pts if packet.dts is None else packet.dts
                if first and not packet.is_keyframe:
                    raise InputError(f"{source} does not begin on a key frame: encode it again")
                if first and self._last_dts is not None:
                    start = max(start, self._last_dts + 1 - dts)
                first, end, self._last_dts = False, max(end, pts + (packet.duration or 1)), dts + start
                _mux(packet, start, *self._output)
            if first:
                raise InputError(f"the video {source} holds no frame")
        self._end, self._num_bytes = start + end, self._num_bytes + num_bytes
        return self._num_files - 1, float(start * base), float(self._end * base)

    def close(self) -> None:
        """Finish the file."""
        if self._output is not None:
            self._output[0].close()
            self._output = None


def _coding(stream: VideoStream) -> tuple[object, ...]:
    """Return what the packets of one track must have in common."""
    context = stream.codec_context
    return (context.name, context.width, context.height, context.pix_fmt, context.extradata, stream.time_base)


def _packets(container: InputContainer, source: Path) -> Iterator[Packet]:
    try:
        for packet in container.demux(container.streams.video[0]):
            if packet.size:
                yield packet
    except FFmpegError as error:
        raise InputError(f"{source} is damaged: {error.strerror}") from error


def _time(packet: Packet, source: Path) -> int:
    if packet.pts is None:
        raise InputError(f"{source} has frames without a time stamp; remux it into an mp4 file")
    return packet.pts


def _open_copy(target: Path, template: VideoStream) -> tuple[OutputContainer, VideoStream]:
    target.parent.mkdir(parents=True, exist_ok=True)
    container = av.open(str(target), "w", format="mp4")
    stream = container.add_stream_from_template(template, opaque=True)  # else it asks for an encoder, of AV1 in vain
    assert isinstance(stream, VideoStream)
    stream.time_base = template.time_base
    return container, stream


def _mux(packet: Packet, shift: int, container: OutputContainer, stream: VideoStream) -> None:
    packet.pts = _shifted(packet.pts, shift)
    packet.dts = _shifted(packet.dts, shift)
    packet.stream = stream
    container.mux(packet)


def _shifted(time: int | None, shift: int) -> int | None:
    return None if time is None else time + shift
