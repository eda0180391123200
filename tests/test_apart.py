"""The loader in a process of its own: the same clips, nothing left behind, a death that is noticed."""

import gc
import itertools
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from test_loader import PLAIN, WINDOW, Numbered, assert_same, recorded

from wamlab.data.apart import load_clips_apart, measure_slowdown
from wamlab.data.clips import ClipReader
from wamlab.data.lerobot import open_dataset
from wamlab.data.loader import load_clips
from wamlab.data.write import write_dataset
from wamlab.errors import InputError

OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "pool": 2}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ClipReader:
    root = tmp_path_factory.mktemp("apart") / "robot"
    return ClipReader(open_dataset(write_dataset(map(recorded, (30, 25)), root)), PLAIN, WINDOW, is_training=True)


pytestmark = pytest.mark.timeout(150)


def mapped() -> set[Path]:
    return set(Path("/dev/shm").glob("wamlab-clips-*"))


def test_a_helper_process_gives_the_same_clips(reader):
    before = mapped()
    apart = load_clips_apart(reader, **OPTIONS)
    own = load_clips(reader, num_threads=0, **OPTIONS)
    wanted = list(itertools.chain(*islice(own, 2)))
    held = list(islice(apart, 2))
    for ours, theirs in zip(itertools.chain(*islice(apart, 12)), itertools.chain(*islice(own, 12)), strict=True):
        assert_same(ours, theirs)
    for ours, theirs in zip(itertools.chain(*held), wanted, strict=True):
        assert_same(ours, theirs)  # twelve batches later: what is looked at is not written over
    assert apart.state_dict()["next_batch"] == 14
    report = apart.report()
    assert [stage.name for stage in report.stages] == ["decode", "clip", "batch"]
    assert report.num_batches == 14
    apart.close()
    del held
    gc.collect()
    assert mapped() <= before
    assert not apart._helper.is_alive()


def test_a_helper_that_dies_is_noticed(reader):
    before = mapped()
    apart = load_clips_apart(reader, **OPTIONS)
    next(apart)
    assert apart._helper.pid is not None
    os.kill(apart._helper.pid, signal.SIGKILL)
    with pytest.raises(InputError, match=r"the process that reads clips ended \(exit code -9\)"):
        list(islice(apart, 20))
    assert mapped() <= before


def test_wrong_options_are_refused_before_a_process_starts(reader):
    with pytest.raises(InputError, match="batch_size is 0"):
        load_clips_apart(reader, batch_size=0, seed=0)


def test_how_much_a_loader_slows_the_interpreter_is_measured():
    stream, slowdown = measure_slowdown(lambda: load_clips(Numbered(10_000), batch_size=2, seed=0), seconds=0.1)
    assert 0.2 < slowdown < 20
    wanted = load_clips(Numbered(10_000), batch_size=2, seed=0, num_threads=0)
    for ours, theirs in zip(next(stream), next(wanted), strict=True):
        assert_same(ours, theirs)  # nothing was taken from it
    stream.close()
