"""A JupyterLab server and a headless Chromium for tests: both start once, every notebook gets a kernel of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from selenium.common.exceptions import StaleElementReferenceException

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
INSTALL = "apt-get install --no-install-recommends chromium chromium-driver && pip install selenium"
SCREENSHOTS = os.environ.get("WAMLAB_SCREENSHOTS")  # a folder to keep pictures in, to look at them
TOKEN = "local-test"
PR_CAPBSET_DROP, CAP_SYS_NICE = 24, 23
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
KERNEL = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel"


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 30) -> Any:
    """Return the first true value of a condition; raise AssertionError if there is none in time."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")


class Lab:
    """A JupyterLab over a folder, and a browser that looks at it."""

    def __init__(self, folder: Path, url: str, driver: Any) -> None:
        self.folder, self.url, self.driver = folder, url, driver

    def open(self, name: str, cells: Sequence[str] | None = None) -> None:
        """Show a notebook, made of code cells where they are given, and wait for its kernel."""
        if cells is not None:
            notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
            notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}  # else a dialog asks
            nbformat.write(notebook, self.folder / name)
        self.driver.get(f"{self.url}/lab/tree/{name}?token={TOKEN}&reset")
        is_ready = f"{KERNEL}?.status === 'idle' && {KERNEL}.connectionStatus === 'connected'"
        wait_until(lambda: self.ask(is_ready), f"a kernel for {name}", 60)

    def ask(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self.driver.execute_script(f"return {script}")

    def do(self, command: str) -> None:
        """Start a command of JupyterLab, whose promise is not awaited."""
        self.ask(f"(window.jupyterapp.commands.execute({command!r}), 1)")

    def run_all(self) -> None:
        """Run all cells of the notebook."""
        self.do("notebook:run-all-cells")

    def find(self, selector: str, timeout_s: float = 30) -> Any:
        """Return the first element that a CSS selector finds, once there is one."""
        script = f"document.querySelector({json.dumps(selector)})"
        return wait_until(lambda: self.ask(script), f"an element {selector}", timeout_s)

    def click(self, selector: str, timeout_s: float = 30) -> None:
        """Click what a CSS selector finds, as a mouse would; again where it was drawn anew in between."""

        def is_clicked() -> bool:
            try:
                self.find(selector, timeout_s).click()
            except StaleElementReferenceException:
                return False
            return True

        wait_until(is_clicked, f"a click on {selector}", timeout_s)

    def text(self) -> str:
        """Return what the notebook says, out of sight too."""
        return self.ask("document.querySelector('.jp-Notebook')?.textContent ?? ''")

    def wait_for_text(self, text: str, timeout_s: float = 30) -> None:
        """Wait for words on the page; an error of a cell that comes first is the reason if they do not."""
        error = (
            "document.querySelector('.jp-RenderedText[data-mime-type=\"application/vnd.jupyter.stderr\"]')?.textContent"
        )
        try:
            wait_until(lambda: text in self.text(), f"the words {text!r}", timeout_s)
        except AssertionError as late:
            raise AssertionError(f"{late}; a cell says {self.ask(error)}; the page: {self.text()[-1500:]}") from None

    def save(self, name: str, mark: str) -> dict[str, Any]:
        """Save the notebook and return it, once the file holds ``mark``."""
        self.do("docmanager:save")
        wait_until(lambda: mark in (self.folder / name).read_text(), f"{name} is saved")
        return json.loads((self.folder / name).read_text())

    def picture(self, name: str) -> None:
        """Keep a screenshot, where a folder for them is given."""
        if SCREENSHOTS:
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(Path(SCREENSHOTS) / f"{name}.png"))

    def errors(self) -> list[str]:
        """Return the errors that the browser's console got since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def end_kernels(self) -> None:
        """End the kernels of all notebooks that were shown."""
        self.driver.get("about:blank")
        for session in json.loads(self._call("/api/sessions")):
            self._call(f"/api/sessions/{session['id']}", "DELETE")

    def _call(self, path: str, method: str = "GET") -> bytes:
        request = urllib.request.Request(f"{self.url}{path}?token={TOKEN}", method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()


def _without_realtime() -> None:
    """Let nothing that root starts from here become real-time: a page that spins would take every core from all else.

    Seen with Chromium 156 on a machine that had stood still for minutes (2026-12-03).
    """
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_NICE, 0, 0, 0)


@contextlib.contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """Serve a folder by a JupyterLab of its own and open a browser with a fresh profile."""
    from selenium import webdriver

    private, served = folder / "private", folder / "served"
    private.mkdir()
    served.mkdir()
    with _server(private, served) as url:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for flag in [*FLAGS, f"--user-data-dir={private / 'profile'}"]:
            options.add_argument(flag)
        service = webdriver.ChromeService(DRIVER, popen_kw={"preexec_fn": _without_realtime})
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield Lab(served, url, driver)
        finally:
            driver.quit()


@contextlib.contextmanager
def _server(private: Path, served: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = private / "config.py"
    config.write_text(
        "from jupyterlab.galata import configure_jupyter_server\nconfigure_jupyter_server(c)\n"
        f"c.ServerApp.ip = '127.0.0.1'\nc.ServerApp.port = {port}\nc.ServerApp.port_retries = 0\n"
        f"c.IdentityProvider.token = '{TOKEN}'\nc.ServerApp.root_dir = {str(served)!r}\n"
        "c.ServerApp.allow_root = True\n"
    )
    names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    folders = {f"JUPYTER_{name}": str(private / name.lower()) for name in names}
    folders |= {f"JUPYTERLAB_{name}_DIR": str(private / name.lower()) for name in ("WORKSPACES", "SETTINGS")}
    news = private / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')  # a pop-up would cover the page
    with (private / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", f"--config={config}"],
            env=os.environ | folders | {"IPYTHONDIR": str(private / "ipython")},
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

        wait_until(is_up, "JupyterLab answers", 120)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
