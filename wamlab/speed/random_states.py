"""The random generators of a process, kept and put back, so that a step that did not count leaves no trace in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def random_states() -> Sequence[Tensor]:
    """Return the states of torch's own generators, of this process's host and its CUDA device if it has one."""
    found = [torch.get_rng_state()]
    return [*found, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else found


def restore_random(states: Sequence[Tensor]) -> None:
    """Put back what ``random_states`` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
