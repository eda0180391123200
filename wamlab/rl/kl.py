"""How far a policy has moved from its reference: exactly for Gaussian steps, or estimated from samples."""

from __future__ import annotations

import torch
from torch import Tensor

from wamlab.errors import InputError
from wamlab.flow import Gaussian

ESTIMATORS = ("k1", "k2", "k3")


def gaussian_kl(policy: Gaussian, reference: Gaussian) -> Tensor:
    """Return KL(policy | reference) of every entry, in nats; 0 where the reference is deterministic.

    With equal spreads it is ``(difference of means)^2 / (2 std^2)``. Flow-GRPO's released code leaves the step's length
    out of ``std^2`` and averages over entries: its weight is another unit (F9).
    """
    is_random = (reference.std > 0) & (policy.std > 0)
    own, other = (torch.where(is_random, side.std, 1) for side in (policy, reference))
    distance = (policy.mean - reference.mean).square()
    found = (other / own).log() + (own.square() + distance) / (2 * other.square()) - 0.5
    return torch.where(is_random, found, 0)


def sampled_kl(log_prob: Tensor, reference_log_prob: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(policy | reference) from samples of the policy (J. Schulman, "Approximating KL divergence", 2020).

    "k1" is unbiased and may be negative, "k2" is biased with little variance, "k3" is unbiased and never negative. As
    part of a loss only k2 has the gradient of the KL: that of k1 is zero in expectation.
    """
    if estimator not in ESTIMATORS:
        raise InputError(f'there is no estimator "{estimator}" of the KL: give one of {", ".join(ESTIMATORS)}')
    log_ratio = reference_log_prob - log_prob
    if estimator == "k1":
        return -log_ratio
    return 0.5 * log_ratio.square() if estimator == "k2" else log_ratio.expm1() - log_ratio


def feature_kl(mean: Tensor, std: Tensor, reference_mean: Tensor, reference_std: Tensor) -> Tensor:
    """Return the KL of diagonal Gaussians of features, summed over the last axis (WAM-RL, arXiv 2606.17906)."""
    return gaussian_kl(Gaussian(mean, std), Gaussian(reference_mean, reference_std)).sum(dim=-1)
