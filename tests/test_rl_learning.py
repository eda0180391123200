"""Two tasks for the smallest policy: success rises with every objective, and falls with its sign flipped."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from small_policy import DOUBLE, SDE, SmallNet, batch_of, example_of, play
from torch import Tensor

from wamlab.flow import NoiseConfig, with_noise
from wamlab.rl.advantage import GRPO, group_advantages
from wamlab.rl.chain import Chain
from wamlab.rl.flow_policy import LogProbConfig
from wamlab.rl.fpo import FpoConfig, FpoExample, draw_steps, flow_errors, fpo_loss
from wamlab.rl.nft import NftConfig, NftExample, nft_loss, optimality
from wamlab.rl.objectives import PolicyConfig, policy_loss

GROUPS, MEMBERS = 16, 8
SEEDS = range(5)
Objective = Callable[[SmallNet, Chain, Tensor, int], Tensor]
LEVELS = NoiseConfig(shift=1.0)


def grpo(net: SmallNet, chain: Chain, advantage: Tensor, seed: int, config: LogProbConfig | None = None) -> Tensor:
    config = config or LogProbConfig()
    return policy_loss(net, SDE, example_of(chain, advantage, config), PolicyConfig(log_prob=config)).total


def nft(net: SmallNet, chain: Chain, advantage: Tensor, seed: int, form: str = "velocity") -> Tensor:
    flow = with_noise(chain.batch, torch.Generator().manual_seed(seed), LEVELS)
    share, weight = optimality(advantage, 2.0), torch.ones_like(advantage)
    example = NftExample(flow, share, torch.ones_like(chain.batch.action_mask), weight)
    return nft_loss(net, deepcopy(net), example, NftConfig(form=form, most_advantage=2.0)).total


def fpo(net: SmallNet, chain: Chain, advantage: Tensor, seed: int) -> Tensor:
    seen, target = draw_steps(chain.batch, 4, torch.Generator().manual_seed(seed), LEVELS)
    mask = torch.ones_like(chain.batch.action_mask)
    with torch.no_grad():
        old = flow_errors(net, chain.batch, seen, target, mask)
    example = FpoExample(chain.batch, seen, target, mask, old, advantage, torch.ones_like(advantage))
    return fpo_loss(net, example, FpoConfig(entries="sum")).total


OBJECTIVES: dict[str, Objective] = {
    "grpo, all steps": grpo,
    "grpo, one step": grpo,
    "nft": nft,
    "nft, clean": partial(nft, form="clean"),
    "fpo": fpo,
}


def success(actions: Tensor, task: Tensor) -> Tensor:
    """Say which chunks moved to their task's side, on average over their ticks."""
    return (actions[..., 0].mean(dim=1) * task > 0.25).to(DOUBLE)


def train(name: str, seed: int, sign: float, num_iterations: int) -> tuple[float, float]:
    """Return the success before and after some iterations, one on-policy update each."""
    net = SmallNet(seed=seed, width=16)
    for p in net.out.parameters():  # starts at chance for both tasks
        torch.nn.init.zeros_(p)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2 if name == "nft, clean" else 2e-2)
    task = torch.tensor([1.0, -1.0], dtype=DOUBLE).repeat(GROUPS // 2).repeat_interleave(MEMBERS)
    batch = batch_of(torch.stack([task, torch.ones_like(task)], dim=1))
    found = []
    for iteration in range(num_iterations):
        step = [iteration % 4] if name == "grpo, one step" else None
        chain = play(net, batch, seed=1000 * seed + iteration, steps=step)
        reward = success(chain.batch.actions, task)
        found.append(reward.mean().item())
        advantage = group_advantages(reward.unflatten(0, (GROUPS, MEMBERS)), GRPO).advantage.flatten()
        optimizer.zero_grad()
        OBJECTIVES[name](net, chain, sign * advantage, 7 * iteration).backward()
        optimizer.step()
    return sum(found[:3]) / 3, sum(found[-3:]) / 3


@pytest.mark.parametrize("name", OBJECTIVES)
def test_success_rises_in_every_seed_and_falls_with_the_sign_flipped(name: str) -> None:
    for seed in SEEDS:
        before, after = train(name, seed, 1.0, 20)
        assert after > before + 0.3, f"seed {seed}: {before:.2f} to {after:.2f}"
        before, after = train(name, seed, -1.0, 14)
        assert after < 0.7 * before, f"seed {seed}, flipped: {before:.2f} to {after:.2f}"
