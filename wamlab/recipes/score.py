"""The command ``wamlab score``; free of torch until it runs."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from wamlab.recipes.commands import check_numbers


def score(
    name: Positional[str] = "",
    root: Path = Path("runs"),
    closed_loop: bool = False,
    clips: int = 128,
    blocks: int = 4,
    env: str = "tabletop",
    family: tuple[str, ...] = ("reach",),
    episodes: int = 100,
    seed: int = 1_000_000,
    executed: int | None = None,
    videos: int = 6,
    lpips: bool = False,
    data: Path | None = None,
    json: bool = False,
) -> None:
    """Score a run on held-out episodes, and in closed loop if asked; writes score.html into its folder.

    Args:
        name: of the run, its start or a part of it; without one, the newest run
        root: folder of the runs
        closed_loop: also play: success, latency, asynchronous execution, films of failures
        clips: held-out episodes, half to choose a checkpoint by, half to report
        blocks: of the open-loop horizon, as far as episodes are long enough
        env: to play in: tabletop, pusht, metaworld:TASK or libero:SUITE/TASK, with the cameras and sizes of the robot
        family: of tabletop tasks to play, one or more
        episodes: to play of each family
        seed: of the first episode; recordings use small ones
        executed: ticks of a chunk that are played before the next is asked for; all if not given
        videos: films to write, failures first
        lpips: also measure LPIPS, where the package and its weights are there
        data: folder of the dataset, if it does not lie where the run's config says
        json: print the figures as one line of JSON, last
    """
    from json import dumps

    from wamlab.lab.records import plain
    from wamlab.lab.run import find_run
    from wamlab.lab.score_page import score_text
    from wamlab.recipes.episodes import PlayOrder
    from wamlab.recipes.scoring import ScoreOrder, score_run

    check_numbers(4, clips=clips)
    check_numbers(1, blocks=blocks, episodes=episodes, executed=1 if executed is None else executed)
    check_numbers(0, seed=seed, videos=videos)
    play = PlayOrder(tuple(family), episodes, seed, executed, videos, env=env) if closed_loop else None
    run = find_run(root, name)
    found = score_run(run, ScoreOrder(clips, blocks, play, lpips, data))
    print(f"\n{score_text(run.folder)}\n\npage: {found['page'].resolve()}")
    if json:
        print(dumps(plain(found)))
