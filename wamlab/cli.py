"""The command ``wamlab``: a thin face over the functions a notebook calls."""

from __future__ import annotations

import difflib
import importlib
import signal
import sys
import tempfile
import threading
import warnings
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

import tyro
from tyro.conf import Positional

from wamlab.errors import InputError, advice_for
from wamlab.recipes.commands import check_numbers, convert_weights, inspect_weights, plan_training, serve, show_robot
from wamlab.recipes.datasets import check_data, convert_data, import_video_files, make_data, show_data
from wamlab.recipes.measure_data import measure_data
from wamlab.recipes.notebook import run_command
from wamlab.recipes.parity import parity
from wamlab.recipes.rl_simulate import simulate_rollouts
from wamlab.recipes.run_commands import RUN_COMMANDS
from wamlab.recipes.score import score
from wamlab.recipes.sweep import sweep_command
from wamlab.recipes.tune_order import tune


def show(name: Positional[str] = "", root: Path = Path("runs"), browser: bool = False) -> None:
    """Print a run's key figures and write its report, into a temporary folder where the run's is read-only.

    Args:
        name: of the run, its start or a part of it; without one, the newest run
        root: folder of the runs
        browser: open the report
    """
    from wamlab.lab.report import summary_table, write_report
    from wamlab.lab.run import find_run

    run = find_run(root, name)
    print(summary_table(run))
    try:
        path = write_report(run).resolve()
    except InputError:
        path = write_report(run, Path(tempfile.mkdtemp(prefix=f"{run.name}-"))).resolve()
    print(f"report: {path}")
    if browser:
        webbrowser.open(path.as_uri())


def play(
    name: Positional[str] = "",
    root: Path = Path("runs"),
    env: str = "tabletop",
    family: str = "reach",
    episodes: int = 100,
    seed: int = 1_000_000,
    sampler_steps: int | None = None,
) -> None:
    """Play a run's policy on the tabletop or in a public simulator and count successes.

    Args:
        name: of the run, its start or a part of it; without one, the newest run
        root: folder of the runs
        env: to play in: tabletop, pusht, metaworld:TASK or libero:SUITE/TASK, with the cameras and sizes of the robot
        family: of tabletop tasks
        episodes: number of episodes
        seed: of the first episode; recordings use small ones
        sampler_steps: network evaluations per chunk; as the recipe says if not given
    """
    from wamlab.lab.run import find_run
    from wamlab.recipes.environments import tasks_of
    from wamlab.recipes.playing import play_task
    from wamlab.recipes.policy import load_policy

    check_numbers(1, episodes=episodes, sampler_steps=1 if sampler_steps is None else sampler_steps)
    check_numbers(0, seed=seed)
    (task,) = tasks_of(env, (family,))
    policy = load_policy(find_run(root, name), num_sampler_steps=sampler_steps)
    success = play_task(policy, task, range(seed, seed + episodes))
    print(f"{task}: {success}, {success.latency_s * 1000:.0f} ms a chunk")


def demo(
    data: Path = Path("datasets/demo"),
    runs: Path = Path("runs"),
    steps: int | None = None,
    episodes: int = 2400,
    play: int = 100,
) -> None:
    """Make a dataset, train a tiny model on it, show what it learnt.

    Args:
        data: folder of the dataset; made if it is not there
        runs: folder of the runs
        steps: optimiser steps; as the recipe says if not given
        episodes: number of recorded episodes
        play: number of closed-loop episodes at the end
    """
    from wamlab.recipes.demo import run_demo

    run_demo(data, runs, num_steps=steps, num_episodes=episodes, num_played=play)


def bench(
    name: Positional[str] = "",
    dataset: Positional[str] = "",
    quick: bool = False,
    json: bool = False,
    against: Path | None = None,
) -> int:
    """Measure one thing against a named baseline in the same run; without a name, list what there is.

    `bench compare FILE` holds what `bench all --json` gave against ratios kept before; exit status 1 if any is worse.

    Args:
        name: of the benchmark; all runs every other one
        dataset: folder of your own LeRobot dataset to measure with, where the benchmark takes one; for compare the file
        quick: end within 50 seconds, with fewer rounds
        json: print the figures as one line of JSON, last
        against: for compare: the kept ratios, if not those of this checkout
    """
    from json import dumps

    from wamlab.recipes.bench import BENCHES, list_benches, run_bench

    if not name:
        print("\n".join(list_benches()))
        return 0
    if name == "compare":
        from wamlab.recipes.bench_guard import compare_figures

        return int(bool(compare_figures(Path(dataset), against or BENCHES / "baseline.json")))
    figures = run_bench(name, is_quick=quick, dataset=Path(dataset) if dataset else None)
    print(dumps(figures) if json else "")
    return 0


COMMANDS: dict[str, Callable[..., int | None]] = {  # each prints, and may return an exit status
    "data make": make_data,
    "data import-videos": import_video_files,
    "data info": show_data,
    "data check": check_data,
    "data stats": measure_data,
    "data convert": convert_data,
    "run": run_command,
    "sweep": sweep_command,
    **RUN_COMMANDS,
    "show": show,
    "play": play,
    "score": score,
    "parity": parity,
    "serve": serve,
    "robot": show_robot,
    "weights inspect": inspect_weights,
    "weights convert": convert_weights,
    "plan": plan_training,
    "tune": tune,
    "simulate": simulate_rollouts,
    "demo": demo,
    "bench": bench,
}
# Commands that read their words themselves, as these follow the name of a recipe: where they are, imported when run.
WITH_RECIPE = {
    "train": ("wamlab.recipes.training", "train_command"),
    "encode": ("wamlab.recipes.encode", "encode_command"),
    "ablate": ("wamlab.recipes.ablate_order", "ablate_command"),
    "rl": ("wamlab.recipes.rl_order", "rl_command"),
    "submit": ("wamlab.recipes.submit", "submit_command"),
}
FAMILIES = {name.split()[0] for name in COMMANDS if " " in name}
# of no command that stands alone
HELP = [[word, "--help"] for word in (*WITH_RECIPE, *FAMILIES - {*COMMANDS})]
USAGE = """usage: wamlab COMMAND [OPTIONS]; a command explains itself with --help after its name

  data make [ROOT]            make a LeRobot dataset of scripted tabletop episodes
  data import-videos ROOT     wrap video files as a video-only LeRobot dataset
  data info ROOT              print what a dataset holds
  data check ROOT             find what is wrong with a dataset, and how to repair it
  data stats ROOT             measure its columns and relative actions; --write keeps the figures with it
  data convert ROOT OUT --version VERSION
                              write a dataset as v2.1 or v3.0 without encoding its videos again
  train RECIPE                train a recipe; any of its fields can be changed, e.g. --model.layers 6
                              (`wamlab train RECIPE --help` lists them)
  encode RECIPE               make the recipe's features beforehand, for --features.mode cached
  ablate RECIPE               measure what each trick does to the recipe's step, from DreamZero's way to all of them
  run NOTEBOOK                run a notebook into a run folder: -p NAME VALUE, -f params.yaml; --list names them
  sweep FILE.yaml             train a grid or list of variants of a recipe; the same command goes on where it stopped
  submit ENGINE RECIPE        write what trains a recipe on many machines: slurm, skypilot or ray
  runs [ls]                   list the runs; --where train.learning_rate=1e-3 searches
  runs compare RUN RUN...     differences of configs, figures, losses in one page
  runs stop|pause|go-on [RUN] act on a run that runs, from anywhere that sees its folder
  runs rm|export|send RUN     delete it, pack it into one file, send its figures to tensorboard, wandb or trackio
  show [RUN]                  print a run's key figures and write its report
  play [RUN]                  play a run's policy on the tabletop, or in a simulator: --env metaworld:reach-v3
  score [RUN]                 figures with intervals on held-out episodes, as a page; --closed-loop plays too
  parity RUN_A RUN_B          are two runs, or RUN,RUN,… of two recipes, equivalent? margins are stated first
  serve [RUN]                 serve a run's policy to clients of public benchmarks: --port 8000
  robot FILE                  check a robot file, also against a dataset; list those that come with the library
  weights inspect PATH        say what a published checkpoint holds and which network it fits
  weights convert SOURCE TARGET --layout LAYOUT
                              write a checkpoint in another layout or number type
  plan RECIPE --devices 8xH100
                              predict a step there, its memory and its bottleneck: --method, --micro-batch, --backtest
  tune RECIPE --budget 70GiB  find its fastest micro-batch and recompute plan that fit: --devices 8xH100 for elsewhere
  rl RECIPE --start RUN       post-train a run's policy on the tabletop: rl_tabletop_grpo or rl_tabletop_nft; --resume
  simulate                    play rollouts in simulated time, by every rule: --lengths, --rule, --service, --workers
  bench [NAME [DATASET]]      measure one thing against a baseline: --quick, --json; all; compare FILE
  demo                        dataset, training and result in one go"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; wrong input prints one sentence and returns 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        warnings.formatwarning = _warning_line
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)  # batch systems send it; what Ctrl-C cleans up is cleaned up
    try:
        return _run(words)
    except (InputError, FloatingPointError) as error:
        print(f"wamlab: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"wamlab: {place}{error.strerror or error}: {advice_for(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        hints = {
            "train": "; --resume goes on from the last checkpoint",
            "ablate": "; the same command goes on where this one stopped",
            "sweep": "; the same command goes on where this one stopped",
            "encode": "; the same command goes on where this one stopped",
            "rl": "; --resume goes on from what is on disk",
            "tune": "; the same command begins again",
        }
        hint = hints.get(words[0], "") if words else ""
        print(f"wamlab: stopped{hint}", file=sys.stderr)
        return 130


def _warning_line(message: Warning | str, category: type[Warning], place: str, *more: object) -> str:
    """Write a warning of wamlab's own as a sentence, without the line of code that gave it."""
    if category is UserWarning and Path(place).is_relative_to(Path(__file__).parent):
        return f"wamlab: note: {message}\n"
    return f"{place}:{more[0] if more else ''}: {category.__name__}: {message}\n"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help") or words in HELP:
        print(USAGE)
        return 0
    if words[0] in WITH_RECIPE:
        place, function = WITH_RECIPE[words[0]]
        return getattr(importlib.import_module(place), function)(words[1:]) or 0
    name = " ".join(words[:2]) if words[0] in FAMILIES else words[0]
    if name not in COMMANDS and words[0] in COMMANDS and words[1].startswith("-"):
        name = words[0]  # a family that is a command too, with an option
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, *WITH_RECIPE], n=1, cutoff=0.4)
        hint = f'did you mean "{near[0]}"?' if near else "`wamlab --help` lists them"
        raise InputError(f'there is no command "{name}": {hint}')
    return tyro.cli(COMMANDS[name], args=words[len(name.split()) :], prog=f"wamlab {name}") or 0


if __name__ == "__main__":
    sys.exit(main())
