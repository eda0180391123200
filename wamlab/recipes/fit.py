"""The main job: train a recipe into a run folder, evaluating and checkpointing on the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch.optim import Optimizer
from tqdm.auto import tqdm

from wamlab.checkpoint import load_checkpoint, write_checkpoint
from wamlab.checkpoint_folder import list_checkpoints, newest_checkpoint
from wamlab.errors import InputError, Stopped
from wamlab.lab.control import WISHES, Wishes, forget_wish
from wamlab.lab.lock import this_job
from wamlab.lab.plots import strip_png
from wamlab.lab.records import append_line, plain, read_json, write_json
from wamlab.lab.report import flattened
from wamlab.lab.run import Run, create_run, newest_run, open_run, read_evaluations, read_metrics
from wamlab.model.weights import fingerprint
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe
from wamlab.recipes.evaluate import Evaluation, HeldOut, evaluate, read_held_out
from wamlab.recipes.guarded import guard_of
from wamlab.recipes.parts import fingerprint_of
from wamlab.recipes.utilization import utilization_of
from wamlab.speed.clock import Clock
from wamlab.speed.step_rule import StepRule
from wamlab.train import Ema
from wamlab.types import StepRecord

LOADER_CHOICES = "loader.jsonl"  # in the run folder: how clips were read and why, a line each time the run began
PROCESSES = "processes.json"  # in the run folder: how many trained together
PAUSE_S = 0.2  # between two looks whether a pause is over
LOADER_EVERY = 10  # steps between two reports of the loader in a run's metrics
NUM_PICTURED = 3  # held-out clips shown in a run's pictures


def normalizers_name(part: int) -> str:
    """Return the file in the run folder with the normalisers of a dataset; a policy needs it and not the dataset."""
    return f"normalizers_{part}.json" if part else "normalizers.json"


def start_run(bench: Workbench, root: Path | str = "runs", *, is_resumed: bool = False) -> Run:
    """Make the run folder of a recipe, or take up its newest one; wrong input is found before anything is written."""
    bench.source[0].read(0, seed=0)  # a video that cannot be read shows now, and features that are not there
    for part in bench.parts:
        part.held_out.read(0, seed=0)
    fingerprints = {
        "clips": fingerprint_of([part.training for part in bench.parts], bench.recipe),
        "video codec": bench.encoder.video.fingerprint,
        "text encoder": bench.encoder.text.fingerprint,
    }
    if bench.encoder.image is not None:
        fingerprints["image encoder"] = bench.encoder.image.fingerprint
    if bench.recipe.start is not None:
        fingerprints["start weights"] = fingerprint(bench.recipe.start)
    _ = bench.net  # weights that do not fit show now
    if not bench.ranks.is_first:
        return open_run(bench.ranks.shared(""))
    name, before = bench.recipe.name, own_run(root, bench.recipe.name)
    if before is not None:
        name, is_resumed = before.name, True
    if is_resumed:
        before = before or newest_run(root, name)
        check_resume(before, bench.recipe, fingerprints, bench.ranks.world_size)
    run = create_run(root, name, bench.recipe, fingerprints=fingerprints, is_resumed=is_resumed)
    forget_wish(run.folder)
    for number, part in enumerate(bench.parts):
        write_json(run.folder / normalizers_name(number), part.training.normalizers.to_dict())
    write_json(run.folder / PROCESSES, {"num_processes": bench.ranks.world_size})
    bench.ranks.shared(str(run.folder))
    return run


def own_run(root: Path | str, name: str) -> Run | None:
    """Return the run that this job of torchrun or Slurm was writing before it was started again, if there is one."""
    job = this_job()
    if not any(job.get("generation", [])) or not Path(root).is_dir():
        return None
    try:
        run = newest_run(root, name)
    except InputError:
        return None  # it ended before it had begun
    return run if run.status.get("job") == job["job"] else None


FREE_ON_RESUME = (
    "data.", "evaluation.", "checkpoint_every", "device", "train.num_steps", "train.num_micro_batches",
    "train.batch_size", "train.on_nan", "train.max_norm_ratio", "train.max_skipped", "speed.", "features.mode",
    "features.root", "features.shard_mib",
)  # fmt: skip
FIXED_DATA = tuple(f"data.{name}" for name in ("pool", "on_error", "weights", "balance", "augment_on"))  # decide clips


def check_resume(run: Run, recipe: Recipe, fingerprints: dict[str, str], num_processes: int = 1) -> None:
    """Refuse to go on with a run under another recipe or on other data, naming what differs.

    Another number of processes is welcome if together they have the batch of those before.
    """
    old, new = flattened(run.config), flattened(plain(asdict(recipe)))
    path = run.folder / PROCESSES
    num_before = read_json(path)["num_processes"] if path.exists() else 1
    joint = recipe.train.batch_size * num_processes
    if old["train.batch_size"] * num_before != joint:
        raise InputError(
            f"{run.folder} took {old['train.batch_size'] * num_before} samples a step, {num_processes} processes with "
            f"train.batch_size {recipe.train.batch_size} take {joint}: give the same product"
        )
    changed = [
        name
        for name in new
        if old.get(name) != new[name] and (name in FIXED_DATA or not name.startswith(FREE_ON_RESUME))
    ]
    if changed:
        listed = ", ".join(f"{name} (was {old.get(name)}, now {new[name]})" for name in changed)
        raise InputError(f"{run.folder} was trained with another recipe: {listed}; give the old values, or start anew")
    known = run.environment["fingerprints"]
    if other := [name for name in fingerprints if known.get(name) != fingerprints[name]]:
        raise InputError(
            f"{run.folder} was trained on other input ({', '.join(other)}): give the old dataset, or start anew"
        )
    if not list_checkpoints(run.checkpoints) and run.state != "finished":
        return  # it ended before its first checkpoint: it begins again
    num_done = int(newest_checkpoint(run.checkpoints).name.removeprefix("step_"))
    if num_done > recipe.train.num_steps or (num_done == recipe.train.num_steps and run.state == "finished"):
        raise InputError(f"{run.folder} has {num_done} steps: give train.num_steps above that to go on")


def fit(bench: Workbench, run: Run, wishes: Wishes | None = None) -> Generator[StepRecord, None, None]:
    """Train, log, evaluate and checkpoint into ``run``; yield each step's record as it happens.

    A run with a checkpoint continues from its newest one, with the same settings bit for bit. What is asked of it
    through its folder (or by signals, as ``wishes`` hears them) is done after a step; if that is to end, a checkpoint
    is written and ``Stopped`` raised.
    """
    recipe, ranks = bench.recipe, bench.ranks
    optimizer = bench.optimizer()
    ema = Ema(bench.net, recipe.train.ema_decay) if recipe.train.ema_decay else None
    first_step = 0
    if list_checkpoints(run.checkpoints):
        first_step = load_checkpoint(newest_checkpoint(run.checkpoints), bench.net, optimizer, ema)
    if ranks.is_first:
        run.truncate_metrics(first_step or -1)  # without a checkpoint nothing stays, not even the evaluation before
    held_out = read_held_out(bench)
    guard = guard_of(bench, optimizer, ema, run.folder)
    utilization = utilization_of(bench)
    if first_step == 0:
        log_evaluation(bench, run, held_out, 0, ema)
    clock = Clock(bench.device)
    clips = bench.clips(
        first_step=first_step,
        tell=lambda choice: append_line(run.folder / LOADER_CHOICES, asdict(choice)) if ranks.is_first else None,
    )
    saved = saver(bench, run, optimizer, ema)
    wishes = wishes or Wishes(run.folder)
    examples = bench.examples(clock, first_step=first_step, clips=clips)
    rule = rule_of(bench, run, first_step)
    steps = bench.steps(optimizer, examples, clock, first_step=first_step, ema=ema, guard=guard, rule=rule)
    with closing(steps):
        for record in explained(bench, steps):
            is_last = record.step == recipe.train.num_steps
            is_reported = is_last or record.step % LOADER_EVERY == 0
            loader = (
                {"loader": clips.report().figures() | {"cache": {"hit_rates": bench.hit_rates(clips)}}}
                if is_reported
                else {}
            )
            used = utilization.figures(record.num_samples, record.step_s)
            if ranks.is_first:
                run.log(asdict(record) | {"samples_per_s": record.samples_per_s} | used | loader)
            if is_last or record.step % recipe.evaluation.every == 0:
                log_evaluation(bench, run, held_out, record.step, ema)
            is_saved = is_last or record.step % recipe.checkpoint_every == 0
            if is_saved:
                saved(record.step)
            yield record
            if not is_last and (wish := heed(bench, run, wishes)) in ("stop", "preempt"):
                if not is_saved:
                    saved(record.step)
                saved(None)
                how = "taken off its machine" if wish == "preempt" else "stopped"
                raise Stopped(f"{how} after step {record.step}", is_preempted=wish == "preempt")
        saved(None)


def rule_of(bench: Workbench, run: Run, first_step: int) -> StepRule:
    """Return the rule that judges steps, knowing those that the run took before."""
    config = bench.recipe.train
    rule = StepRule(config.on_nan, config.max_skipped, config.max_norm_ratio)
    if first_step:
        rule.recall(record for record in read_metrics(run)[0] if record["step"] <= first_step)
    return rule


def explained(bench: Workbench, steps: Iterable[StepRecord]) -> Iterator[StepRecord]:
    """Yield steps; to what ends them for a loss that is no number add the windows it comes from, and the way on."""
    try:
        yield from steps
    except FloatingPointError as error:
        windows = ", ".join(f"episode {episode} row {row}" for episode, row in bench.newest_windows)
        raise FloatingPointError(
            f"{error}. Its windows begin at {windows}. The last checkpoint is whole: look at these with "
            "`wamlab data check`, or go on with --resume and --train.on-nan skip, which leaves such steps out, or a "
            "larger --train.max-skipped"
        ) from error


def heed(bench: Workbench, run: Run, wishes: Wishes) -> str:
    """Wait as long as a pause is asked for; return what all processes then agree on to do."""
    ranks, is_paused = bench.ranks, False
    while True:
        wish = WISHES[ranks.greatest(WISHES.index(wishes.read(has_file=ranks.is_first)))]
        if (wish == "pause") != is_paused and ranks.is_first:
            run.mark(is_paused=not is_paused)
        is_paused = wish == "pause"
        if not is_paused:
            break
        time.sleep(PAUSE_S)
    if wish != "go on" and ranks.is_first:
        forget_wish(run.folder)
    return wish


def saver(bench: Workbench, run: Run, optimizer: Optimizer, ema: Ema | None) -> Callable[[int | None], None]:
    """Return what writes the checkpoint of a step; told None, it waits for what is being written."""
    if bench.is_shared:
        from wamlab.sharded_checkpoint import ShardWriter  # half a second to import

        writer = ShardWriter(run.checkpoints, bench.ranks)
        return lambda step: writer.wait() if step is None else writer.write(step, bench.net, optimizer, ema)

    def write(step: int | None) -> None:
        if step is not None:
            write_checkpoint(run.checkpoints, step, bench.net, optimizer, ema)

    return write


def fit_with_bar(bench: Workbench, run: Run) -> None:
    """Train to the end under a progress bar, for terminals; interrupts and signals of batch systems end it in order."""
    wishes = Wishes(run.folder)
    is_told = bench.ranks.is_first
    if is_told:
        print(f"run folder: {run.folder} (in a notebook, watch(open_run(folder)) follows it live)")
    num_steps = bench.recipe.train.num_steps
    with wishes.heeded(), tqdm(total=num_steps, desc="training", unit="step", disable=not is_told) as bar:
        for record in fit(bench, run, wishes):
            bar.update(record.step - bar.n)
            bar.set_postfix(loss=f"{record.loss:.3f}", samples_per_s=f"{record.samples_per_s:.0f}")
    if bench.recipe.features.mode != "online" and is_told:
        print(f"features in {bench.store.root}: {bench.store.report()}")


def log_evaluation(bench: Workbench, run: Run, held_out: HeldOut, step: int, ema: Ema | None) -> Evaluation:
    """Evaluate the averaged weights (if there are any), log the figures and save a picture of the frames."""
    with ema.applied() if ema is not None else nullcontext():
        evaluation = evaluate(bench, held_out)
    if not bench.ranks.is_first:  # all of them evaluated: a shared network computes with all
        return evaluation
    run.log_evaluation(evaluation.record(step))
    run.save_picture(f"step_{step:08d}", picture_of(bench, held_out, evaluation))
    return evaluation


def picture_of(bench: Workbench, held_out: HeldOut, evaluation: Evaluation) -> bytes:
    """Draw predicted under real frames of some held-out clips, a column every other frame."""
    chosen = np.linspace(0, held_out.num_clips - 1, min(NUM_PICTURED, held_out.num_clips)).round().astype(int)
    times = range(0, bench.recipe.window.num_frames, 2)
    rows, labels = [], []
    for index in chosen:
        rows += [[frames[t] for t in times] for frames in (held_out.clips[index].frames, evaluation.predicted[index])]
        labels += ["real", "predicted"]
    return strip_png(rows, labels, ["seen" if t == 0 else f"frame {t}" for t in times])


def summarize(run: Run) -> dict[str, Any]:
    """Return a run's key figures from its own files: what was learnt, against its trivial baselines."""
    evaluations = read_evaluations(run)
    records, _ = read_metrics(run)
    first, last = evaluations[0], evaluations[-1]
    return {
        "steps": last["step"],
        "held-out loss, start": first["held_out_loss"],
        "held-out loss, end": last["held_out_loss"],
        "held-out loss, end / start": last["held_out_loss"] / first["held_out_loss"],
        "action error": last["action_error"],
        "action error of the mean": last["action_error_mean_baseline"],
        "video PSNR dB": last["video_psnr_db"],
        "video PSNR dB of copying": last["video_psnr_copy_db"],
        "samples/s": statistics.median(record["samples_per_s"] for record in records) if records else None,
    }
