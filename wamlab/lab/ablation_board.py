"""Toggles for tricks, start and stop, and the ablation's table and figures as turns come in."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.ablation import RESULT, ablation_table, read_ablation, split_figure, waterfall_figure
from wamlab.lab.watch import has_front_end


class AblationBoard:
    """A command that writes an ablation's folder, started from toggles; what it shows is read from the folder."""

    def __init__(self, words: Sequence[str], tricks: Sequence[str], folder: Path | str, *, poll_s: float = 1.0) -> None:
        """Take the words after ``wamlab`` but ``--tricks`` and ``--folder``; raise InputError outside a notebook."""
        if not has_front_end():
            raise InputError("the board needs a notebook: run `wamlab ablate` in a terminal")
        import ipywidgets as widgets

        self.words, self.folder, self._poll_s = list(words), Path(folder), poll_s
        self.process: subprocess.Popen[bytes] | None = None
        self.newest: Path | None = None  # folder of what was started last
        self.toggles = [widgets.ToggleButton(True, description=trick, layout={"width": "auto"}) for trick in tricks]
        self.start_button = widgets.Button(description="Start", button_style="primary", tooltip="measure these tricks")
        self.stop_button = widgets.Button(description="Stop", disabled=True, tooltip="stop; starting again goes on")
        self.status = widgets.Label("choose the tricks to compare")
        self.shown = widgets.Output()
        self.start_button.on_click(lambda _: self.start())
        self.stop_button.on_click(lambda _: self.stop())
        buttons = widgets.HBox([self.start_button, self.stop_button, self.status])
        toggles = widgets.HBox(self.toggles, layout={"flex_flow": "row wrap"})
        self.view = widgets.VBox([toggles, buttons, self.shown])

    def start(self) -> None:
        """Start the command with the chosen tricks, each choice in a folder of its own."""
        chosen = [toggle.description for toggle in self.toggles if toggle.value]
        if not chosen:
            self.status.value = "choose at least one trick"
            return
        marks = "".join(str(int(toggle.value)) for toggle in self.toggles)
        folder = self.folder / marks
        folder.mkdir(parents=True, exist_ok=True)
        self.newest = folder
        program = Path(sys.executable).with_name("wamlab")  # of this kernel's environment, which PATH may lack
        command = [str(program), *self.words, "--folder", str(folder), "--tricks", *chosen]
        with (folder / "board.log").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.start_button.disabled, self.stop_button.disabled = True, False
        self.status.value = f"measuring {', '.join(chosen)}"
        threading.Thread(target=self._watch, args=(folder, self.process), name="ablation board", daemon=True).start()

    def stop(self) -> None:
        """Stop the command; finished turns stay."""
        if self.process is not None:
            self.process.terminate()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the command's end; return its status."""
        if self.process is None:
            raise InputError("nothing was started: call start()")
        return self.process.wait(timeout_s)

    def _watch(self, folder: Path, process: Any) -> None:
        num_shown = 0
        while True:
            has_ended = process.poll() is not None
            if (folder / RESULT).exists():
                result = read_ablation(folder)
                num_turns = sum(map(len, result["turns"].values()))
                if num_turns > num_shown:
                    num_shown = num_turns
                    self.status.value = f"{num_turns} of {len(result['turns']) * result['config']['num_rounds']} turns"
                    self._show(result)
            if has_ended:
                break
            threading.Event().wait(self._poll_s)
        self.start_button.disabled, self.stop_button.disabled = False, True
        if process.returncode:
            said = (folder / "board.log").read_text(errors="replace").strip().splitlines()
            self.status.value = f"stopped with status {process.returncode}: {said[-1][:200] if said else ''}"
        else:
            self.status.value = "finished"

    def _show(self, result: Any) -> None:
        with self.shown:
            from IPython.display import clear_output, display

            clear_output(wait=True)
            display(ablation_table(result), waterfall_figure(result), split_figure(result))

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.view)
