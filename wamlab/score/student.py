"""Student's t and the normal distribution, without a statistics package."""

from __future__ import annotations

import math
from statistics import NormalDist

from wamlab.errors import InputError

NORMAL = NormalDist()


def t_cdf(t: float, freedom: int) -> float:
    """Return P(T <= t) of Student's distribution with ``freedom`` degrees of freedom.

    By the incomplete beta function (Abramowitz and Stegun 26.7.1); raises InputError below one degree of freedom.
    """
    if freedom < 1:
        raise InputError(f"Student's distribution needs at least 1 degree of freedom, got {freedom}")
    if math.isnan(t):
        return math.nan
    if math.isinf(t):
        return float(t > 0)
    tail = incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


def t_quantile(probability: float, freedom: int) -> float:
    """Return the t below which ``probability`` of the distribution lies."""
    if not 0 < probability < 1:
        raise InputError(f"a quantile needs a probability between 0 and 1, got {probability}")
    low, high = -1.0, 1.0
    while t_cdf(low, freedom) > probability:
        low *= 2
    while t_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b) for x in 0..1."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, its mirror image does not
        return 1 - incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """Evaluate the continued fraction of I_x(a, b) (Abramowitz and Stegun 26.5.8) by Lentz's method."""
    tiny = 1e-300
    value, upper, lower = 1.0, 1.0, 0.0
    for step in range(1, 1000):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / (1 + term * lower or tiny)
        upper = 1 + term / upper or tiny
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            break
    return value
