"""The smallest flow policy of the right signature, in float64, and played chunks for it."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from wamlab.rl.chain import Chain, chain_of, sample_chunk
from wamlab.rl.flow_policy import FlowSde, LogProbConfig, played_log_prob
from wamlab.rl.objectives import PolicyExample
from wamlab.types import Batch, Noised, Velocity

DOUBLE = torch.float64
LEVELS = torch.linspace(1, 0, 5, dtype=DOUBLE).tolist()
SDE = FlowSde(level_cap=LEVELS[1], noise_scale=0.7)


class SmallNet(nn.Module):
    """Actions' velocity from noised actions, state and level, through one hidden layer; the video's is linear."""

    def __init__(self, action_dim: int = 2, state_dim: int = 2, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.hidden = nn.Linear(action_dim + state_dim + 1, width, dtype=DOUBLE)
        self.out = nn.Linear(width, action_dim, dtype=DOUBLE)
        self.video = nn.Linear(2, 2, dtype=DOUBLE)

    def forward(self, batch: Batch, seen: Noised) -> Velocity:
        state = batch.state[:, -1:].expand(-1, seen.actions.shape[1], -1)
        hidden = self.hidden(torch.cat([seen.actions, state, seen.action_noise_level[..., None]], dim=-1)).tanh()
        video = self.video(seen.latents.movedim(2, -1)).movedim(-1, 2)
        return Velocity(video=video, actions=self.out(hidden) + seen.actions)


def batch_of(state: Tensor, num_ticks: int = 3, action_dim: int = 2) -> Batch:
    """Return chunks that differ in their state alone; their own latents and actions are zero."""
    size = len(state)
    actions = torch.zeros(size, num_ticks, action_dim, dtype=DOUBLE)
    return Batch(
        latents=torch.zeros(size, 3, 2, 2, 2, dtype=DOUBLE),
        actions=actions,
        action_mask=torch.ones_like(actions, dtype=torch.bool),
        state=state[:, None],
        text=torch.zeros(size, 1, 2, dtype=DOUBLE),
    )


@torch.no_grad()
def play(net: nn.Module, batch: Batch, seed: int = 0, steps: list[int] | None = None) -> Chain:
    """Sample every chunk of a batch; the chunk's actions are its chain's end, and the batch's."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(len(batch), *shape, generator=generator, dtype=DOUBLE)

    def denoise(latents: Tensor, actions: Tensor, video_level: float, action_level: float) -> Velocity:
        window = torch.cat([batch.latents[:, :1], latents], dim=1)
        levels = (
            torch.full(x.shape[:2], level, dtype=DOUBLE)
            for x, level in ((window, video_level), (actions, action_level))
        )
        found = net(batch, Noised(window, actions, *levels))
        return Velocity(found.video[:, 1:], found.actions)

    ticks, dims = batch.actions.shape[1:]
    noise = random(2, 2, 2, 2), random(ticks, dims)
    sampled = sample_chunk(denoise, batch.state, noise, SDE, LEVELS, lambda _: random(ticks, dims), steps=steps)
    latents = torch.cat([batch.latents[:, :1], sampled.latents], dim=1)
    return chain_of(replace(batch, latents=latents, actions=sampled.actions), sampled)


def example_of(
    chain: Chain, advantage: Tensor, config: LogProbConfig | None = None, is_executed: Tensor | None = None
) -> PolicyExample:
    """Return what the policy loss needs, every chunk of weight 1."""
    if is_executed is None:
        is_executed = torch.ones_like(chain.batch.action_mask)
    return PolicyExample(
        chain=chain,
        is_executed=is_executed,
        old_log_prob=played_log_prob(chain, is_executed, config),
        advantage=advantage,
        weight=torch.ones(len(advantage), dtype=DOUBLE),
    )
