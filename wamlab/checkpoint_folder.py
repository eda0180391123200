"""The folders of checkpoints: begun under a hidden name, named when everything is in them, the oldest removed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from wamlab.errors import InputError

SHARDS = "shards"  # in a checkpoint that several processes wrote


def begin_checkpoint(folder: Path, step: int) -> Path:
    """Make the folder that a checkpoint is written into; remove what killed processes left below ``folder``."""
    for leftover in folder.glob(".step_*"):
        shutil.rmtree(leftover)
    partial = partial_folder(folder, step)
    partial.mkdir(parents=True)
    return partial


def partial_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies while it is written."""
    return folder / f".step_{step:08d}.partial"


def finish_checkpoint(folder: Path, step: int, *, has_ema: bool, base: str | None) -> Path:
    """Give the checkpoint of a step its name, in place of an older one of that step."""
    partial = partial_folder(folder, step)
    target, replaced = folder / f"step_{step:08d}", folder / f".step_{step:08d}.replaced"
    (partial / "state.json").write_text(json.dumps({"step": step, "has_ema": has_ema, "base": base}))
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def keep_newest(folder: Path, num_kept: int) -> None:
    """Remove all checkpoints but the newest ones."""
    for old in list_checkpoints(folder)[:-num_kept]:
        shutil.rmtree(old)


def unwritten(folder: Path, step: int, error: BaseException) -> InputError:
    """Return what to raise where a checkpoint cannot be written."""
    reason = str(error).strip().partition("\n")[0]
    return InputError(
        f"the checkpoint of step {step} cannot be written below {folder} ({reason}): free space, then resume"
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints below a folder, oldest first."""
    return sorted(path.parent for path in folder.glob("step_*/state.json"))


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest finished checkpoint; InputError if there is none."""
    found = list_checkpoints(folder)
    if not found:
        raise InputError(f"{folder} holds no finished checkpoint: train one, in a new run without --resume")
    return found[-1]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the step of a checkpoint, whether it has an average, and the frozen base its adapters belong to."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        step, has_ema, base = state["step"], state["has_ema"], state.get("base")
        if type(step) is not int or not 0 <= step < 2**53 or type(has_ema) is not bool:
            raise ValueError("its step or has_ema is of another kind")
        if not isinstance(base, str | None):
            raise ValueError("its base is no fingerprint")
        return {"step": step, "has_ema": has_ema, "base": base}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{checkpoint / 'state.json'} cannot be read ({error!r}): delete {checkpoint}") from error
