"""The main job: train a recipe into a run folder, evaluating and checkpointing on the way."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

from wamlab.checkpoint import load_checkpoint, load_weights, newest_checkpoint, write_checkpoint
from wamlab.flow import flow_loss
from wamlab.lab.plots import strip_png
from wamlab.lab.run import Run, read_metrics
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe, recipe_from_dict
from wamlab.recipes.evaluate import Evaluation, HeldOut, evaluate, read_held_out
from wamlab.speed.clock import Clock
from wamlab.train import Ema, adamw, train
from wamlab.types import StepRecord

NUM_PICTURED = 4  # held-out clips shown in a run's pictures


def fit(bench: Workbench, run: Run, *, is_resumed: bool = False) -> Iterator[StepRecord]:
    """Train, log, evaluate and checkpoint into ``run``; yield each step's record as it happens.

    A resumed run continues bit for bit from its newest checkpoint.
    """
    recipe = bench.recipe
    optimizer = adamw(bench.net, recipe.train)
    ema = Ema(bench.net, recipe.train.ema_decay) if recipe.train.ema_decay else None
    first_step = 0
    if is_resumed:
        first_step = load_checkpoint(newest_checkpoint(run.checkpoints), bench.net, optimizer, ema)
        run.truncate_metrics(first_step)
    held_out = read_held_out(bench)
    if first_step == 0:
        log_evaluation(bench, run, held_out, 0, ema)
    clock = Clock(bench.device)
    examples = bench.examples(clock, first_step=first_step)
    try:
        for record in train(
            partial(flow_loss, bench.net, shift=recipe.noise.shift),
            examples,
            optimizer,
            recipe.train,
            first_step=first_step,
            ema=ema,
            clock=clock,
        ):
            run.log(asdict(record) | {"samples_per_s": record.samples_per_s})
            is_last = record.step == recipe.train.num_steps
            if is_last or record.step % recipe.checkpoint_every == 0:
                write_checkpoint(run.checkpoints, record.step, bench.net, optimizer, ema)
            if is_last or record.step % recipe.evaluation.every == 0:
                log_evaluation(bench, run, held_out, record.step, ema)
            yield record
    finally:
        examples.close()
