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
from jupyter_browser import CHROMIUM, DRIVER, INSTALL, KERNEL, Lab, running_lab, wait_until

pytest.importorskip("selenium", reason=INSTALL)
if not (CHROMIUM and DRIVER):
    pytest.skip(INSTALL, allow_module_level=True)
from selenium.webdriver.common.keys import Keys

needs_time = pytest.mark.skipif("WAMLAB_BROWSER_ALL" not in os.environ, reason="WAMLAB_BROWSER_ALL=1 runs all of it")
NUM_STEPS = 2000
LIVE = "document.querySelector('.wl-live')"

# A run that does what its folder is asked for, as the trainer does, without the seconds that torch takes.
WRITER = """
import random, sys, time
from wamlab.errors import Stopped
from wamlab.lab.control import read_wish
from wamlab.lab.run import create_run
rng = random.Random(0)
with create_run(sys.argv[1], "live", {"train": {"num_steps": NUM_STEPS}}) as run:
    for step in range(1, NUM_STEPS + 1):
        action = 0.3 / step**0.5 * (1 + 0.1 * rng.random())
        split_s = {"data": 0.002, "encode": 0.004, "forward": 0.012, "backward": 0.024, "optimizer": 0.003}
        run.log({"step": step, "loss": 2 * action, "video_loss": action, "action_loss": action,
                 "samples_per_s": 150 + rng.random(), "step_s": 0.05 + 0.05 * rng.random() ** 4, "split_s": split_s,
                 "mfu": 0.3 + 0.02 * rng.random(), "memory_gib": 1.0, "gradient_norm": 1 + rng.random()})
        if step % 50 == 0:
            run.log_evaluation({"step": step, "held_out_loss": 2.5 * action, "action_error": action})
        time.sleep(0.05)
        while (wish := read_wish(run.folder)) == "pause":
            run.mark(is_paused=True)
            time.sleep(0.05)
        run.mark(is_paused=False)
        if wish == "stop":
            raise SystemExit(0)
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


def test_a_run_is_drawn_live_paused_and_stopped_by_buttons_and_leaves_a_still_picture(lab: Lab) -> None:
    cells = [
        "from wamlab.lab.run import find_run\nfrom wamlab.lab.watch import watch\nwatching = watch(find_run('runs'))",
        "print('usable', 6 * 7)",
    ]
    lab.open("watch.ipynb", cells)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(lab.folder / "runs")])
    try:
        metrics = wait_until(lambda: next(iter(lab.folder.glob("runs/2*/metrics.jsonl")), None), "the run began")
        lab.run_all()
        drawn = f"Number({LIVE}?.dataset.drawn ?? 0)"
        wait_until(lambda: lab.ask(drawn) > 20, "the chart draws")
        lags_s = []
        for _ in range(6):
            num_written = metrics.read_bytes().count(b"\n")
            start_s = time.monotonic()
            wait_until(lambda n=num_written: lab.ask(drawn) >= n, f"record {num_written} is drawn", 5)
            lags_s.append(time.monotonic() - start_s)
            time.sleep(0.13)
        assert sorted(lags_s)[len(lags_s) // 2] < 1.5
        print(f"lag from file to picture: median {sorted(lags_s)[3]:.3f} s, longest {max(lags_s):.3f} s")
        assert lab.ask(f"{LIVE}.dataset.state") == "running"
        assert lab.ask(f"[...{LIVE}.querySelectorAll('canvas')].filter(canvas => canvas.offsetParent).length") == 7
        assert "usable 42" in lab.text()
        lab.picture("watch_running")
        lab.ask(f"{LIVE}.querySelector('.wl-tools .wl-toggle').click()")
        wait_until(lambda: lab.ask(f"{LIVE}.querySelector('.wl-tools .wl-toggle').ariaPressed") == "false", "linear")

        stage = lab.find(".wl-stage")
        before = stage.get_attribute("aria-label")
        stage.send_keys(Keys.HOME)
        assert "loss at step 1: total" in stage.get_attribute("aria-label") != before

        lab.find("[data-wish='pause']").click()
        wait_until(lambda: lab.ask(f"{LIVE}.dataset.state") == "paused", "the run is paused")
        num_written = metrics.read_bytes().count(b"\n")
        time.sleep(0.4)
        assert metrics.read_bytes().count(b"\n") == num_written
        lab.find("[data-wish='go on']").click()
        wait_until(lambda: metrics.read_bytes().count(b"\n") > num_written, "the run goes on")
        lab.find("[data-wish='stop']").click()
        picture = lab.find(".jp-RenderedSVG img", 40)
        assert writer.wait(20) == 0
        assert metrics.read_bytes().count(b"\n") < NUM_STEPS
        assert lab.ask(f"{LIVE} === null")
        assert picture.get_attribute("src").startswith("data:image/svg+xml")
        lab.picture("watch_stopped")
    finally:
        writer.kill()
        writer.wait(30)
    saved = lab.save("watch.ipynb", "image/svg+xml")
    (output,) = saved["cells"][0]["outputs"]
    assert set(output["data"]) == {"image/svg+xml", "text/plain"}
    assert "stopped" in output["data"]["text/plain"][0]
    assert "widgets" not in saved["metadata"]
    assert len(json.dumps(saved)) < 150_000


PANELS = [
    """
import numpy as np
from wamlab.lab.clip_viewer import ClipViewer
rng = np.random.default_rng(0)
y, x = np.mgrid[:64, :64]
def film(shift, noise):
    frames = []
    for frame in range(24):
        ball = (x - 10 - 1.8 * frame - shift) ** 2 + (y - 32) ** 2 < 60
        picture = np.where(ball[..., None], (213, 94, 0), (40, 60, 80)) + noise * rng.normal(size=(64, 64, 1))
        frames.append(np.clip(picture, 0, 255))
    return np.array(frames).astype(np.uint8)
ticks = np.linspace(0, 6, 48)[:, None] + np.arange(4)
viewer = ClipViewer({"wrist": film(0, 3), "left": film(8, 3)}, {"wrist": film(1, 12), "left": film(9, 12)},
                    actions=np.sin(ticks), predicted_actions=np.sin(ticks) + 0.1 * rng.normal(size=ticks.shape),
                    action_names=["x", "y", "z", "gripper opening"], fps=10, title="Episode 7")
viewer
""",
    """
from wamlab.lab.tuner_front import TunerFront
choices = []
for full in range(0, 31, 3):
    for micro in (1, 2):
        choices.append({"label": f"{full} of 30 blocks recomputed, micro-batch {micro}", "micro_batch": micro,
                        "num_micro_batches": 8 // micro, "memory_gib": 20 + 1.1 * (30 - full) * micro,
                        "step_s": (0.9 + 0.012 * full) * (1.15 if micro == 1 else 1.0),
                        "runs": [("full", full), ("keep", 30 - full)] if full else [("keep", 30)],
                        "command": f'wamlab train droid_14b --speed.recompute "{full} full, {30 - full} keep"'})
front = TunerFront(choices, limit_gib=70)
front
""",
    """
from wamlab.lab.rollout_panel import RolloutPanel
bars, free = [], [[0.0, 0.0] for _ in range(4)]
for episode, chunks in enumerate(rng.integers(4, 40, 48)):
    worker = int(np.argmin([min(slots) for slots in free]))
    slot = int(np.argmin(free[worker]))
    start = free[worker][slot]
    free[worker][slot] = start + 0.5 * chunks
    bars.append({"worker": worker, "group": episode // 8, "member": episode % 8, "start_s": start,
                 "end_s": start + 0.5 * chunks, "chunks": int(chunks)})
rollouts = RolloutPanel(bars)
rollouts
""",
    """
from wamlab.lab.clip_viewer import encode_frame
from wamlab.lab.dataset_browser import DatasetBrowser
tasks = ["put the red cube into the bowl", "open the drawer", "reach for the <b>blue</b> ball", "fold the towel"]
episodes = [{"episode": i, "task": tasks[i % 4], "seconds": 4 + float(rng.gamma(4)), "frames": 100 + i,
             "is_success": bool(i % 3)} for i in range(60)]
browser = DatasetBrowser(episodes, lambda i: [encode_frame(film(i % 20, 3)[k]) for k in (0, 8, 16)])
browser
""",
    "print('item', viewer.num_frames, front.chosen, rollouts.chosen, browser.chosen)",
]


def test_panels_answer_mouse_and_keys_and_leave_pictures_in_a_small_notebook(lab: Lab) -> None:
    lab.open("panels.ipynb", PANELS)
    lab.run_all()
    clip = "document.querySelector('.wl-clip')"
    wait_until(lambda: lab.ask(f"{clip}?.dataset.ready") == "yes", "the clip is there", 60)
    slider = lab.find(".wl-clip input[type=range]")
    first = lab.ask(f"{clip}.querySelector('img').src")
    slider.send_keys(*[Keys.ARROW_RIGHT] * 5)
    assert lab.ask(f"{clip}.dataset.frame") == "5"
    assert slider.get_attribute("aria-valuetext") == "frame 6 of 24"
    assert lab.ask(f"{clip}.querySelector('img').src") != first
    assert lab.ask(f"[...{clip}.querySelectorAll('img')].every(image => image.naturalWidth === 64)")
    lab.picture("clip_viewer")
    lab.find(".wl-clip-bar button").click()
    wait_until(lambda: int(lab.ask(f"{clip}.dataset.frame")) > 7, "the clip plays")

    def panel(name: str) -> str:
        return f"document.querySelector('[aria-label={json.dumps(name)}]')"

    lab.wait_for_text("item 24")
    for name, words in {
        "Tuner": "blocks recomputed",
        "Rollouts": "chunks in one piece",
        "Dataset": "is_success",
    }.items():
        wait_until(lambda n=name: lab.ask(f"{panel(n)}?.querySelectorAll('[data-item]').length > 10"), name)
        lab.ask(f"{panel(name)}.scrollIntoView()")
        chosen = lab.ask(f"{panel(name)}.querySelectorAll('[data-item]')[9]")
        lab.driver.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", chosen)
        wait_until(lambda n=name: lab.ask(f"{panel(n)}.querySelector('.wl-detail').dataset.of") == "9", "an answer")
        lab.driver.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
        detail = f"{panel(name)}.querySelector('.wl-detail')"
        wait_until(lambda d=detail: lab.ask(f"{d}.dataset.of") == "10", f"{name} follows the keys")
        assert words in lab.ask(f"{detail}.textContent")
        assert not lab.ask(f"{panel(name)}.querySelector('.wl-name b, .wl-row b') !== null")
        lab.picture(name.lower())
    lab.find(".wl-filter:not([hidden])").send_keys("drawer")
    shown = f"{panel('Dataset')}.querySelectorAll('[data-item]:not([hidden])').length"
    wait_until(lambda: lab.ask(shown) == 15, "the filter")

    lab.ask(
        f"({KERNEL}.requestExecute({{code: \"open('chosen', 'w').write(str((front.chosen, browser.chosen)))\"}}), 1)"
    )
    told = lab.folder / "chosen"
    wait_until(lambda: told.exists() and told.read_text() == "(10, 10)", "Python knows what was chosen")
    saved = lab.save("panels.ipynb", "item 24")
    kinds = [set(output["data"]) for cell in saved["cells"][:4] for output in cell["outputs"]]
    assert [k & {"image/png", "image/svg+xml"} != set() for k in kinds] == [True, False] * 4
    assert "widgets" not in saved["metadata"]
    assert len(json.dumps(saved)) < 300_000
    lab.ask("document.querySelector('.jp-Notebook').scrollTo(0, 0)")
    still = "document.querySelector('.jp-RenderedImage img')"
    assert lab.ask(f"{still}.offsetParent === null"), "the still picture is hidden while the panel lives"

    dark = "(window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'}), 1)"
    lab.ask(dark)
    wait_until(lambda: lab.ask("document.body.dataset.jpThemeLight") == "false", "the dark theme")
    for name in ("Episode 7", "Tuner", "Rollouts", "Dataset"):
        lab.ask(f"{panel(name)}.scrollIntoView()")
        lab.picture(f"{name.lower().replace(' ', '_')}_dark")
    lab.ask(dark.replace("Dark", "Light"))

    lab.end_kernels()
    lab.open("panels.ipynb")
    wait_until(lambda: lab.ask(f"{still} !== null && {still}.offsetParent !== null"), "the still picture of the clip")
    lab.picture("panels_without_kernel")
    lab.errors()  # widgets without their kernel are said to be errors, which they are
