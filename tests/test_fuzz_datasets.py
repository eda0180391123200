"""Damaged LeRobot datasets of every version: rows and frames as the episode list says, or one sentence."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import FUZZ, Replaced, answer, damaged, damaged_bytes, damaged_json, damaged_lines
from hypothesis import given
from hypothesis import strategies as st
from recordings import single_camera_episode

from wamlab.data.check import check_dataset
from wamlab.data.describe import describe_dataset
from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.write import write_dataset
from wamlab.errors import InputError

CAMERA = "observation.images.top"
VERSIONS = ("v2.0", "v2.1", "v3.0")
JSON_FILES = ("meta/info.json", "meta/stats.json", "meta/modality.json", "meta/embodiment.json")
LINE_FILES = ("meta/episodes.jsonl", "meta/tasks.jsonl", "meta/episodes_stats.jsonl")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a dataset of each version: two episodes of 8 and 6 rows, one camera."""
    root = tmp_path_factory.mktemp("datasets")
    found = {}
    for version in VERSIONS:
        episodes = [single_camera_episode(0, 8), single_camera_episode(40, 6)]
        written = "v2.1" if version == "v2.0" else version
        found[version] = write_dataset(episodes, root / version, version=written)
        (found[version] / "meta/embodiment.json").write_text('{"embodiment_tag": "arm"}')
    old = found["v2.0"]
    info = json.loads((old / "meta/info.json").read_text()) | {"codebase_version": "v2.0"}
    (old / "meta/info.json").write_text(json.dumps(info))
    (old / "meta/episodes_stats.jsonl").unlink()
    shutil.copy(found["v2.1"] / "meta/modality.json", found["v3.0"] / "meta/modality.json")
    return found


def use(root: Path) -> None:
    """Ask a dataset for all it has; what it answers has the shape that it says itself."""
    opened = answer(lambda: open_dataset(root))
    if isinstance(opened, InputError):
        return
    answer(lambda: describe_dataset(opened))
    answer(lambda: [*check_dataset(opened)])
    answer(opened.fingerprint)
    for episode in range(min(2, opened.num_episodes)):
        look_at(opened, episode)
    for column in ("observation.state", "action", "state.state", "nothing"):
        stats = answer(lambda column=column: opened.stats(column))
        assert isinstance(stats, InputError) or {"mean", "q99"} <= stats.keys()


def look_at(opened: RobotDataset, episode: int) -> None:
    """Ask for an episode's rows, words and frames."""
    length = int(opened.lengths[episode])
    for column in [*opened.features][:8]:
        rows = answer(lambda column=column: opened.rows(episode, column))
        assert isinstance(rows, InputError) or len(rows) == length
    words = answer(lambda: opened.labels(episode))
    assert isinstance(words, InputError) or (len(words) == length and all(isinstance(w, str) for w in words))
    for call in (opened.tasks_of, opened.extras_of, opened.table_path, opened.sole_instruction, opened.table):
        answer(lambda call=call: call(episode))
    for camera in opened.cameras[:2]:
        frames = answer(lambda camera=camera: opened.frames(episode, camera, np.array([0, length - 1])))
        assert isinstance(frames, InputError) or (frames.dtype == np.uint8 and frames.shape[0] == 2)
        span = answer(lambda camera=camera: opened.video_span(episode, camera))
        assert isinstance(span, InputError) or span.path.resolve().is_relative_to(opened.root.resolve())


def test_whole_datasets_answer_everything(datasets: dict[str, Path]) -> None:
    for version, root in datasets.items():
        opened = open_dataset(root)
        assert opened.version == version and opened.lengths.tolist() == [8, 6]
        use(root)
        assert opened.frames(1, CAMERA, np.array([0])).shape[0] == 1


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_metadata_is_refused_or_right(datasets: dict[str, Path], data: st.DataObject) -> None:
    root = datasets[data.draw(st.sampled_from(VERSIONS))]
    name = data.draw(st.sampled_from([n for n in (*JSON_FILES, JSON_FILES[0], *LINE_FILES) if (root / n).exists()]))
    text = (root / name).read_text()
    if name.endswith("l"):
        damage = damaged_lines([json.loads(line) for line in text.splitlines()])
    else:
        damage = damaged_json(json.loads(text))
    with Replaced(root / name, data.draw(damage)):
        use(root)


def table_bytes(rows: list[Any]) -> bytes:
    """Return rows as a parquet file; nothing where no file can hold them."""
    try:
        stream = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), stream)
        return stream.getvalue()
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError, KeyError):
        return b""


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_tables_are_refused_or_right(datasets: dict[str, Path], data: st.DataObject) -> None:
    root = datasets[data.draw(st.sampled_from(VERSIONS))]
    path = data.draw(st.sampled_from(sorted(root.rglob("*.parquet"))))
    if data.draw(st.booleans()):
        damage = data.draw(damaged_bytes(path.read_bytes()))
    else:
        damage = table_bytes(data.draw(damaged(pq.read_table(path).to_pylist())))
    with Replaced(path, damage):
        use(root)
