"""Damaged things that wamlab keeps for itself: features, the tuner's cache, segments of episodes, traces."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import FUZZ, NUM_CASES, Replaced, answer, damaged_bytes, damaged_json
from hypothesis import given
from hypothesis import strategies as st
from random_search import blocks_of  # pyright: ignore[reportMissingImports]
from safetensors.torch import save

from wamlab.codec.feature_files import RecordFolder
from wamlab.errors import InputError
from wamlab.lab.records import plain, read_json
from wamlab.recipes.config import tiny
from wamlab.recipes.tune_models import Models, Place, cache_path, models_of, read_models, write_models
from wamlab.rl.jobs import Job
from wamlab.rl.records import Records, forget_before
from wamlab.rl.segments import Segment, Setting, segment_to_tensors
from wamlab.rl.store import FolderTier, TieredStore
from wamlab.speed.trace_split import split_of_trace

ABOUT = {"encoder": "a", "transform": "b"}
EVENTS: dict[str, Any] = {
    "traceEvents": [
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1.0, "dur": 3.0, "tid": 1, "pid": 1},
        {"ph": "X", "name": "gloo:all_gather", "cat": "cpu_op", "ts": 2.0, "dur": 4.0, "tid": 2, "pid": 1},
        {"ph": "X", "name": "ncclKernel", "cat": "kernel", "ts": 2.0, "dur": 4.0, "tid": 7, "pid": 0},
        {"ph": "X", "name": "Memcpy HtoD", "cat": "gpu_memcpy", "ts": 2.0, "dur": 4.0, "tid": 7, "pid": 0},
    ]
}


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root of a store with three records in one shard."""
    root = tmp_path_factory.mktemp("features")
    folder = RecordFolder(root, ABOUT)
    for number in range(3):
        folder.add(f"k{number}", {"video": torch.full((2, 3), float(number)), "text": torch.ones(5) * number})
    folder.flush()
    return root


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_features_are_refused_or_right(features: Path, data: st.DataObject) -> None:
    entry = next(path for path in features.glob("*/*.json") if path.name != "about.json")
    if data.draw(st.booleans()):
        damage = Replaced(entry, data.draw(damaged_json(read_json(entry))))
    else:
        shard = entry.with_suffix(".bin")
        damage = Replaced(shard, data.draw(damaged_bytes(shard.read_bytes())))
    with damage:
        folder = answer(lambda: RecordFolder(features, ABOUT))
        for number in range(3):
            if isinstance(folder, InputError) or f"k{number}" not in folder:
                continue
            record = answer(lambda number=number: folder.read(f"k{number}"))
            assert isinstance(record, InputError) or all(isinstance(value, torch.Tensor) for value in record.values())
        if not isinstance(folder, InputError):
            answer(folder.verify)


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_a_damaged_cache_of_the_tuner_is_refused_or_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "tuned.json"
    memories, times = blocks_of(3, (1, 2))
    kept = Models(tuple(memories.values()), tuple(times.values()), 0.01, ("keep", "full"))
    write_models(path, tiny(), Place.of(tiny(), "cpu"), kept)
    with Replaced(path, data.draw(damaged_json(read_json(path)))):
        found = answer(lambda: read_models(path))
        assert isinstance(found, InputError) or found == kept


@pytest.mark.skipif(not NUM_CASES, reason="traces a network for a minute: set WAMLAB_FUZZ=1000")
def test_a_damaged_cache_is_said_once_and_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = tiny()
    model = replace(small.model, layers=2, dim=32, heads=2, ffn_dim=64, mlp_dim=32, max_blocks=1)
    window = replace(small.window, max_blocks=1)
    small = replace(small, model=model, window=window, train=replace(small.train, batch_size=1))
    place = Place.of(small, "8xH100")
    path = cache_path(small, place)
    path.parent.mkdir(parents=True)
    path.write_text('{"memories": []}')
    with pytest.warns(UserWarning, match="a cache of the tuner, is damaged; it is made anew"):
        made = models_of(small, place, is_cached=True)
    assert made == read_models(path) == models_of(small, place, is_cached=True)


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_segments_are_refused_or_played_on(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "segments"
    segment = Segment(
        iteration=3, group=1, member=2, num_segments=1, num_chunks=2, num_ticks=16, policy_version=5, sampler="sde",
        is_done=False, is_success=False, snapshot={"state": [0.1, 1.0], "seed": 2**70}, memory={"w": np.ones(2)},
        chunks={"actions": np.ones((2, 8, 4)), "num_ticks": np.full(2, 8)},
    )  # fmt: skip
    store = TieredStore([FolderTier(folder, float("inf"))])
    tensors = segment_to_tensors(segment)
    kind = data.draw(st.sampled_from(("record", "bytes", "tensors", "name")))
    name, whole = segment.name, save(tensors)
    if kind == "record":
        record = data.draw(
            damaged_json({key: plain(value) for key, value in vars(segment).items() if key[0] not in "mc"})
        )
        whole = save(tensors | {"record": torch.frombuffer(bytearray(record or b" "), dtype=torch.uint8)})
    elif kind == "tensors":
        odd = data.draw(
            st.sampled_from(("record", "memory.w", "chunks.actions", "chunks.num_ticks", "other", "chunks."))
        )
        value = data.draw(
            st.sampled_from(
                (torch.zeros(0), torch.ones(3, dtype=torch.bfloat16), torch.tensor(1.0), torch.ones(5, 8, 4))
            )
        )
        whole = save(tensors | {odd: value})
    elif kind == "bytes":
        whole = data.draw(damaged_bytes(whole))
    else:
        name = data.draw(
            st.sampled_from(("a-b-c-d", "3-1-2-", "3-1-2-7", "3-1-2-" + "9" * 30, "3--1-2-2", "².-1-1-1", "3"))
        )
    with Replaced(folder / f"{name}.safetensors", whole):
        records = Records(store, Setting(iteration=3, policy_version=5, sampler="sde"))
        job = Job(group=1, member=2, cap=9)
        notes = answer(lambda: records.resume([job]))
        assert isinstance(notes, InputError) or job.num_chunks in (0, 2)
        if job.num_chunks:
            whole_again = answer(lambda: records.whole(job.key))
            assert isinstance(whole_again, InputError) or len(whole_again.chunks["num_ticks"]) == 2
    answer(lambda: forget_before(store, 1))


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_traces_are_refused_or_split(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.json"
    path.write_bytes(data.draw(damaged_json(EVENTS)))
    found = answer(lambda: split_of_trace(path))
    assert isinstance(found, InputError) or all(value >= 0 for value in found.values())
