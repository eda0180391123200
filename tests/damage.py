"""Video files damaged by fixed seeds, and what a reader makes of them; run as a script, where a hang can be ended.

A frame that a reader returns must equal the frame that a sequential decode of the same damaged file shows at the
time stamp the file's index gives that frame. Where that decode shows nothing at that time, being thrown off by
damage to earlier frames, it must equal the undamaged file's frame. Else it must be refused by an InputError.
"""

import json
import sys
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import av
import numpy as np
from av import logging
from av.error import FFmpegError

from wamlab.data.decode import open_video
from wamlab.errors import InputError

KINDS = ("bits", "zeros", "cut", "head", "splice")


def damaged(whole: bytes, seed: int, kind: str) -> bytes:
    """Return a file's bytes after one kind of damage, the same for the same seed."""
    rng = np.random.default_rng(seed)
    data = np.frombuffer(whole, np.uint8).copy()
    size = len(data)
    length = int(rng.integers(1, max(2, size // 8)))
    start = int(rng.integers(0, size - length))
    if kind == "bits":
        places = rng.integers(0, size, int(2 ** rng.uniform(0, 8)))
        data[places] ^= (1 << rng.integers(0, 8, len(places))).astype(np.uint8)
    elif kind == "zeros":
        data[start : start + length] = 0
    elif kind == "cut":
        data = data[: int(rng.integers(0, size))]
    elif kind == "head":
        length = min(int(2 ** rng.uniform(2, 10)), size)
        data[:length] = rng.integers(0, 256, length, dtype=np.uint8)
    elif kind == "splice":
        other = int(rng.integers(0, size - length))
        piece = data[other : other + length].copy()
        if rng.random() < 0.5:
            data[start : start + length] = piece
        else:
            data = np.concatenate([data[:start], piece, data[start:]])
    return data.tobytes()


def decode_in_order(path: Path, *, is_holding: bool = False) -> dict[int, list[np.ndarray]]:
    """Decode a file from start to end, past what is broken: time stamp -> RGB frames shown then.

    A decoder whose frames are held decodes into fresh memory, else into that of earlier frames.
    """
    frames: dict[int, list[np.ndarray]] = defaultdict(list)
    held = []
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for packet in container.demux(stream):
                try:
                    for frame in packet.decode():
                        held += [frame] * is_holding
                        if frame.pts is not None:
                            frames[frame.pts].append(frame.to_ndarray(format="rgb24"))
                except (FFmpegError, ValueError):
                    continue
    except (FFmpegError, OSError, ValueError, IndexError):
        pass
    return frames


def examine(path: Path, source: Path, seed: int) -> Counter:
    """Ask for frames of a damaged file in many ways; count the exact, rescued, refused and wrong ones."""
    found = Counter(files=1)
    try:
        reader = open_video(path)
    except InputError as error:
        assert "\n" not in str(error)
        return found + Counter(files_refused=1)
    truth, rng, num_frames = decode_in_order(path), np.random.default_rng(seed), len(reader.index)
    for _ in range(16):
        step, length = int(rng.integers(1, 5)), int(rng.choice([1, 1, 4, 9]))
        asked = np.minimum(rng.integers(0, num_frames) + step * np.arange(length), num_frames - 1)
        try:
            frames = reader.read(asked)
        except InputError as error:
            assert "\n" not in str(error)
            found["refused"] += len(asked)
            continue
        for pts, frame in zip(reader.index.pts[asked].tolist(), frames, strict=True):
            verdict = "exact" if pts in truth else "rescued"
            shown = truth.get(pts) or decode_in_order(source).get(pts, [])
            if not shown or not all(np.array_equal(frame, each) for each in shown):
                # FFmpeg 8 leaves HEVC blocks that a damaged slice does not reach as memory held them, and is content.
                again = decode_in_order(path, is_holding=True).get(pts, []) if "hevc" in source.name else shown
                verdict = "wrong" if np.array_equal(shown, again) else "undetermined"
            found[verdict] += 1
    reader.close()
    found["files_read"] += found["exact"] > 0
    return found


def main(folder: str, start: str, stop: str) -> None:
    """Damage and examine the sources in a folder, one line of JSON a case; the case is named before it is tried."""
    logging.set_level(None)
    warnings.simplefilter("error")
    sources = sorted(Path(folder).glob("source_*"))
    for seed in range(int(start), int(stop)):
        source, kind = sources[seed % len(sources)], KINDS[seed // len(sources) % len(KINDS)]
        path = Path(folder) / f"damaged_{seed}{source.suffix}"
        path.write_bytes(damaged(source.read_bytes(), seed, kind))
        print(json.dumps({"seed": seed, "source": source.name, "kind": kind}), flush=True)
        print(json.dumps(dict(examine(path, source, seed))), flush=True)
        path.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
