"""The live chart in a real JupyterLab and a real browser, on a run that another process writes."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("apt-get install --no-install-recommends chromium chromium-driver", allow_module_level=True)

TOKEN = "local-test"
NUM_STEPS = 200
SCREENSHOTS = os.environ.get("WAMLAB_SCREENSHOTS")  # a folder to keep pictures in, to look at them
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1100",
]

WRITER = """
import random, sys, time
from wamlab.lab.run import create_run
rng = random.Random(0)
with create_run(sys.argv[1], "live", {"train": {"num_steps": NUM_STEPS}}) as run:
    for step in range(1, NUM_STEPS + 1):
        action = 0.3 / step**0.5 * (1 + 0.1 * rng.random())
        split_s = {"data": 0.002, "encode": 0.004, "forward": 0.012, "backward": 0.024, "optimizer": 0.003}
        run.log({"step": step, "loss": 2 * action, "video_loss": action, "action_loss": action,
                 "samples_per_s": 150 + rng.random(), "step_s": 0.05, "split_s": split_s, "memory_gib": 1.0})
        if step % 50 == 0:
            run.log_evaluation({"step": step, "held_out_loss": 2.5 * action, "action_error": action})
        time.sleep(0.05)
    run.finish("finished", {"loss": 2 * action})
""".replace("NUM_STEPS", str(NUM_STEPS))

CELLS = [
    "from wamlab.lab.run import find_run\nfrom wamlab.lab.watch import watch\nwatching = watch(find_run('runs'))",
    "print('usable', 6 * 7)",
    "watching.wait(60)\nprint('records', watching.num_records)",
]


@pytest.fixture
def lab_url(tmp_path: Path) -> Iterator[str]:
    """Serve tmp_path by a JupyterLab of its own, with a notebook watch.ipynb."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}  # else a dialog asks
    nbformat.write(notebook, tmp_path / "watch.ipynb")
    config = tmp_path / "config.py"
    config.write_text(
        "from jupyterlab.galata import configure_jupyter_server\nconfigure_jupyter_server(c)\n"
        f"c.ServerApp.ip = '127.0.0.1'\nc.ServerApp.port = {port}\nc.ServerApp.port_retries = 0\n"
        f"c.IdentityProvider.token = '{TOKEN}'\nc.ServerApp.root_dir = {str(tmp_path)!r}\n"
        "c.ServerApp.allow_root = True\n"
    )
    names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    folders = {f"JUPYTER_{name}": str(tmp_path / name.lower()) for name in names}
    folders |= {f"JUPYTERLAB_{name}_DIR": str(tmp_path / name.lower()) for name in ("WORKSPACES", "SETTINGS")}
    news = tmp_path / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')  # a pop-up would cover the page
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", f"--config={config}"],
            env=os.environ | folders | {"IPYTHONDIR": str(tmp_path / "ipython")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        status_url = f"http://127.0.0.1:{port}/api/status?token={TOKEN}"

        def is_up() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(status_url, timeout=5) as answer:
                return answer.status == 200
            return False

        wait_until(is_up, "JupyterLab answers", 60)
        yield f"http://127.0.0.1:{port}/lab/tree/watch.ipynb?token={TOKEN}&reset"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """Open a browser with a fresh profile."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 30) -> Any:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def keep_screenshot(browser: Any, name: str) -> None:
    if SCREENSHOTS:
        browser.save_screenshot(str(Path(SCREENSHOTS) / name))


def test_a_run_of_another_process_is_drawn_live_and_leaves_a_still_picture(
    lab_url: str, browser: Any, tmp_path: Path
) -> None:
    def ask(script: str) -> Any:
        return browser.execute_script(f"return {script}")

    kernel = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel"
    browser.get(lab_url)
    wait_until(lambda: ask(f"{kernel}?.status === 'idle' && {kernel}.connectionStatus === 'connected'"), "a kernel")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "runs")])
    try:
        metrics = wait_until(lambda: next(iter(tmp_path.glob("runs/2*/metrics.jsonl")), None), "the run began")
        ask("(window.jupyterapp.commands.execute('notebook:run-all-cells'), 1)")  # its promise is not awaited

        chart = "document.querySelector('.wl-live')"
        drawn = f"Number({chart}?.dataset.drawn ?? 0)"
        wait_until(lambda: ask(drawn) > 20, "the chart draws")
        lags_s = []
        for _ in range(8):
            num_written = metrics.read_bytes().count(b"\n")
            start_s = time.monotonic()
            wait_until(lambda n=num_written: ask(drawn) >= n, f"record {num_written} is drawn", 5)
            lags_s.append(time.monotonic() - start_s)
            time.sleep(0.13)
        assert sorted(lags_s)[len(lags_s) // 2] < 1.5
        print(f"lag from file to picture: median {sorted(lags_s)[4]:.3f} s, longest {max(lags_s):.3f} s")
        assert ask(f"{chart}.dataset.state") == "running"
        assert ask(f"{chart}.querySelectorAll('canvas').length") == 3
        assert "usable 42" in ask("document.body.innerText")
        keep_screenshot(browser, "running.png")
        ask(f"{chart}.querySelector('.wl-toggle').click()")
        wait_until(lambda: ask(f"{chart}.querySelector('.wl-toggle').ariaPressed") == "false", "a linear axis")

        picture = wait_until(lambda: ask("document.querySelector('.jp-RenderedSVG img')"), "the still picture", 40)
        assert ask(f"{chart} === null")
        assert picture.get_attribute("src").startswith("data:image/svg+xml")
        wait_until(lambda: f"records {NUM_STEPS}" in ask("document.body.innerText"), "all records arrived")
        keep_screenshot(browser, "finished.png")
    finally:
        writer.wait(30)
    assert writer.returncode == 0
    ask("(window.jupyterapp.commands.execute('docmanager:save'), 1)")
    wait_until(lambda: "image/svg+xml" in (tmp_path / "watch.ipynb").read_text(), "the notebook is saved")
    saved = json.loads((tmp_path / "watch.ipynb").read_text())
    (output,) = saved["cells"][0]["outputs"]
    assert set(output["data"]) == {"image/svg+xml", "text/plain"}
    assert "widgets" not in saved["metadata"]
    assert len(json.dumps(saved)) < 150_000
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
