"""Episodes of one task by a run's policy, and how many succeed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from wamlab.recipes.environments import check_fit, make_env
from wamlab.recipes.history import HistoryPolicy
from wamlab.recipes.policy import WamPolicy
from wamlab.score.success import SuccessRate, measure_success


def play_task(policy: WamPolicy, task: str, seeds: Sequence[int], *, num_envs: int = 50) -> SuccessRate:
    """Play one episode a seed in closed loop: of a tabletop family, or of a simulator such as "metaworld:reach-v3".

    Episodes of a recipe of several blocks go on from their own real frames, with noise for each; those of others have
    the noise of their calls (``WamPolicy``). Raises InputError for a task that does not fit the policy's robot.
    """
    player = going_on(policy)
    check_fit(player, task)
    with closing(make_env(player, task, min(num_envs, len(seeds)))) as env:
        return measure_success(env, player, seeds)


def going_on(policy: WamPolicy) -> WamPolicy:
    """Return a policy that goes on with its episodes, where its recipe was trained to."""
    if policy.bench.recipe.window.max_blocks == 1:
        return policy
    seed, memory_gib = policy.seed, policy.memory_gib if isinstance(policy, HistoryPolicy) else 2.0
    return HistoryPolicy(policy.bench, policy.normalizers, seed=seed, memory_gib=memory_gib)
