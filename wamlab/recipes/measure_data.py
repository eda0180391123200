"""The command that measures a dataset's statistics."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from wamlab.errors import InputError

KINDS = ("mean", "std", "min", "max", "q01", "q99")


def measure_data(
    root: Positional[Path], write: bool = False, horizon: int = 24, relative: tuple[str, ...] | None = None
) -> None:
    """Measure a dataset's columns and relative actions in one pass, print them, and write them if asked to.

    Args:
        root: folder of the dataset
        write: write meta/stats.json, and DreamZero's relative statistics where action and state share parts
        horizon: ticks of a block of relative actions; 0 for none
        relative: parts of modality.json to take relative; all that action and state share but grippers, if not given
    """
    from tqdm.auto import tqdm

    from wamlab.data.lerobot import open_dataset
    from wamlab.data.measure import measure_dataset, write_stats
    from wamlab.lab.table import Table

    if horizon < 0:
        raise InputError(f"--horizon is {horizon}: give at least 0")
    dataset = open_dataset(root)
    with tqdm(total=int(dataset.lengths.sum()), desc="measuring", unit="row", delay=2) as bar:
        measured = measure_dataset(dataset, num_ticks=horizon, relative=relative, seen=bar.update)
    rows = []
    shown = measured.columns | {f"{name} - state": stats for name, stats in measured.relative.items()}
    for name, stats in shown.items():
        for dim in range(len(stats["mean"])):
            named = name if len(stats["mean"]) == 1 else f"{name}[{dim}]"
            rows.append({"column": named} | {kind: float(stats[kind][dim]) for kind in KINDS})
    print(Table(rows))
    if measured.relative_error:
        print(f"quantiles are exact to {measured.relative_error:.1g} of themselves, the rest to rounding")
    for path in write_stats(dataset, measured) if write else ():
        print(f"wrote {path}")
