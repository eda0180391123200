"""`wamlab train`: the process that trains, or the one that starts several and stands for all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from wamlab.errors import Stopped
from wamlab.lab.control import Wishes, ask
from wamlab.lab.lifeline import hold_lifeline, tie
from wamlab.lab.rank_logs import end_noted, log_of, read_ends, send_output
from wamlab.lab.report import summary_table, write_report
from wamlab.lab.run import Run, open_run
from wamlab.recipes.build import Workbench
from wamlab.recipes.commands import check_numbers
from wamlab.recipes.fit import fit_with_bar, start_run, summarize
from wamlab.recipes.order import TrainOrder, read_order
from wamlab.speed.ranks import leave_ranks, torchrun_command, torchrun_environment

PREEMPTED = 75  # EX_TEMPFAIL of sysexits(3): the same command goes on later
STOPPED = 130
LOOK_S = 0.2


def train_command(words: Sequence[str]) -> int:
    """Do what `wamlab train` is told; return its exit status: 0, 75 after a pre-emption, or 130 after a stop."""
    order = read_order(TrainOrder, "train", words)
    check_numbers(1, processes=order.processes)
    check_numbers(0, restarts=order.restarts)
    hold_lifeline()
    if (order.processes > 1 or order.restarts) and "TORCHELASTIC_RUN_ID" not in os.environ:
        return _train_together(order, words)
    try:
        train_recipe(order)
    except Stopped as stopped:
        leave_ranks()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return 0  # else torchrun would take it for a failure and begin again
        print(f"wamlab: {stopped}; --resume goes on from there", file=sys.stderr)
        return PREEMPTED if stopped.is_preempted else STOPPED
    return 0


def train_recipe(order: TrainOrder) -> None:
    """Train a recipe with a progress bar, then print what it learnt; one of several processes does its part."""
    bench = Workbench(order.recipe)
    rank = bench.ranks.rank
    with start_run(bench, order.runs, is_resumed=order.resume) as run, end_noted(run.folder, rank):
        if bench.ranks.is_first and order.announce is not None:
            partial = order.announce.with_name(f".{order.announce.name}.partial")
            partial.write_text(str(run.folder.resolve()))
            partial.replace(order.announce)
        if order.quiet or not bench.ranks.is_first:
            send_output(run.folder, rank)
        fit_with_bar(bench, run)
        if bench.ranks.is_first:
            run.finish(summary=summarize(run))
    leave_ranks()
    if bench.ranks.is_first:
        print(summary_table(open_run(run.folder)))
        print(f"report: {write_report(open_run(run.folder)).resolve()}")


def _train_together(order: TrainOrder, words: Sequence[str]) -> int:
    """Train in processes of torchrun; pass on by the run's folder what this process is asked for by signals."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wamlab-")))
        note = order.announce or folder / "run"
        note.unlink(missing_ok=True)
        command = torchrun_command(
            order.processes, "wamlab.cli", ["train", *words, "--announce", str(note)], num_restarts=order.restarts
        )
        status = run_agent(command, torchrun_environment(order.processes) | os.environ | tie(), note)
        return status if not note.exists() else _status_of(open_run(note.read_text()), status)


def run_agent(command: Sequence[str], environment: dict[str, str], note: Path) -> int:
    """Run torchrun in a session of its own until it ends; return its exit status.

    An interrupt or a signal of a batch system becomes a wish to the run whose folder stands in ``note``, a second one
    (or one before there is a run) ends the processes.
    """
    wishes, has_asked = Wishes(note.parent), False
    with subprocess.Popen(command, env=environment, start_new_session=True) as agent:
        try:
            with wishes.heeded():
                while True:
                    try:
                        return agent.wait(LOOK_S)
                    except subprocess.TimeoutExpired:
                        wish = wishes.read(has_file=False)
                        if wish == "go on" or has_asked:
                            continue
                        if not note.exists():
                            raise KeyboardInterrupt from None
                        run = open_run(note.read_text())
                        if run.state in ("failed", "lost"):
                            raise KeyboardInterrupt from None  # its processes are about to begin again
                        if run.state == "running":
                            ask(run, wish)
                        has_asked = True
        except KeyboardInterrupt:
            agent.send_signal(signal.SIGTERM)  # it passes that on and waits; killed, it would leave them behind
            raise


def _status_of(run: Run, agent_status: int) -> int:
    """Return the exit status that stands for a run of several processes, and say which of them failed, and how."""
    status = run.status
    if status["state"] == "finished":
        return 0
    if status["state"] == "stopped":
        print(f"wamlab: {status['error'].removeprefix('Stopped: ')}; --resume goes on from there", file=sys.stderr)
        return PREEMPTED if status.get("is_preempted") else STOPPED
    for end in read_ends(run.folder)[:1]:
        if end["rank"]:  # the first process's words are here already
            print(end["traceback"], file=sys.stderr)
        print(
            f"wamlab: process {end['rank']} failed: {end['error']}; see {log_of(run.folder, end['rank'])}",
            file=sys.stderr,
        )
    return agent_status or 1
