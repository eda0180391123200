"""Every widget in a real JupyterLab and a real browser: drawn, moved, pressed, heard by Python, and left as a picture.

Screenshots go to the folder that WAMLAB_SCREENSHOTS names. The slower half runs where WAMLAB_BROWSER_ALL is set.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_notebooks import COMPARISON, IN_THE_KERNEL, NUM_STEPS, PANELS, RUN_PANEL, WRITER
from jupyter_browser import CHROMIUM, DRIVER, INSTALL, KERNEL, Lab, running_lab, wait_until

pytest.importorskip("selenium", reason=INSTALL)
if not (CHROMIUM and DRIVER):
    pytest.skip(INSTALL, allow_module_level=True)
from selenium.webdriver.common.keys import Keys

needs_time = pytest.mark.skipif("WAMLAB_BROWSER_ALL" not in os.environ, reason="WAMLAB_BROWSER_ALL=1 runs all of it")
LIVE = "document.querySelector('.wl-live')"


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
    started.errors()  # that it asks no one before it leaves an unsaved notebook
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

        lab.click("[data-wish='pause']")
        wait_until(lambda: lab.ask(f"{LIVE}.dataset.state") == "paused", "the run is paused")
        num_written = metrics.read_bytes().count(b"\n")
        time.sleep(0.4)
        assert metrics.read_bytes().count(b"\n") == num_written
        lab.click("[data-wish='go on']")
        wait_until(lambda: metrics.read_bytes().count(b"\n") > num_written, "the run goes on")
        lab.click("[data-wish='stop']")
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
    lab.click(".wl-clip-bar button")
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


@needs_time
def test_a_comparison_shows_what_differs_and_any_curve(lab: Lab) -> None:
    lab.open("compare.ipynb", [COMPARISON])
    lab.run_all()
    tab = lab.find(".wl-tabs [data-item='1']", 60)
    lab.picture("comparison")
    tab.click()
    wait_until(lambda: "samples per second" in lab.ask("document.querySelector('.wl-detail').textContent"), "a curve")
    assert "train.learning_rate" in lab.ask("document.querySelector('.wl-index').textContent")
    lab.picture("comparison_speed")


@needs_time
def test_buttons_start_pause_stop_and_resume_real_training(lab: Lab) -> None:
    lab.open("run_panel.ipynb", [RUN_PANEL])
    lab.run_all()

    def press(title: str) -> None:
        button = f"[...document.querySelectorAll('.jp-Notebook button')].find(b => b.textContent === '{title}')"
        wait_until(lambda: lab.ask(f"{button} && !{button}.disabled"), f"the button {title} can be pressed", 120)
        lab.ask(f"{button}.click()")

    def num_steps() -> int:
        return sum(path.read_bytes().count(b"\n") for path in lab.folder.glob("trained/2*/metrics.jsonl"))

    press("Start")
    wait_until(lambda: num_steps() > 20, "it trains", 120)
    wait_until(lambda: lab.ask(f"Number({LIVE}?.dataset.drawn ?? 0)") > 20, "the chart draws")
    lab.picture("run_panel_running")
    press("Pause")
    press("Go on")
    press("Stop")
    lab.wait_for_text("stopped", 60)
    lab.find(".jp-RenderedSVG img")
    done = num_steps()
    assert 20 < done < 20_000
    assert lab.ask(f"{LIVE} === null")
    lab.picture("run_panel_stopped")
    press("Resume")
    wait_until(lambda: num_steps() > done, "it goes on", 120)
    assert len(list(lab.folder.glob("trained/2*"))) == 1
    press("Stop")
    wait_until(lambda: '"stopped"' in next(lab.folder.glob("trained/2*/status.json")).read_text(), "it stops", 60)
    saved = lab.save("run_panel.ipynb", "image/svg+xml")
    assert "widgets" not in saved["metadata"]
    assert len(json.dumps(saved)) < 150_000


@needs_time
def test_a_cell_that_trains_in_the_kernel_is_watched_and_stopped_while_it_runs(lab: Lab) -> None:
    lab.open("inside.ipynb", [IN_THE_KERNEL])
    lab.run_all()
    wait_until(lambda: lab.ask(f"Number({LIVE}?.dataset.drawn ?? 0)") > 50, "the chart draws", 60)
    assert not lab.ask(f"{LIVE}.querySelector('[data-wish]')"), "a button that a busy kernel cannot hear"
    assert "interrupt the kernel to stop it" in lab.text()
    lab.do("notebook:interrupt-kernel")
    lab.wait_for_text("ended after")
    assert int(lab.text().split("ended after")[-1].split()[0]) < 4000
    lab.find(".jp-RenderedSVG img")


def cells_of(name: str) -> list[str]:
    """Return the code cells of a notebook, to run at the small size of tests."""
    source = json.loads((Path(__file__).resolve().parents[1] / "notebooks" / name).read_text())
    small = "import os\nos.environ['WAMLAB_SMOKE'] = '1'\nos.environ['OMP_NUM_THREADS'] = '1'"
    return [small, *("".join(cell["source"]) for cell in source["cells"] if cell["cell_type"] == "code")]


@needs_time
def test_the_loader_of_notebook_02_is_drawn_anew_while_it_reads(lab: Lab) -> None:
    small, parameters, *cells = cells_of("02_data.ipynb")
    lab.open("data.ipynb", [small, f"{parameters}\nnum_steps = 30", *cells])
    lab.run_all()
    pictures = "[...document.querySelectorAll('.jp-RenderedSVG img')].map(image => decodeURIComponent(image.src))"

    def drawn() -> str:
        return next((svg for svg in lab.ask(pictures) if "slowest stage: " in svg), "")

    seen = [wait_until(drawn, "the stages are drawn", 120)]
    lab.ask("document.querySelector(\".jp-RenderedSVG img[src*='slowest']\").scrollIntoView({block: 'center'})")
    lab.picture("loader_running")
    for _ in range(2):
        wait_until(lambda: drawn() not in seen, "other figures")
        seen.append(drawn())
    assert all('class="fill-orange"/>' in svg for svg in seen), "the slowest stage is no bar of its own colour"
    wait_until(lambda: lab.ask(f"{KERNEL}.status") == "idle", "the notebook ends", 120)
    lab.picture("loader_read")
    saved = lab.save("data.ipynb", "slowest stage")
    outputs = [output for cell in saved["cells"] for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]


@needs_time
def test_the_board_of_notebook_03_starts_and_stops_an_ablation(lab: Lab) -> None:
    cells = cells_of("03_speed.ipynb")
    until_board = cells[: 1 + next(i for i, cell in enumerate(cells) if cell.rstrip().endswith("\nboard"))]
    lab.open("board.ipynb", until_board)
    lab.run_all()
    toggles = "document.querySelectorAll('.widget-toggle-button').length"
    wait_until(lambda: lab.ask(toggles) > 2, "the toggles", 120)
    stop = "[...document.querySelectorAll('.jp-Notebook button')].find(b => b.textContent === 'Stop')"
    wait_until(lambda: not lab.ask(f"{stop}.disabled"), "it runs")
    lab.ask("document.querySelector('.widget-toggle-button').scrollIntoView()")
    lab.picture("board_running")
    lab.ask(f"{stop}.click()")
    wait_until(lambda: lab.ask(f"{stop}.disabled"), "it has stopped", 60)
    lab.wait_for_text("stopped with status")
    lab.picture("board_stopped")
