"""The command ``wamlab parity``; free of torch until it runs."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from wamlab.errors import InputError
from wamlab.recipes.commands import check_numbers


def parity(
    baseline: Positional[str],
    candidate: Positional[str],
    root: Path = Path("runs"),
    margin: float = 0.1,
    error_margin: float = 0.05,
    curve_margin: float = 0.01,
    alpha: float = 0.05,
    env: str = "tabletop",
    family: tuple[str, ...] = ("reach",),
    episodes: int = 200,
    seed: int = 2_000_000,
    clips: int = 200,
    data: Path | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Test whether two runs, or two recipes over several training seeds, are equivalent within stated margins.

    Args:
        baseline: a run, its start or a part of its name; several, joined by commas, one for each training seed
        candidate: as many, in the same order
        root: folder of the runs
        margin: of success, e.g. 0.1 for ten points; state it before you look
        error_margin: of open-loop action errors, relative to the baseline's
        curve_margin: of log training losses, with four seeds or more
        alpha: chance of calling equivalent what differs by the margin
        env: to play in: tabletop, pusht, metaworld:TASK or libero:SUITE/TASK
        family: of tabletop tasks to play, one or more
        episodes: of each family, the same for both; none judges by open-loop errors and curves alone
        seed: of the first episode; recordings and `wamlab score` use others
        clips: held-out episodes, of those that both runs hold out
        data: folder of the dataset, if it does not lie where the runs' configs say
        out: also write the result as JSON
        json: print the result as one line of JSON, last
    """
    from json import dumps

    from wamlab.lab.records import plain, write_json
    from wamlab.lab.run import find_run
    from wamlab.recipes.comparing import ParityOrder, compare_runs, parity_text, plan_text
    from wamlab.recipes.episodes import PlayOrder

    check_numbers(0, episodes=episodes, seed=seed)
    check_numbers(2, clips=clips)
    sides = [[find_run(root, name.strip()) for name in names.split(",")] for names in (baseline, candidate)]
    if len(sides[0]) != len(sides[1]):
        raise InputError(f"{len(sides[0])} baselines and {len(sides[1])} candidates make no pairs: give one for one")
    play = PlayOrder(tuple(family), episodes, seed, env=env) if episodes else None
    order = ParityOrder(margin, error_margin, curve_margin, alpha, play, clips, data)
    print(plan_text(order, len(sides[0])), flush=True)
    found = compare_runs(sides[0], sides[1], order)
    print(parity_text(found))
    if out is not None:
        write_json(out, found)
    if json:
        print(dumps(plain(found)))
