"""Latency of a chunk against the quality of its actions: ways to sample with fewer evaluations, or cheaper ones."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from wamlab.data.robot import short_name
from wamlab.errors import InputError
from wamlab.lab.chart import Chart, Line, line_chart
from wamlab.lab.run import Run
from wamlab.model.block import CrossKeys
from wamlab.model.kv_cache import History
from wamlab.model.sampler import SamplerConfig
from wamlab.model.wam import WorldActionModel
from wamlab.recipes.build import Workbench
from wamlab.recipes.evaluate import predict_window, read_held_out
from wamlab.recipes.playing import play_task
from wamlab.recipes.policy import WamPolicy, load_policy
from wamlab.score.action import measure_action_errors
from wamlab.score.success import SuccessRate
from wamlab.sim.vector import TabletopVector
from wamlab.speed.compare import compare
from wamlab.speed.compile import compiled
from wamlab.train import autocast
from wamlab.types import Velocity

PLAY_SEED = 1_000_000  # recordings use the seeds from 0 up


class UncachedNet:
    """A network that projects the context and takes in all frames anew for every evaluation: a baseline."""

    def __init__(self, net: WorldActionModel) -> None:
        self.net, self.config = net, net.config
        self._context: tuple[Any, ...] = ()
        self._seen: list[tuple[Any, ...]] = []

    def start(self, *context: Any) -> History:
        self._context, self._seen = context, []
        return self.net.start(*context)

    def observe(self, history: History, *seen: Any) -> History:
        self._seen.append(seen)
        return self.net.observe(history, *seen)

    def denoise(self, history: History, *inputs: Any) -> Velocity:
        again = self.net.start(*self._context)
        for seen in self._seen:
            again = self.net.observe(again, *seen)
        return self.net.denoise(again, *inputs)


class TwoCallNet:
    """A network that evaluates the streams of guidance one after the other: a baseline."""

    def __init__(self, net: WorldActionModel) -> None:
        self.net, self.config = net, net.config
        self.start, self.observe = net.start, net.observe

    def denoise(self, history: History, latents: Tensor, *inputs: Any) -> Velocity:
        found = [
            self.net.denoise(_stream(history, slice(start, start + len(latents))), latents, *inputs)
            for start in range(0, len(history.cross[0].text_key), len(latents))
        ]
        return Velocity(torch.cat([v.video for v in found]), torch.cat([v.actions for v in found]))


FORMS: dict[str, Callable[[WorldActionModel], Any]] = {  # none changes the numbers beyond rounding
    "as served": lambda net: net,
    "nothing cached": UncachedNet,
    "two calls": TwoCallNet,
    "compiled": lambda net: compiled(copy.deepcopy(net)),
}


@dataclass(frozen=True)
class Way:
    """One way to sample a chunk."""

    name: str
    sampler: SamplerConfig
    form: str = "as served"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InputError(f'there is no form "{self.form}": give one of {", ".join(FORMS)}')


_SIXTEEN = SamplerConfig(num_steps=16, solver="unipc")
_GUIDED = SamplerConfig(num_steps=2, guidance_scale=2.0)
WAYS = (  # the first one is the baseline
    Way("16 steps, nothing cached", _SIXTEEN, "nothing cached"),
    Way("16 steps", _SIXTEEN),
    Way("16 steps, compiled", _SIXTEEN, "compiled"),
    Way("8 of 16", replace(_SIXTEEN, num_evaluations=8)),
    Way("5 of 16", replace(_SIXTEEN, num_evaluations=5)),
    Way("16, dynamic skips", replace(_SIXTEEN, has_dynamic_skips=True)),
    Way("4 Euler steps", SamplerConfig(num_steps=4)),
    Way("2 Euler steps", SamplerConfig(num_steps=2)),
    Way("2 Euler steps, compiled", SamplerConfig(num_steps=2), "compiled"),
    Way("1 step", SamplerConfig(num_steps=1)),
    Way("2 Euler steps, guided in two calls", _GUIDED, "two calls"),
    Way("2 Euler steps, guided in one call", _GUIDED),
)


@dataclass(frozen=True)
class LatencyPoint:
    """What one way costs and what its actions are worth."""

    way: Way
    latency_ms: float  # of a chunk of one session: median CPU time on one thread, encoding included
    speedups: tuple[float, ...]  # over the first way, round by round
    first_call_s: float  # compilation included
    action_error: float  # open loop, mean absolute, normalised units
    success: SuccessRate | None  # closed loop; None if no episode was played
    difference: float  # of actions, from the same sampler as it is served: largest absolute, robot units

    def row(self) -> dict[str, Any]:
        """Return the line of a table."""
        success = self.success
        return {
            "way": self.way.name,
            "ms a chunk": self.latency_ms,
            "speed-up": statistics.median(self.speedups),
            "lowest": min(self.speedups),
            "highest": max(self.speedups),
            "action error": self.action_error,
            "success": None if success is None else success.rate,
            "95 % interval": None if success is None else f"{success.low:.0%} to {success.high:.0%}",
            "differs by": self.difference,
        }


def measure_latency(
    run: Run,
    ways: Sequence[Way] = WAYS,
    *,
    root: Path | None = None,
    family: str = "reach",
    num_clips: int = 64,
    num_episodes: int = 100,
    num_rounds: int = 9,
    budget_s: float | int = 120.0,
) -> list[LatencyPoint]:
    """Measure every way of sampling with one run's weights; quality once for each sampler.

    Latencies come from interleaved rounds; open loop from held-out clips of the run's dataset (``root``, if it has
    moved); closed loop from tabletop episodes of the same seeds. Raises InputError if no way is given.
    """
    if not ways:
        raise InputError("there is nothing to measure: give at least one way")
    loaded = load_policy(run)
    net, recipe = loaded.bench.net, loaded.bench.recipe
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, num_clips=num_clips))
    if root is not None:
        recipe = replace(recipe, data=replace(recipe.data, root=root))
    held_out = read_held_out(Workbench(recipe))

    def policy_of(way: Way) -> WamPolicy:
        bench = Workbench(replace(recipe, sampler=replace(way.sampler, when_full=recipe.sampler.when_full)))
        bench.__dict__["net"] = nets[way.form]
        return WamPolicy(bench, loaded.normalizers)

    nets = {form: FORMS[form](net) for form in {"as served", *(way.form for way in ways)}}
    policies = {way.name: policy_of(way) for way in ways}
    served = {way.sampler: policy_of(replace(way, form="as served")) for way in ways}
    qualities = {
        sampler: (_action_error(policy.bench, held_out), _success(policy, family, num_episodes))
        for sampler, policy in served.items()
    }
    seen = _look(loaded, family)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls = {name: lambda policy=policy: policy(seen) for name, policy in policies.items()}
        timings = compare(calls, num_rounds=num_rounds, budget_s=budget_s, device=loaded.bench.device)
        differences = {
            way.name: _difference(policies[way.name], served[way.sampler], seen) if way.form != "as served" else 0.0
            for way in ways
        }
    finally:
        torch.set_num_threads(num_threads)
    return [
        LatencyPoint(
            way,
            1000 * statistics.median(timings[way.name].seconds),
            timings[way.name].speedups,
            timings[way.name].warmup_s,
            *qualities[way.sampler],
            differences[way.name],
        )
        for way in ways
    ]


def latency_chart(points: Sequence[LatencyPoint], *, width: int = 880) -> Chart:
    """Draw the action error over the latency of each way as dots: UniPC's, Euler's, guided ones."""
    groups: dict[str, list[LatencyPoint]] = {"UniPC": [], "Euler": [], "guided": []}
    for point in sorted(points, key=lambda point: point.latency_ms):
        sampler = point.way.sampler
        kind = "guided" if sampler.guidance_scale != 1 else "UniPC" if sampler.solver == "unipc" else "Euler"
        groups[kind].append(point)
    lines = [
        Line(
            kind,
            color,
            np.array([point.latency_ms for point in group]),
            np.array([point.action_error for point in group]),
            is_dotted=True,
        )
        for (kind, group), color in zip(groups.items(), ("blue", "orange", "green"), strict=True)
        if group
    ]
    return line_chart(lines, "action error over latency", width=width, x_label="ms a chunk", has_zero=True)


def _action_error(bench: Workbench, held_out: Any) -> float:
    with torch.no_grad(), autocast(bench.device, has_bf16=bench.recipe.train.has_bf16):
        sampled = [predict_window(bench, batch, seed=i)[1] for i, batch in enumerate(held_out.batches)]
    actions = torch.cat(sampled).float().cpu().numpy()
    recorded, mask = (np.stack([getattr(c, name) for c in held_out.clips]) for name in ("actions", "action_mask"))
    return measure_action_errors(actions, recorded, mask, np.zeros(recorded.shape[-1], np.float32)).model


def _success(policy: WamPolicy, family: str, num_episodes: int) -> SuccessRate | None:
    return play_task(policy, family, range(PLAY_SEED, PLAY_SEED + num_episodes)) if num_episodes else None


def _look(policy: WamPolicy, family: str) -> Any:
    """Return what one tabletop shows at its beginning."""
    robot = policy.bench.recipe.robot
    size, cameras = (robot.view_height_px, robot.view_width_px), tuple(map(short_name, robot.cameras))
    env = TabletopVector(1, family, size=size, cameras=cameras)
    env.reset(seed=[PLAY_SEED])
    return env.observation()


def _difference(policy: WamPolicy, other: WamPolicy, seen: Any) -> float:
    """Return by how much two policies' actions differ for the same noise."""
    policy.num_calls = other.num_calls = 0
    return float(np.abs(policy(seen) - other(seen)).max())


def _stream(history: History, rows: slice) -> History:
    """Return some streams of a history, e.g. those with the instruction."""

    def cut(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[rows]

    cross = tuple(
        CrossKeys(k.text_key[rows], k.text_value[rows], k.text_bias, cut(k.image_key), cut(k.image_value))
        for k in history.cross
    )
    past = history.past and tuple((key[rows], value[rows]) for key, value in history.past)
    return replace(history, cross=cross, past=cast(Any, past))
