"""`wamlab runs`: list, search, compare, ask, remove and export run folders; free of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from wamlab.errors import InputError

RUNS = Path("runs")
Where = Annotated[UseAppendAction[tuple[str, ...]], arg(aliases=["-w"])]


def list_all_runs(root: Path = RUNS, where: Where = ()) -> None:
    """List the runs of a folder.

    Args:
        root: folder of the runs
        where: condition on a field of the config, such as train.learning_rate=1e-3 or model.layers>=4; several times
            for several
    """
    from wamlab.lab.search import list_runs, read_condition

    print(list_runs(root, [read_condition(text) for text in where]))


def compare_runs(
    names: Positional[tuple[str, ...]] = (), root: Path = RUNS, where: Where = (), out: Path = Path("comparison.html")
) -> None:
    """Show in what runs differ, what they reached, and their losses in one page.

    Args:
        names: of the runs, parts of them or folders; without any, those that --where finds
        root: folder of the runs
        where: condition on a field of the config
        out: page to write
    """
    from wamlab.lab.comparison import Comparison, write_comparison
    from wamlab.lab.run import find_run, open_run
    from wamlab.lab.search import find_runs, read_condition

    named = [open_run(name) if (Path(name) / "status.json").exists() else find_run(root, name) for name in names]
    found = find_runs(root, [read_condition(text) for text in where]) if where else []
    comparison = Comparison(tuple(named + [run for run in found if run.folder not in [n.folder for n in named]]))
    print(comparison)
    print(f"\npage: {write_comparison(comparison, out).resolve()}")


def remove_runs(names: Positional[tuple[str, ...]], root: Path = RUNS, yes: bool = False) -> None:
    """Delete runs; asks first.

    Args:
        names: of the runs, or parts of them that fit one run only
        root: folder of the runs
        yes: do not ask
    """
    from wamlab.lab.archive import check_removable, remove_run
    from wamlab.lab.run import find_run

    if not names or "" in names:
        raise InputError("name the runs to delete")
    runs = list({run.folder: run for run in (find_run(root, name) for name in names)}.values())
    for run in runs:
        check_removable(run)
    if not yes:
        if not sys.stdin.isatty():
            raise InputError("nobody can be asked here: give --yes to delete")
        listed = "\n  ".join(run.name for run in runs)
        if input(f"delete for good?\n  {listed}\n[y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return
    for run in runs:
        remove_run(run)
        print(f"deleted {run.folder}")


def export_runs(name: Positional[str] = "", root: Path = RUNS, out: Path | None = None, whole: bool = False) -> None:
    """Pack a run into one .tar.gz: without checkpoints and files above 20 MiB unless asked.

    Args:
        name: of the run, its start or a part of it; without one, the newest run
        root: folder of the runs
        out: archive to write; RUN.tar.gz here if not given
        whole: with everything
    """
    from wamlab.lab.archive import export_run
    from wamlab.lab.run import find_run

    run = find_run(root, name)
    path = out or Path(f"{run.name}.tar.gz")
    left_out = export_run(run, path, is_whole=whole)
    print(f"wrote {path}, {path.stat().st_size / 2**20:.1f} MiB")
    if left_out:
        how = "links and the like" if whole else "--whole takes all but links"
        print(f"left out {len(left_out)} files ({how}): {', '.join(sorted(left_out)[:5])}")


def ask_run(wish: str, name: str, root: Path) -> None:
    """Ask a run that runs, here or on another machine, to do something after its step."""
    from wamlab.lab.control import ask
    from wamlab.lab.run import find_run

    run = find_run(root, name)
    ask(run, wish)
    print(f"asked {run.folder} to {wish}")


def stop_run(name: Positional[str] = "", root: Path = RUNS) -> None:
    """End a run after its step, with a checkpoint; `wamlab train ... --resume` goes on."""
    ask_run("stop", name, root)


def pause_run(name: Positional[str] = "", root: Path = RUNS) -> None:
    """Let a run wait after its step."""
    ask_run("pause", name, root)


def go_on_run(name: Positional[str] = "", root: Path = RUNS) -> None:
    """End a run's pause."""
    ask_run("go on", name, root)


def send_run(
    name: Positional[str] = "",
    to: Literal["tensorboard", "wandb", "trackio"] = "tensorboard",
    root: Path = RUNS,
    project: str = "wamlab",
    follow: bool = False,
    online: bool = False,
) -> None:
    """Send a run's figures to another tracker, from its folder; nothing leaves this machine unless asked.

    Args:
        name: of the run, its start or a part of it; without one, the newest run
        to: the tracker; each needs the extra of that name
        root: folder of the runs
        project: that the run is shown under
        follow: go on until the run ends
        online: let the tracker send to its service
    """
    from wamlab.lab.run import find_run
    from wamlab.lab.trackers import send

    run = find_run(root, name)
    num_sent = send(run, to, project=project, is_followed=follow, is_online=online)
    print(f"sent {num_sent} records of {run.name} to {to}")


RUN_COMMANDS: dict[str, Callable[..., int | None]] = {
    "runs": list_all_runs,
    "runs ls": list_all_runs,
    "runs compare": compare_runs,
    "runs rm": remove_runs,
    "runs export": export_runs,
    "runs stop": stop_run,
    "runs pause": pause_run,
    "runs go-on": go_on_run,
    "runs send": send_run,
}
