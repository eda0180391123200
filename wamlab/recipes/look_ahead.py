"""Planning ahead: the next chunk is asked for while the last one is played."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from wamlab.recipes.history import HistoryPolicy
from wamlab.types import Observation


class LookAhead:
    """Plans the chunk after the one that plays, from what was seen as that one began.

    The window ends with the real frames until then, in place of what was predicted of them; the frames until the next
    chunk are the network's own. Where ``2 num_executed`` ticks fit one block, no frame is predicted: its later actions
    serve.
    """

    def __init__(self, policy: HistoryPolicy, num_executed: int | None = None) -> None:
        self.policy = policy
        block = policy.bench.recipe.window.actions_per_block
        self.num_executed = num_executed or block
        self.num_blocks = -(-2 * self.num_executed // block)

    def __call__(self, observation: Observation) -> Float[np.ndarray, "b a j"]:
        """Return ``num_executed`` robot actions [b a j] of the next chunk."""
        actions = self.policy.plan_blocks(observation, self.num_blocks)
        return actions[:, self.num_executed : 2 * self.num_executed]
