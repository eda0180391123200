"""Whether two runs, or two recipes over training seeds, are equivalent: success, open-loop errors, loss curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.errors import InputError
from wamlab.lab.records import Record
from wamlab.lab.run import Run, read_metrics
from wamlab.recipes.environments import check_fit
from wamlab.recipes.episodes import PlayOrder, play_tasks
from wamlab.recipes.history import HistoryPolicy
from wamlab.recipes.imagine import roll
from wamlab.recipes.open_loop import HeldOutClips, read_clips
from wamlab.recipes.scoring import load_scored
from wamlab.score.curves import CurveParity, compare_curves, smoothed
from wamlab.score.parity import ALPHA, Parity, Verdict, compare_errors, compare_means, compare_paired_rates
from wamlab.score.sample_size import error_pairs_needed, pairs_needed, seeds_needed

Say = Callable[[str], Any]
# Spreads assumed before anything is measured; what a comparison needs grows with their squares.
DISCORDANCE = 0.2  # share of episodes that end differently under equal policies
ERROR_SPREAD = 0.3  # of paired errors of one episode, over the mean error
SEED_SPREAD = 0.03  # of success between training seeds, of pairs
MIN_CURVES = 4  # training seeds below which sign flips cannot judge curves


@dataclass(frozen=True)
class ParityOrder:
    """The margins, stated first, and how much is played and read."""

    margin: float = 0.1  # of success
    error_margin: float = 0.05  # of action errors, relative
    curve_margin: float = 0.01  # of log losses
    alpha: float = ALPHA
    play: PlayOrder | None = None
    num_clips: int = 200
    data: Path | None = None


@dataclass(frozen=True)
class Pair:
    """What was measured of a baseline and a candidate on the same episodes."""

    successes: tuple[np.ndarray, np.ndarray] | None  # bool [n]
    errors: tuple[np.ndarray, np.ndarray]  # float [n], mean absolute error of one held-out episode


def plan_text(order: ParityOrder, num_pairs: int) -> str:
    """Say the margins and what verdicts within them need, before anything is measured."""
    success = pairs_needed(DISCORDANCE, margin=order.margin, alpha=order.alpha)
    errors = error_pairs_needed(ERROR_SPREAD, margin=order.error_margin, alpha=order.alpha)
    seeds = seeds_needed(SEED_SPREAD, margin=order.margin, alpha=order.alpha)
    lines = [
        f"margins: {order.margin:g} of success, {order.error_margin:.0%} of action error, "
        f"{order.curve_margin:.0%} of training loss",
        f"success of these checkpoints needs {success}, if {DISCORDANCE:.0%} end differently",
    ]
    if order.play is not None:
        lines[-1] += f"; {order.play.num_episodes * len(order.play.tasks):,} will be played"
    lines.append(f"action error needs {errors}, if paired errors spread by {ERROR_SPREAD:.0%}")
    lines.append(f"a claim about recipes needs {seeds}, if seeds spread by {SEED_SPREAD:g}; {num_pairs} are given")
    return "\n".join(lines)


def compare_runs(
    baselines: Sequence[Run], candidates: Sequence[Run], order: ParityOrder, *, say: Say = print
) -> Record:
    """Compare runs pair by pair, the newest checkpoints with averaged weights; return verdicts with their numbers.

    One pair is judged by its episodes, and the claim is about these checkpoints; several pairs of training seeds are
    the units of a claim about recipes. The whole is "different" where a part is, at alpha shared by the parts, and
    "equivalent" where all parts are. Raises InputError for runs whose data or units differ.
    """
    curves = read_curves(baselines, candidates)
    pairs = []
    for baseline, candidate in zip(baselines, candidates, strict=True):
        pairs.append(_measure(baseline, candidate, order))
        say(f"{baseline.name} | {candidate.name}: {_pair_text(pairs[-1])}")
    found: Record = {
        "margins": {"success": order.margin, "error": order.error_margin, "curve": order.curve_margin},
        "baselines": [run.name for run in baselines],
        "candidates": [run.name for run in candidates],
        "claim": "recipes, by training seed" if len(pairs) > 1 else "these checkpoints",
        "pairs": [_pair_record(pair) for pair in pairs],
    }
    parts: dict[str, Parity | CurveParity] = {}
    if order.play is not None:
        parts["success"] = _judge_success(pairs, order)
    parts["action error"] = _judge_errors(pairs, order)
    found["curves"] = curve_gap(*curves)
    if len(pairs) >= MIN_CURVES:
        parts["training loss"] = compare_curves(*curves, margin=order.curve_margin, alpha=order.alpha)
    found["parts"] = {name: _part_record(part) for name, part in parts.items()}
    return found | {"verdict": overall(list(parts.values()), order.alpha)}


def overall(parts: Sequence[Parity | CurveParity], alpha: float) -> Verdict:
    """Judge the whole: equivalence of all parts needs no correction, a difference of any shares alpha among them."""
    ends = [part.end if isinstance(part, CurveParity) else part for part in parts]
    is_different = [
        part.verdict == "different" and (isinstance(part, CurveParity) or end.p_different * len(parts) < alpha)
        for part, end in zip(parts, ends, strict=True)
    ]
    if any(is_different):
        return "different"
    return "equivalent" if all(part.verdict == "equivalent" for part in parts) else "not enough evidence"


def parity_text(found: Record) -> str:
    """Return the verdicts as text."""
    lines = [f"{name}: {part['sentence']}" for name, part in found["parts"].items()]
    gap = found["curves"]
    lines.append(
        f"smoothed training loss: at most {gap['largest']:.2%} apart, in step {gap['step']}; {gap['end']:+.2%} at last"
    )
    if "training loss" not in found["parts"]:
        lines.append(f"the band around loss curves needs {MIN_CURVES} training seeds, {len(found['pairs'])} are given")
    return "\n".join([*lines, f"{found['claim']}: {found['verdict']}"])


def read_curves(baselines: Sequence[Run], candidates: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Return the training losses [seed, step] of both sides, over the steps that all runs took."""
    told = [[read_metrics(run)[0] for run in runs] for runs in (baselines, candidates)]
    sides = [[[r["loss"] for r in records if r.get("loss") is not None] for records in side] for side in told]
    length = min(len(losses) for side in sides for losses in side)
    if length < 2:
        raise InputError("the runs to compare have no two common training steps in metrics.jsonl")
    base, other = (np.array([losses[:length] for losses in side], dtype=float) for side in sides)
    if min(base.min(), other.min()) <= 0:
        raise InputError("the runs to compare have training losses that are not above 0: their logarithms have no gap")
    return base, other


def curve_gap(baseline: np.ndarray, candidate: np.ndarray) -> Record:
    """Describe how far smoothed log losses lie apart, mean over seeds, after a start in which little is averaged."""
    logs = [smoothed(np.log(losses), 0.9) for losses in (baseline, candidate)]
    gap = (logs[1] - logs[0]).mean(axis=0)
    first = min(9, len(gap) - 1)
    place = first + int(np.abs(gap[first:]).argmax())
    return {"largest": float(abs(gap[place])), "step": place + 1, "end": float(gap[-1])}


def _measure(baseline: Run, candidate: Run, order: ParityOrder) -> Pair:
    policies = [load_scored(run, order.data) for run in (baseline, candidate)]
    for task in order.play.tasks if order.play is not None else ():
        for policy in policies:
            check_fit(policy, task)
    held_out = _common_clips(policies, order.num_clips)
    errors = [_episode_errors(policy, held_out) for policy in policies]
    successes = None
    if order.play is not None:
        played = [play_tasks(policy, order.play) for policy in policies]
        first, second = (np.concatenate([loop.is_success for loop in loops.values()]) for loops in played)
        successes = first, second
    return Pair(successes, (errors[0], errors[1]))


def _common_clips(policies: Sequence[HistoryPolicy], num_clips: int) -> HeldOutClips:
    """Read clips of episodes that both runs hold out; refuse errors in different units."""
    benches = [policy.bench for policy in policies]
    both = list(zip(*(bench.parts for bench in benches), strict=False))
    if len({len(bench.parts) for bench in benches}) > 1 or any(
        a.dataset.fingerprint() != b.dataset.fingerprint() for a, b in both
    ):
        raise InputError("the runs were trained on different data, so no held-out episodes are common to them")
    windows = {bench.recipe.window for bench in benches}
    if len(windows) > 1 or any(
        a.held_out.normalizers.to_dict() != b.held_out.normalizers.to_dict() or a.held_out.robot != b.held_out.robot
        for a, b in both
    ):
        raise InputError("the runs differ in their robot, window or normalisation, so their errors have other units")
    common = [sorted(set(a.held_out.episodes) & set(b.held_out.episodes)) for a, b in both]
    if min(map(len, common)) < 2:
        raise InputError("the runs hold out no two common episodes: compare runs of the same train.seed")
    return read_clips(benches[0], num_clips, benches[0].recipe.window.max_blocks, episodes=common)


def _episode_errors(policy: HistoryPolicy, held_out: HeldOutClips) -> np.ndarray:
    """Return the mean absolute error of each clip, one an episode."""
    truth = held_out.truth
    error = np.abs(roll(policy.bench, held_out.clips, "history").actions - truth.actions)
    return np.where(truth.mask, error, 0).sum(axis=(1, 2)) / np.maximum(truth.mask.sum(axis=(1, 2)), 1)


def _judge_success(pairs: Sequence[Pair], order: ParityOrder) -> Parity:
    sides = [[pair.successes[side] for pair in pairs if pair.successes is not None] for side in (0, 1)]
    if len(pairs) == 1:
        return compare_paired_rates(sides[0][0], sides[1][0], margin=order.margin, alpha=order.alpha)
    rates = (np.array([played.mean() for played in side]) for side in sides)
    return compare_means(*rates, margin=order.margin, alpha=order.alpha, metric="success")


def _judge_errors(pairs: Sequence[Pair], order: ParityOrder) -> Parity:
    if len(pairs) == 1:
        return compare_errors(*pairs[0].errors, margin=order.error_margin, alpha=order.alpha)
    means = (np.array([pair.errors[side].mean() for pair in pairs]) for side in (0, 1))
    return replace(compare_errors(*means, margin=order.error_margin, alpha=order.alpha), units="paired seeds")


def _part_record(part: Parity | CurveParity) -> Record:
    values = asdict(part)
    for name in ("envelope", "difference", "low", "high"):
        if isinstance(part, CurveParity):
            del values[name]  # a number a step
    return values | {"sentence": part.sentence}


def _pair_record(pair: Pair) -> Record:
    record: Record = {"errors": [float(side.mean()) for side in pair.errors], "num_clips": len(pair.errors[0])}
    if pair.successes is not None:
        first, second = pair.successes
        record |= {"success": [float(first.mean()), float(second.mean())], "num_episodes": len(first)}
        record["end_differently"] = float((first != second).mean())
    return record


def _pair_text(pair: Pair) -> str:
    record = _pair_record(pair)
    text = "action error {:.4f} | {:.4f}".format(*record["errors"]) + f" of {record['num_clips']} episodes"
    if "success" in record:
        text += ", success {:.1%} | {:.1%}".format(*record["success"])
        text += f" of {record['num_episodes']}, {record['end_differently']:.1%} end differently"
    return text
