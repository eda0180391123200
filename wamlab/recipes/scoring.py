"""Everything that ``wamlab score`` measures of a run, as one mapping, and the page it becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.checkpoint import load_weights
from wamlab.checkpoint_folder import list_checkpoints, read_state
from wamlab.errors import InputError
from wamlab.lab.plots import strip_png
from wamlab.lab.records import Record, write_json
from wamlab.lab.run import Run, read_evaluations
from wamlab.lab.score_page import RESULT, rate_text, write_score_page
from wamlab.recipes.build import Workbench
from wamlab.recipes.environments import check_fit
from wamlab.recipes.episodes import PlayOrder, film_episodes, measure_one_robot, play_tasks
from wamlab.recipes.history import HistoryPolicy
from wamlab.recipes.imagine import Rolled, roll
from wamlab.recipes.open_loop import HeldOutClips, copied, loss_intervals, read_clips
from wamlab.recipes.policy import load_policy
from wamlab.score.closed_loop import ClosedLoop, percentiles_ms
from wamlab.score.open_loop import action_figures, figures_by, hardest_constant, video_figures
from wamlab.score.perceptual import measure_lpips
from wamlab.score.success import wilson_interval

Say = Callable[[str], Any]
NUM_STRIPS = 3  # clips shown as pictures


@dataclass(frozen=True)
class ScoreOrder:
    """How much is measured."""

    num_clips: int = 128  # held-out episodes, half to choose a checkpoint by, half to report
    num_blocks: int = 4  # of the horizon, as far as episodes are long enough
    play: PlayOrder | None = None  # closed loop, if any
    has_lpips: bool = False
    data: Path | None = None  # where the dataset lies, if not where the run's config says


def score_run(run: Run, order: ScoreOrder, *, say: Say = print) -> Record:
    """Score a run's best stored checkpoint, write ``score.json`` and ``score.html`` into its folder, return figures.

    The checkpoint is chosen by the flow loss of averaged weights on one half of the held-out episodes; the figures are
    of the other half. Closed-loop episodes choose nothing.
    """
    policy = load_scored(run, order.data)
    bench, num_ticks = policy.bench, policy.bench.recipe.window.actions_per_block
    if order.play is not None and (order.play.num_executed or 1) > num_ticks:
        raise InputError(f"--executed is {order.play.num_executed}: a chunk of {run.name} has {num_ticks} ticks")
    for task in order.play.tasks if order.play is not None else ():
        check_fit(policy, task)
    held_out = read_clips(bench, order.num_clips, order.num_blocks)
    if len(held_out.clips) < 4:
        raise InputError(f"{len(held_out.clips)} held-out episodes are too few to score on: hold out four or more")
    choosing, reported = held_out.half(0), held_out.half(1)
    say(f"{len(reported.clips)} held-out episodes, {held_out.num_blocks} blocks each")
    checkpoints = rate_checkpoints(run, bench, choosing)
    chosen = min(checkpoints, key=lambda found: found["loss"].value)
    say(f"chosen of {len(checkpoints)} checkpoints: step {chosen['step']:,}, held-out loss {chosen['loss']}")
    load_weights(run.checkpoints / chosen["name"], bench.net, is_ema=True)
    folder = run.folder / "score"
    folder.mkdir(exist_ok=True)
    score: Record = {"run": run.name, "step": chosen["step"], "checkpoints": checkpoints}
    score |= open_loop(bench, reported, folder, has_lpips=order.has_lpips)
    score["swing"] = swing_of(read_evaluations(run))
    if order.play is not None:
        score["closed_loop"] = closed_loop(run, policy, order.play, checkpoints, chosen["name"], folder, say)
    write_json(run.folder / RESULT, score)
    return score | {"page": write_score_page(run.folder)}


def load_scored(run: Run, data: Path | None = None, checkpoint: Path | None = None) -> HistoryPolicy:
    """Load a run's policy beside its dataset; the recipe's ways to be fast do not matter here."""
    loaded = load_policy(run, checkpoint=checkpoint)
    recipe = loaded.bench.recipe
    if data is not None:
        if recipe.data.roots:
            raise InputError(
                f"{run.name} was trained on {len(recipe.data.roots)} datasets: they must lie where it says"
            )
        recipe = replace(recipe, data=replace(recipe.data, root=data))
    if not recipe.data.roots and not recipe.data.root.is_dir():
        raise InputError(f"{recipe.data.root}, the dataset of {run.name}, is not there: say where with --data")
    bench = Workbench(recipe)
    vars(bench)["net"] = loaded.bench.net
    return HistoryPolicy(bench, loaded.normalizers)


def rate_checkpoints(run: Run, bench: Workbench, held_out: HeldOutClips) -> list[Record]:
    """Return every stored checkpoint's flow loss on held-out clips, with averaged weights where there are any."""
    found = []
    for checkpoint in list_checkpoints(run.checkpoints):
        load_weights(checkpoint, bench.net, is_ema=True)
        state = read_state(checkpoint)
        loss = loss_intervals(bench, held_out, bench.recipe.evaluation.noise_levels)["mean"]
        found.append({"name": checkpoint.name, "step": state["step"], "has_ema": state["has_ema"], "loss": loss})
    if not found:
        raise InputError(f"{run.folder} holds no finished checkpoint to score")
    return found


def open_loop(bench: Workbench, held_out: HeldOutClips, folder: Path, *, has_lpips: bool = False) -> Record:
    """Return all open-loop figures and write the pictures that the page shows."""
    has_history = bench.recipe.window.max_blocks > 1
    truth = held_out.truth
    rolled = {"history": roll(bench, held_out.clips, "history"), "own frames": roll(bench, held_out.clips, "own")}
    if has_history:
        rolled["newest frame"] = roll(bench, held_out.clips, "newest")
    baselines = {
        "mean": hardest_constant(truth),
        "repeat": held_out.repeated,
        "zero": np.zeros_like(truth.actions),
    }
    window = bench.recipe.window
    pictures = {name: found.frames for name, found in rolled.items()}
    pictures |= {"copy": copied(held_out, window.frames_per_block), "copy first": copied(held_out)}
    actions = {name: found.actions for name, found in rolled.items()} | baselines
    main = rolled["history"]
    figures: Record = {
        "num_clips": len(held_out.clips),
        "num_blocks": held_out.num_blocks,
        "actions_per_block": window.actions_per_block,
        "frames_per_block": window.frames_per_block,
        "has_history": has_history,
        "max_blocks": window.max_blocks,
        "actions": {name: asdict(action_figures(predicted, truth)) for name, predicted in actions.items()},
        "video": {name: asdict(video_figures(frames, truth)) for name, frames in pictures.items()},
        "loss_by_level": loss_intervals(bench, held_out, bench.recipe.evaluation.noise_levels),
        "by_task": figures_by(truth.tasks, truth, main.actions, main.frames, baselines),
        "by_embodiment": figures_by(truth.embodiments, truth, main.actions, main.frames, baselines),
    }
    if has_lpips:
        found = measure_lpips(main.frames[:, 1:], truth.frames[:, 1:])
        figures["lpips"] = found if isinstance(found, str) else float(found.mean())
    write_strips(folder, held_out, rolled)
    return figures


def write_strips(folder: Path, held_out: HeldOutClips, rolled: dict[str, Rolled]) -> None:
    """Draw real frames over those predicted from real ones and those predicted from the network's own."""
    for old in folder.glob("strip_*.png"):
        old.unlink()
    chosen = np.linspace(0, len(held_out.clips) - 1, NUM_STRIPS).round().astype(int)
    num_frames = held_out.truth.frames.shape[1]
    times = np.unique(np.linspace(0, num_frames - 1, 7).round().astype(int)).tolist()
    for number, index in enumerate(dict.fromkeys(chosen.tolist())):
        sources = {"real": held_out.truth.frames, "block ahead": rolled["history"].frames}
        sources["free run"] = rolled["own frames"].frames
        rows = [[frames[index, t] for t in times] for frames in sources.values()]
        labels = ["seen" if t == 0 else f"frame {t}" for t in times]
        (folder / f"strip_{number}.png").write_bytes(strip_png(rows, list(sources), labels, min_height_px=64))


def swing_of(evaluations: list[Record]) -> Record:
    """Return how figures moved from one evaluation to the next over the later half of training, at most, relative."""
    late = evaluations[len(evaluations) // 2 :]
    moves: Record = {"evaluations": evaluations}
    for key in ("held_out_loss", "action_error"):
        values = [e[key] for e in late if e.get(key)]
        moves[key] = max((abs(b / a - 1) for a, b in pairwise(values)), default=None)
    return moves


def closed_loop(
    run: Run, policy: HistoryPolicy, order: PlayOrder, checkpoints: list[Record], chosen: str, folder: Path, say: Say
) -> Record:
    """Play synchronously, asynchronously and with the other stored checkpoints, all on the same episodes."""
    modes: Record = {}
    played = play_tasks(policy, order)
    modes["synchronous"] = figures_of(played)
    say(f"synchronous: {rate_text(modes['synchronous']['success'])} succeed")
    modes["asynchronous"] = figures_of(play_tasks(policy, order, is_asynchronous=True))
    say(f"asynchronous: {rate_text(modes['asynchronous']['success'])} succeed")
    found: Record = {"modes": modes, "latency": measure_one_robot(policy, order), "order": asdict(order)}
    found["films"] = film_episodes(policy, played, order, folder)
    by_checkpoint = []
    for checkpoint in checkpoints:
        if checkpoint["name"] == chosen:
            success = modes["synchronous"]["success"]
        else:
            load_weights(run.checkpoints / checkpoint["name"], policy.bench.net, is_ema=True)
            success = figures_of(play_tasks(policy, order))["success"]
        by_checkpoint.append({"step": checkpoint["step"], **success})
    load_weights(run.checkpoints / chosen, policy.bench.net, is_ema=True)
    return found | {"by_checkpoint": by_checkpoint}


def figures_of(played: dict[str, ClosedLoop]) -> Record:
    """Return success of all episodes and of each family, times to success in ticks, calls and waits."""
    loops = list(played.values())
    return {
        "success": success_of(sum(loop.num_successes for loop in loops), sum(len(loop.episodes) for loop in loops)),
        "by_task": [
            {
                "task": family,
                **success_of(loop.num_successes, len(loop.episodes)),
                "ticks_to_success": quartiles(loop.ticks_to_success),
            }
            for family, loop in played.items()
        ],
        "num_executed": loops[0].num_executed,
        "num_calls": sum(episode.num_calls for loop in loops for episode in loop.episodes),
        "batched_latency_ms": percentiles_ms([s for loop in loops for s in loop.latencies_s]),
        "episodes": [asdict(episode) for loop in loops for episode in loop.episodes],
    }


def success_of(num_successes: int, num_episodes: int) -> Record:
    """Return a success rate with its Wilson interval."""
    low, high = wilson_interval(num_successes, num_episodes)
    return {"rate": num_successes / num_episodes, "low": low, "high": high, "num_episodes": num_episodes}


def quartiles(values: np.ndarray) -> list[float] | None:
    """Return the 25th, 50th and 75th percentile; None of nothing."""
    return np.percentile(values, [25, 50, 75]).tolist() if len(values) else None
