"""Policy-gradient objectives for flow policies: clipped ratios of denoising steps, a value head, a KL, a video term.

``policy_loss(net, policy, example)`` fits the same seam as ``flow_loss(net, example)``: bind what precedes the example
with ``functools.partial`` and hand it to the training loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from wamlab.errors import InputError, check_range
from wamlab.flow import NoiseConfig, video_error
from wamlab.rl.chain import Chain, StepPolicy
from wamlab.rl.flow_policy import ChainSteps, LogProbConfig, chain_steps, degenerate_share, entropy, log_prob
from wamlab.rl.kl import ESTIMATORS, gaussian_kl, sampled_kl
from wamlab.types import Batch, FlowExample, LossTerms, Net, Samples

MOST_LOG_RATIO = 20.0  # beyond it exp overflows in float32 sums; the clip has long since stopped the gradient
KLS = ("closed", *ESTIMATORS)


@dataclass(frozen=True)
class ClipConfig:
    """How far one iteration may move the probability of a chunk (PPO, arXiv 1707.06347)."""

    low: float = 0.2
    high: float = 0.2  # 0.28 in DAPO and SimpleVLA-RL
    dual: float | None = (
        3.0  # a bad chunk's loss is at most this times its advantage (arXiv 1912.09729); None: no bound
    )

    def __post_init__(self) -> None:
        check_range("clip", self, 0, 1, "low")
        check_range("clip", self, 0, math.inf, "high")
        if self.dual is not None and not self.dual > 1:
            raise InputError(f"clip.dual is {self.dual}: give a number above 1, or None")


@dataclass(frozen=True)
class PolicyConfig:
    """What the policy loss is made of."""

    clip: ClipConfig = field(default_factory=ClipConfig)
    log_prob: LogProbConfig = field(default_factory=LogProbConfig)
    kl: str = "closed"  # to the reference, where one is given: "closed" or an estimator
    kl_weight: float = 0.0
    entropy_weight: float = 0.0  # of learned noise; the SDE's entropy is constant
    value_weight: float = 0.5  # where a value head is given
    value_clip: float | None = None  # of how far a value may move from the rollout's, in rewards
    video_weight: float = 0.0  # of the supervised flow loss on the video of successful episodes
    noise: NoiseConfig = field(default_factory=NoiseConfig)  # weighs that loss's levels

    def __post_init__(self) -> None:
        check_range("policy", self, 0, math.inf, "kl_weight", "entropy_weight", "value_weight", "video_weight")
        if self.kl not in KLS:
            raise InputError(f'policy.kl is "{self.kl}": give one of {", ".join(KLS)}')


@dataclass(frozen=True)
class PolicyExample(Samples):
    """Played chunks and all that a policy gradient needs of them; a sample is one chunk that was executed."""

    chain: Chain
    is_executed: Bool[Tensor, "b a j"]  # ticks that were played, and dimensions that the robot has
    old_log_prob: Float[Tensor, " b ..."]  # when it was played, reduced as the config says
    advantage: Float[Tensor, " b"]
    weight: Float[Tensor, " b"]  # in the mean over samples, see rl/update.py
    value_target: Float[Tensor, " b"] | None = None
    old_value: Float[Tensor, " b"] | None = None
    flow: FlowExample | None = None  # noised anew, for the supervised video term
    is_success: Bool[Tensor, " b"] | None = None  # of the chunk's episode; only with flow


@dataclass(frozen=True)
class PolicyTerms(LossTerms):
    """The policy loss and what to look at beside it; ``action`` is the clipped term, ``video`` the supervised one."""

    value: Float[Tensor, ""]
    kl: Float[Tensor, ""]  # nats a chunk
    entropy: Float[Tensor, ""]  # nats an entry
    clipped: Float[Tensor, ""]  # share of ratios whose gradient the clip stopped
    ratio_error: Float[Tensor, ""]  # largest |ratio - 1|: rounding alone before the first update
    degenerate: Float[Tensor, ""]  # share of entries without noise


def clipped_loss(log_ratio: Tensor, advantage: Tensor, config: ClipConfig) -> tuple[Tensor, Tensor]:
    """Return the clipped loss of every ratio, and where the clip stops its gradient (PPO eq. 7; dual clip)."""
    ratio = log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
    plain = -ratio * advantage
    bounded = -ratio.clamp(1 - config.low, 1 + config.high) * advantage
    loss, is_stopped = torch.maximum(plain, bounded), bounded > plain
    if config.dual is not None:
        most = -config.dual * advantage
        is_over = (advantage < 0) & (loss > most)
        loss, is_stopped = torch.where(is_over, most, loss), is_stopped | is_over
    return loss, is_stopped


def value_loss(
    value: Float[Tensor, " b"],
    target: Float[Tensor, " b"],
    old_value: Float[Tensor, " b"] | None = None,
    clip: float | None = None,
) -> Float[Tensor, " b"]:
    """Return half the squared error of each value; with ``clip`` the larger one of it and of the clipped value's."""
    loss = 0.5 * (value - target).square()
    if clip is None:
        return loss
    if old_value is None:
        raise InputError("a clipped value needs the rollout's values: give old_value, or no value_clip")
    held = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(loss, 0.5 * (held - target).square())


class ValueHead(nn.Module):
    """A small network of what is seen before a chunk: first frame, state and instruction, each as a few numbers."""

    def __init__(self, latent_channels: int, state_dim: int, text_dim: int, *, grid: int = 4, width: int = 128) -> None:
        super().__init__()
        self.grid = grid
        self.body = nn.Sequential(
            nn.Linear(latent_channels * grid**2 + state_dim + text_dim, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, batch: Batch, num_latents_per_block: int = 2) -> Float[Tensor, " b"]:
        """Return the value of each chunk from the last frame before it; that of a new head is not zero."""
        frame = nn.functional.adaptive_avg_pool2d(batch.latents[:, -1 - num_latents_per_block], self.grid)
        seen = torch.cat([frame.flatten(1), batch.state[:, -1], batch.text.mean(dim=1)], dim=1)
        return self.body(seen.float())[:, 0]


def policy_loss(
    net: Net,
    policy: StepPolicy,
    example: PolicyExample,
    config: PolicyConfig | None = None,
    *,
    reference: Callable[[Chain], ChainSteps] | None = None,
    video_policy: StepPolicy | None = None,
    value_head: Callable[[Batch], Tensor] | None = None,
) -> PolicyTerms:
    """Return the loss of GRPO, PPO and their variants, a weighted mean over chunks (F3, F4, F8, F9, F13).

    ``reference`` is asked without gradients, e.g. ``partial(chain_steps, frozen_net, policy)``. The video is
    conditioning only unless ``video_policy`` is given.
    """
    config, chain = config or PolicyConfig(), example.chain
    steps = chain_steps(net, policy, chain, video_policy)
    found = log_prob(chain, steps, example.is_executed, config.log_prob)
    if found.shape != example.old_log_prob.shape:
        raise InputError(
            f"old log-probabilities have shape {tuple(example.old_log_prob.shape)}, new ones {tuple(found.shape)}: "
            "reduce them by one LogProbConfig"
        )
    log_ratio = found - example.old_log_prob
    advantage = example.advantage.reshape(-1, *(1,) * (found.ndim - 1)).to(found.dtype)
    each, is_stopped = clipped_loss(log_ratio, advantage, config.clip)
    share = _share(each, example.is_executed, config.log_prob.per)
    weight = example.weight.to(found.dtype)
    zero = found.new_zeros(())

    def mean(per_chunk: Tensor) -> Tensor:
        return (weight * per_chunk).mean()

    action = mean((each * share).flatten(1).sum(dim=1) if each.ndim > 1 else each)
    total, kl, value, video = action, zero, zero, zero
    if reference is not None:
        kl = mean(_kl(chain, steps, reference, example, found, config))
        total = total + config.kl_weight * kl
    spread = mean(entropy(steps, example.is_executed))
    if config.entropy_weight:
        total = total - config.entropy_weight * spread
    if value_head is not None:
        if example.value_target is None:
            raise InputError("a value head needs targets: give value_target, e.g. from generalized_advantages")
        value = mean(value_loss(value_head(chain.batch), example.value_target, example.old_value, config.value_clip))
        total = total + config.value_weight * value
    if config.video_weight:
        video = success_video_loss(net, example, config.noise)
        total = total + config.video_weight * video
    with torch.no_grad():
        clipped = (is_stopped * share).sum() / share.sum()
        ratio_error = torch.where(share > 0, log_ratio.expm1().abs(), 0).max()
        degenerate = degenerate_share(steps, example.is_executed).to(found.dtype)
    looks = (video, action, value, kl, spread, clipped, ratio_error, degenerate)
    return PolicyTerms(total, *(look.detach() for look in looks))


def success_video_loss(net: Net, example: PolicyExample, config: NoiseConfig | None = None) -> Float[Tensor, ""]:
    """Return the flow loss of the video of successful episodes, as part of a mean over all samples (F13)."""
    if example.flow is None or example.is_success is None:
        raise InputError("the video term needs noised episodes and their outcome: give flow and is_success")
    is_success = example.is_success
    if not is_success.any():
        return example.flow.seen.latents.new_zeros(())
    won = example.flow._map(lambda tensor: tensor[is_success])
    level = won.seen.video_noise_level
    error = video_error(net(won.batch, won.seen), won.target, level, config).mean(dim=1)
    return (example.weight[is_success].to(error.dtype) * error).sum() / len(example)


def _share(each: Tensor, is_executed: Tensor, per: str) -> Tensor:
    """Return the share of each ratio in its chunk's mean: ticks that were not played have none."""
    share = torch.ones_like(each)
    if per == "tick":
        played = is_executed.any(dim=-1).to(each.dtype)
        share = share * (played if each.ndim == 2 else played[:, None])
    if each.ndim == 1:
        return share
    return share / share.flatten(1).sum(dim=1).clamp(min=1).reshape(-1, *(1,) * (each.ndim - 1))


def _kl(
    chain: Chain,
    steps: ChainSteps,
    reference: Callable[[Chain], ChainSteps],
    example: PolicyExample,
    found: Tensor,
    config: PolicyConfig,
) -> Tensor:
    with torch.no_grad():
        others = reference(chain)
    if config.kl != "closed":
        other = log_prob(chain, others, example.is_executed, config.log_prob)
        each = sampled_kl(found, other, config.kl)
        return each.flatten(1).sum(dim=1) if each.ndim > 1 else each
    each = torch.where(example.is_executed[:, None], gaussian_kl(steps.actions, others.actions), 0).sum(dim=(1, 2, 3))
    if steps.video is not None and others.video is not None:
        each = each + gaussian_kl(steps.video, others.video).flatten(1).sum(dim=1)
    return each
