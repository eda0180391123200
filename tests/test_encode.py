"""Encoding leaves the process as it was."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from wamlab.data.encode import ENCODERS, VideoConfig, VideoWriter


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="scheduling policies are asked for on Linux only")
@pytest.mark.parametrize("codec", ENCODERS)
def test_no_thread_of_the_process_is_real_time_after_an_encoder_was_opened(tmp_path: Path, codec: str) -> None:
    policy = os.sched_getscheduler(0)
    writer = VideoWriter(tmp_path / "a.mp4", 10.0, 64, 96, VideoConfig(codec))
    writer.append(np.zeros((3, 64, 96, 3), np.uint8))
    found: list[int] = []
    child = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    child.start()
    child.join()
    found += [os.sched_getscheduler(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]
    writer.close()
    assert set(found) == {policy}
