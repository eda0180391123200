"""The step predictor held against steps that others published, and against steps of this machine's CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from wamlab.recipes.config import Recipe
from wamlab.recipes.methods import find_method
from wamlab.recipes.plan import predict
from wamlab.recipes.published import droid_5b_lora_1gpu, droid_14b_8gpu, libero_5b_8gpu
from wamlab.speed.peaks import find_peak
from wamlab.speed.roofline import Achieved


@dataclass(frozen=True)
class Point:
    """One published step: DROID, three views, 33 frames, 8 H100."""

    label: str
    recipe: Callable[[], Recipe]
    method: str
    micro_batch: int
    step_s: int | float
    is_fitted: bool = False  # a constant was fitted to it
    is_bound: bool = True  # one of the six that the predictor must meet; others are told


def droid_5b() -> Recipe:
    """Return the benchmark's 5 B network: all of it trained, DROID's three views on 160 x 320 px."""
    base, droid = libero_5b_8gpu(), droid_5b_lora_1gpu()
    model = replace(base.model, actions_per_block=droid.window.actions_per_block)
    return replace(base, name="droid_5b", robot=droid.robot, window=droid.window, model=model)


# RLinf, docs/source-en/rst_source/examples/embodied/sft_dreamzero.rst, "Training Acceleration", June 2026; the last
# three from its pull requests 1115 and 1138 (older versions of the same code).
POINTS = (
    Point("14B official", droid_14b_8gpu, "official", 1, 18.0),
    Point("14B FSDP2", droid_14b_8gpu, "fsdp2-base", 1, 9.0),
    Point("14B RLinf", droid_14b_8gpu, "rlinf", 1, 6.7),
    Point("5B official", droid_5b, "official", 32, 30.0, is_fitted=True),
    Point("5B FSDP2", droid_5b, "fsdp2-base", 1, 1.8, is_fitted=True),
    Point("5B RLinf", droid_5b, "rlinf", 32, 7.2),
    Point("5B RLinf, PR 1115", droid_5b, "rlinf", 1, 1.2, is_bound=False),
    Point("5B RLinf, PR 1115", droid_5b, "rlinf", 2, 1.3, is_bound=False),
    Point("5B RLinf, PR 1138", droid_5b, "rlinf", 8, 8 / 3.6, is_bound=False),
)


def predict_point(point: Point, achieved: Achieved | None = None, *, flops_scale: int | float = 1.0) -> float:
    """Return the seconds predicted for a published step."""
    found = predict(
        point.recipe(), 8, find_peak("H100"), find_method(point.method), achieved=achieved,
        micro_batch=point.micro_batch, flops_scale=flops_scale,
    )  # fmt: skip
    return found.time.step_s


def fit_constants(points: tuple[Point, ...] = POINTS) -> Achieved:
    """Fit the two free constants to the two fitted points, one by bisection inside the other."""
    slow, small = (point for point in points if point.is_fitted)

    def with_host(half: int | float) -> Achieved:
        return _bisected(
            lambda host: Achieved(convolution_half_gflop=half, host_us=host),
            lambda achieved: predict_point(small, achieved) - small.step_s, 1.0, 200.0,
        )  # fmt: skip

    return _bisected(with_host, lambda achieved: predict_point(slow, achieved) - slow.step_s, 1.0, 2000.0)


def _bisected(
    make: Callable[[float], Achieved], excess: Callable[[Achieved], float], low: int | float, high: int | float
) -> Achieved:
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(make(middle)) > 0 else (middle, high)
    return make((low + high) / 2)


def expected_error() -> float:
    """Return the largest relative error over those of the six published steps that were not fitted."""
    return max(abs(predict_point(p) / p.step_s - 1) for p in POINTS if p.is_bound and not p.is_fitted)


def backtest_figures() -> list[dict[str, Any]]:
    """Return published and predicted seconds of every step, for JSON."""
    return [
        {"step": p.label, "micro_batch": p.micro_batch, "published_s": p.step_s, "predicted_s": predict_point(p),
         "is_fitted": p.is_fitted, "is_bound": p.is_bound}
        for p in POINTS
    ]  # fmt: skip


def backtest_table(achieved: Achieved | None = None) -> str:
    """Return every published step beside its prediction."""
    lines = [f"{'published on 8xH100':20} {'batch':>5} {'published s':>12} {'predicted s':>12} {'error':>7}"]
    for point in POINTS:
        found = predict_point(point, achieved)
        role = "fitted" if point.is_fitted else "" if point.is_bound else "older version"
        lines.append(
            f"{point.label:20} {point.micro_batch:5} {point.step_s:12.2f} {found:12.2f} "
            f"{found / point.step_s - 1:+7.0%}  {role}".rstrip()
        )
    return "\n".join(lines)
