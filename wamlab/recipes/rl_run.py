"""The job of post-training: a run's policy plays and learns, iteration by iteration, into a run folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wamlab.checkpoint import load_checkpoint, write_checkpoint
from wamlab.checkpoint_folder import list_checkpoints, newest_checkpoint
from wamlab.errors import InputError
from wamlab.lab.records import plain, read_json, write_json
from wamlab.lab.report import flattened
from wamlab.lab.run import Run, create_run, newest_run, read_evaluations
from wamlab.recipes.fit import normalizers_name
from wamlab.recipes.policy import load_policy
from wamlab.recipes.rl import RlBench
from wamlab.recipes.rl_config import RlRecipe
from wamlab.recipes.rl_imagined import ImaginedBench, with_recordings
from wamlab.recipes.rl_progress import RolloutProgress
from wamlab.rl.stream import StreamedGroups
from wamlab.rl.update import joined
from wamlab.train import make_optimizer, train
from wamlab.types import Samples, StepRecord

RL_FILE = "rl.json"  # in the run folder: the rl recipe and its start; config.json is the network's, so the run plays
FREE_ON_RESUME = (
    "train.num_micro_batches",
    "train.on_nan",
    "train.max_norm_ratio",
    "train.max_skipped",
    "evaluation.",
    "checkpoint_every",
    "play.",
    "is_stored",
    "is_streamed",
    "is_batch_chosen",
)
ROLLOUT = "rollout"  # folder in the run's, of what no checkpoint has learnt from yet


def open_bench(recipe: RlRecipe, start: Run) -> RlBench:
    """Load the policy that post-training starts from: a run's newest weights, averaged ones first."""
    policy = load_policy(start, num_sampler_steps=recipe.num_sampler_steps)
    if recipe.env == "tabletop":
        return RlBench(recipe, policy)
    with_recordings(policy.bench, recipe.imagine.data)
    return ImaginedBench(recipe, policy)


def start_rl(bench: RlBench, start: Run, root: Path | str = "runs", *, is_resumed: bool = False) -> Run:
    """Make the run folder of a post-training, or take up its newest one; it plays and serves like any run."""
    recipe, network = bench.recipe, bench.start.bench.recipe
    if network.train.lora is not None or network.start is not None:
        raise InputError(f"{start.name} holds adapters or reads a start of its own: give a run with all its weights")
    stated = plain({"start": str(start.folder.resolve()), "recipe": asdict(recipe)})
    if is_resumed:
        run = newest_run(root, recipe.name)
        before, now = flattened(read_json(run.folder / RL_FILE)), flattened(stated)
        changed = [
            name
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name) and not name.removeprefix("recipe.").startswith(FREE_ON_RESUME)
        ]
        if changed:
            listed = ", ".join(f"{name} (was {before.get(name)}, now {now.get(name)})" for name in changed)
            raise InputError(f"{run.folder} was trained with another recipe: {listed}; give the old values")
    config = replace(network, name=recipe.name)
    run = create_run(root, recipe.name, config, fingerprints={"start": start.name}, is_resumed=is_resumed)
    write_json(run.folder / RL_FILE, stated)
    if isinstance(bench, ImaginedBench):
        bench.folder = run.folder
    write_json(run.folder / normalizers_name(0), bench.start.normalizers.to_dict())
    return run


def post_train(bench: RlBench, run: Run) -> Iterator[StepRecord]:
    """Play, learn, evaluate and checkpoint into ``run``; yield the record of each iteration's last update.

    A run with a checkpoint goes on from the end of its iteration, bit for bit: play depends on weights and counted
    noise alone. With ``recipe.is_stored`` what was played since then is on disk and is not played again; an iteration
    that was cut short goes on in the middle, with ``recipe.is_exact`` bit for bit, too.
    """
    recipe = bench.recipe
    optimizer = make_optimizer(bench.net, recipe.train)
    first_step = 0
    if list_checkpoints(run.checkpoints):
        first_step = load_checkpoint(newest_checkpoint(run.checkpoints), bench.net, optimizer, None)
    run.truncate_metrics(first_step)
    if not read_evaluations(run):
        run.log_evaluation({"step": 0} | bench.evaluate())
    progress = RolloutProgress(run.folder / ROLLOUT) if recipe.is_stored else None
    examples = _examples(bench, first_step // recipe.num_epochs, progress)
    config = recipe.streamed_train if recipe.is_streamed else recipe.train
    for step in train(bench.loss, examples, optimizer, config, first_step=first_step, scale=bench.scale):
        iteration, rest = divmod(step.step, recipe.num_epochs)
        if rest:
            continue
        record = replace(step, num_samples=bench.num_samples)
        run.log(asdict(record) | {"samples_per_s": record.samples_per_s, "iteration": iteration, "rl": bench.notes})
        is_last = record.step == recipe.train.num_steps
        if is_last or iteration % recipe.evaluation.every == 0:
            run.log_evaluation({"step": record.step} | bench.evaluate())
        if is_last or iteration % recipe.checkpoint_every == 0:
            write_checkpoint(run.checkpoints, record.step, bench.net, optimizer, None)
            if progress is not None:
                progress.forget(iteration)
        yield record


def _examples(
    bench: RlBench, iteration: int, progress: RolloutProgress | None
) -> Iterator[Samples | StreamedGroups | None]:
    while True:
        store = None if progress is None else progress.begin(iteration, bench.net)
        if bench.recipe.is_streamed:
            yield bench.stream_from(iteration, store)
            num_left = bench.recipe.num_epochs - 1
            example = joined(bench.groups_learnt, iteration) if num_left else None
        else:
            num_left, example = bench.recipe.num_epochs, bench.update_from(iteration, store)
        for _ in range(num_left):
            yield example
        iteration += 1


def summarize_rl(run: Run) -> dict[str, Any]:
    """Return success before and after on held-out scenes, with 95 % intervals."""
    evaluations = read_evaluations(run)
    first, last = evaluations[0], evaluations[-1]
    names = ("success", "low", "high")
    return {"before": {n: first[n] for n in names}, "after": {n: last[n] for n in names}}
