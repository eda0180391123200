"""What a post-training has played since its newest checkpoint, so that a killed process goes on in mid-iteration.

Segments of episodes lie in a store on disk; one record, replaced as a whole, says by which weights each iteration in it
is played. Weights, and no count of steps, tell whether an iteration's segments belong to what a checkpoint led to:
those of others are removed and played again, so that checkpoint and store cannot disagree unnoticed.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from wamlab.errors import InputError
from wamlab.lab.records import read_json, write_json
from wamlab.rl.records import forget_before
from wamlab.rl.store import FolderTier, TieredStore, content_name

RECORD, SEGMENTS = "progress.json", "segments"
NUM_SAMPLED = 4096  # weights of each tensor in the name of weights


class RolloutProgress:
    """The rollouts of one run since its newest checkpoint, below a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = TieredStore([FolderTier(folder / SEGMENTS, float("inf"))])
        for left in (folder / SEGMENTS).glob("*.unfinished"):  # by a process that was killed while it wrote
            left.unlink()
        path = folder / RECORD
        self.weights = _read_weights(path) if path.exists() else {}  # by iteration

    def begin(self, iteration: int, net: nn.Module) -> TieredStore:
        """Return the store for an iteration that ``net`` is about to play, with what it has played of it before."""
        # an update changes nearly every weight, so a sample of them tells updates apart
        few = {name: t.detach().flatten()[:: max(1, t.numel() // NUM_SAMPLED)] for name, t in net.state_dict().items()}
        name, played_by = str(iteration), content_name(few)
        if self.weights.get(name) != played_by:
            for key in [key for key in self.store if key.startswith(f"{name}-")]:
                self.store.remove(key)
            self.weights[name] = played_by
            self._write()
        return self.store

    def forget(self, iteration: int) -> None:
        """Forget what was played before an iteration, once a checkpoint holds what was learnt from it."""
        self.weights = {name: weights for name, weights in self.weights.items() if int(name) >= iteration}
        self._write()
        forget_before(self.store, iteration)

    def _write(self) -> None:
        write_json(self.folder / RECORD, {"weights": self.weights})


def _read_weights(path: Path) -> dict[str, str]:
    weights = read_json(path).get("weights")
    if not isinstance(weights, dict) or not all(
        name.isascii() and name.isdigit() and isinstance(weights[name], str) for name in weights
    ):
        raise InputError(f"{path} does not say which weights played: delete {path.parent} to play again")
    return weights
