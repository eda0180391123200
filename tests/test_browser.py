"""Every widget in a real JupyterLab and a real browser: drawn, moved, pressed, heard by Python, and left as a picture.

Screenshots go to the folder that WAMLAB_SCREENSHOTS names. The slower half runs where WAMLAB_BROWSER_ALL is set.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from jupyter_browser import CHROMIUM, DRIVER, INSTALL, Lab, running_lab, wait_until

pytest.importorskip("selenium", reason=INSTALL)
if not (CHROMIUM and DRIVER):
    pytest.skip(INSTALL, allow_module_level=True)

needs_time = pytest.mark.skipif("WAMLAB_BROWSER_ALL" not in os.environ, reason="WAMLAB_BROWSER_ALL=1 runs all of it")
NUM_STEPS = 200
LIVE = "document.querySelector('.wl-live')"

WRITER = """
import random, sys, time
from wamlab.lab.run import create_run
rng = random.Random(0)
with create_run(sys.argv[1], "live", {"train": {"num_steps": NUM_STEPS}}) as run:
    for step in range(1, NUM_STEPS + 1):
        action = 0.3 / step**0.5 * (1 + 0.1 * rng.random())
        split_s = {"data": 0.002, "encode": 0.004, "forward": 0.012, "backward": 0.024, "optimizer": 0.003}
        run.log({"step": step, "loss": 2 * action, "video_loss": action, "action_loss": action,
                 "samples_per_s": 150 + rng.random(), "step_s": 0.05 + 0.05 * rng.random() ** 4, "split_s": split_s,
                 "mfu": 0.31 * rng.random(), "memory_gib": 1.0, "gradient_norm": 1 + rng.random()})
        if step % 50 == 0:
            run.log_evaluation({"step": step, "held_out_loss": 2.5 * action, "action_error": action})
        time.sleep(0.05)
    run.finish("finished", {"loss": 2 * action})
""".replace("NUM_STEPS", str(NUM_STEPS))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def lab(started: Lab) -> Iterator[Lab]:
    """Return the lab; a test leaves no kernel behind, and no error on the console."""
    yield started
    errors = started.errors()
    started.end_kernels()
    assert not errors


def test_a_run_of_another_process_is_drawn_live_and_leaves_a_still_picture(lab: Lab) -> None:
    cells = [
        "from wamlab.lab.run import find_run\nfrom wamlab.lab.watch import watch\nwatching = watch(find_run('runs'))",
        "print('usable', 6 * 7)",
        "watching.wait(60)\nprint('records', watching.num_records)",
    ]
    lab.open("watch.ipynb", cells)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(lab.folder / "runs")])
    try:
        metrics = wait_until(lambda: next(iter(lab.folder.glob("runs/2*/metrics.jsonl")), None), "the run began")
        lab.run_all()
        drawn = f"Number({LIVE}?.dataset.drawn ?? 0)"
        wait_until(lambda: lab.ask(drawn) > 20, "the chart draws")
        lags_s = []
        for _ in range(8):
            num_written = metrics.read_bytes().count(b"\n")
            start_s = time.monotonic()
            wait_until(lambda n=num_written: lab.ask(drawn) >= n, f"record {num_written} is drawn", 5)
            lags_s.append(time.monotonic() - start_s)
            time.sleep(0.13)
        assert sorted(lags_s)[len(lags_s) // 2] < 1.5
        print(f"lag from file to picture: median {sorted(lags_s)[4]:.3f} s, longest {max(lags_s):.3f} s")
        assert lab.ask(f"{LIVE}.dataset.state") == "running"
        assert lab.ask(f"{LIVE}.querySelectorAll('canvas').length") == 7
        assert "usable 42" in lab.text()
        lab.picture("watch_running")
        lab.ask(f"{LIVE}.querySelector('.wl-tools .wl-toggle').click()")
        wait_until(lambda: lab.ask(f"{LIVE}.querySelector('.wl-tools .wl-toggle').ariaPressed") == "false", "linear")

        picture = lab.find(".jp-RenderedSVG img", 40)
        assert lab.ask(f"{LIVE} === null")
        assert picture.get_attribute("src").startswith("data:image/svg+xml")
        lab.wait_for_text(f"records {NUM_STEPS}")
        lab.picture("watch_finished")
    finally:
        writer.wait(30)
    assert writer.returncode == 0
    saved = lab.save("watch.ipynb", "image/svg+xml")
    (output,) = saved["cells"][0]["outputs"]
    assert set(output["data"]) == {"image/svg+xml", "text/plain"}
    assert "widgets" not in saved["metadata"]
    assert len(json.dumps(saved)) < 150_000
