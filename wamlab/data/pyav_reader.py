"""Exact random access by PyAV: decode once per batch, convert only what was asked for, straight into the batch.

A batch costs least when its frames are decoded in rising order, entering each group of pictures once. Three
savings change no pixel: frames that no other refers to are skipped unless asked for; the decoder is drained
where a seek follows anyway, instead of fed until its delay is over; decoding goes on where it stands if the
next batch begins ahead in the same group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
from av.error import FFmpegError
from jaxtyping import Int, UInt8

from wamlab.data.decode import checked_buffer, checked_frames
from wamlab.data.frame_index import FrameIndex, open_container
from wamlab.data.rgb import RgbConverter
from wamlab.errors import InputError

# HEVC's like-named frames may serve higher temporal layers; other decoders have no such frames or ignore it.
SKIPPABLE_CODECS = {"h264"}
# Containers with a time stamp for every packet; others have them counted from where reading started.
SEEKABLE_CONTAINERS = {"mov", "matroska"}
PROGRESSIVE = 1  # AV_FIELD_PROGRESSIVE
PICTURES_HELD = 12  # of 1.5 bytes a pixel by a decoder, with the converter's; measured, see num_bytes
LEAST_BYTES = 2 << 20
# What is patched over depends on the frames decoded before, so it differs after a seek: errors must be raised.
STRICT = {"err_detect": "explode"}


class PyAVReader:
    """Decode asked frames by key frame and time stamp; a frame with another time stamp is never returned.

    One decoding and one converting thread: at robot-camera sizes more threads cost more than they give, and
    the default converter would start a thread pool per reader.
    """

    def __init__(self, path: Path, index: FrameIndex):
        self.path, self.index = path, index
        self._open()
        codec = self._codec
        self._size = codec.height, codec.width
        self._converter = RgbConverter()

    @property
    def num_bytes(self) -> int:
        """Return about how much memory the open reader holds."""
        return LEAST_BYTES + PICTURES_HELD * self._size[0] * self._size[1] * 3 // 2

    def close(self) -> None:
        self._decoded = None
        self._container.close()
        self._converter.close()

    def read(
        self, frames: Int[np.ndarray, " n"], out: UInt8[np.ndarray, "n h w 3"] | None = None
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Return the frames with these numbers, in their order, repeats allowed; in ``out`` where it is given.

        Raises InputError where the file is damaged, ends early or changes its frame size.
        """
        frames = checked_frames(frames, self.path, len(self.index))
        pixels = checked_buffer(out, (len(frames), *self._size, 3), self.path)
        if len(frames) == 0:
            return pixels
        is_rising = bool((frames[1:] > frames[:-1]).all())
        order = None if is_rising else np.argsort(frames, kind="stable")
        numbers = frames if order is None else frames[order]
        pts = self.index.pts[numbers]
        groups = np.searchsorted(self.index.key_pts, pts, side="right") - 1
        self._asked, self._last_asked = set(pts.tolist()), int(pts[-1])
        wanted = list(zip(numbers.tolist(), pts.tolist(), groups.tolist(), strict=True))
        wanted.append((-1, 0, wanted[-1][2]))  # what is asked for next is unknown: decoding should go on
        previous, previous_row = -1, -1
        for place, (number, time, group) in enumerate(wanted[:-1]):
            row = place if order is None else int(order[place])
            if number == previous:
                pixels[row] = pixels[previous_row]
                continue
            following, _, next_group = wanted[place + 1]
            self._is_draining = self._is_seekable and next_group != group and following != number + 1
            self._convert(self._decode(number, time, group), number, pixels[row])
            previous, previous_row = number, row
        return pixels

    def _convert(self, frame: av.VideoFrame, number: int, pixels: np.ndarray) -> None:
        """Write a frame's RGB pixels into an array [h w 3]."""
        height, width = self._size
        if (frame.height, frame.width) != self._size:
            raise InputError(
                f"frame {number} of {self.path} is {frame.width}x{frame.height} while the file says "
                f"{width}x{height}; re-encode it at one size"
            )
        self._converter.write(frame, pixels)

    def _open(self) -> None:
        self._container = open_container(self.path)
        self._is_seekable = self._container.format.name.split(",")[0] in SEEKABLE_CONTAINERS
        self._stream = self._container.streams.video[0]
        self._codec = self._stream.codec_context
        self._codec.thread_count = 1
        self._codec.options = STRICT
        # Of interlaced video the unasked packet could be the other half of an asked frame.
        self._can_skip = self._codec.codec.canonical_name in SKIPPABLE_CODECS and self._codec.field_order == PROGRESSIVE
        self._is_skipping = False
        self._decoded: Iterator[av.VideoFrame] | None = None  # where decoding stands
        self._last = -1  # number of the frame it gave last

    def _decode(self, number: int, pts: int, group: int) -> av.VideoFrame:
        frame, complaint = None, None
        if self._is_ahead(number, group):
            frame, complaint = self._advance_to(pts)
        is_damage = group >= 0 and self._is_seekable  # unless an attempt ends otherwise than by an error
        for seek_to in () if frame else self._seek_points(group):
            if seek_to is None and is_damage:
                break  # decoding all from the start would meet the same error, at length
            self._seek(seek_to, pts)
            frame, complaint = self._advance_to(pts)
            if frame is not None:
                break
            is_damage = is_damage and complaint is not None
        if frame is None and complaint is not None:
            raise InputError(
                f"frame {number} of {self.path} cannot be decoded, the file is damaged: {complaint.strerror}"
            ) from complaint
        if frame is None:
            raise InputError(
                f"frame {number} of {self.path} cannot be decoded: the file announces {len(self.index)} "
                "frames but is damaged or ends before this one"
            )
        self._last = number
        return frame

    def _is_ahead(self, number: int, group: int) -> bool:
        """Say whether decoding on reaches the frame without passing a key frame that a seek could use."""
        if self._decoded is None or self._last >= number:
            return False
        if not self._is_seekable:
            return True
        is_same_group = group < 0 or bool(self.index.pts[self._last] >= self.index.key_pts[group])
        return is_same_group or number == self._last + 1

    def _seek_points(self, group: int) -> Iterator[int | None]:
        """Yield time stamps to seek to, cheapest first; None is the start of the file.

        Seeking by pts lands best, but behind the key frame in files with open groups, edits or short groups;
        by dts it lands on it or one group early; streams without an index may need to start much earlier.
        """
        if not self._is_seekable:
            group = -1
        if group >= 0:
            yield int(self.index.key_pts[group])
        for earlier in range(group, max(group - 3, -1), -1):
            yield int(self.index.key_dts[earlier])
        yield None

    def _seek(self, seek_to: int | None, pts: int) -> None:
        if seek_to is None:
            self._container.close()
            self._open()
            self._can_skip = False  # the last resort is decoding as everyone does
        self._decoded = self._decode_from_here(seek_to, pts)

    def _decode_from_here(self, seek_to: int | None, pts: int) -> Iterator[av.VideoFrame]:
        """Decode packet after packet, but nothing if the first is no key frame shown at or before ``pts``."""
        if seek_to is not None:
            self._container.seek(seek_to, stream=self._stream)
        self._landing = None  # time stamp of the key frame that decoding has started from
        is_landing, fed = True, set()
        for packet in self._container.demux(self._stream):
            time = packet.pts
            if is_landing and packet.size:
                if seek_to is not None and (not packet.is_keyframe or time is None or time > pts):
                    return  # frames decoded from here could lack what they refer to
                is_landing, self._landing = False, None if packet.is_discard else time
            is_asked = time in self._asked
            if self._can_skip:
                # Beyond the last frame asked for now may be the first of the next batch: it is decoded.
                self._skip(is_skipping=not is_asked and time is not None and time < self._last_asked)
            try:
                yield from packet.decode()
            except FFmpegError:
                # What leads the key frame that was sought lacks what it refers to, and nothing refers to it.
                if seek_to is None or self._landing is None or time is None or time >= self._landing:
                    raise
            if is_asked:
                fed.add(time)
            if self._is_draining and self._target in fed:  # both may have changed meanwhile
                yield from self._codec.decode(None)
                return

    def _skip(self, *, is_skipping: bool) -> None:
        if is_skipping != self._is_skipping:
            self._codec.skip_frame = "NONREF" if is_skipping else "DEFAULT"
            self._is_skipping = is_skipping

    def _advance_to(self, pts: int) -> tuple[av.VideoFrame | None, FFmpegError | None]:
        """Decode on until the frame shown at ``pts``; None when it was passed, is unsound or never comes."""
        self._target, complaint = pts, None
        try:
            for frame in self._decoded or ():
                if frame.pts == self._landing:
                    if not frame.key_frame:  # the container is wrong: it refers to what was not decoded
                        break
                    self._landing = None
                if self._landing is None and frame.is_corrupt:  # so may be what refers to it
                    break
                if self._landing is None and frame.pts == pts:
                    return frame, None
                if frame.pts is None or frame.pts >= pts:
                    break
        except FFmpegError as error:
            complaint = error
        self._decoded = None  # past it: only a seek can find it
        return None, complaint
