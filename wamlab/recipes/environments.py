"""The environments that a run's policy is played in: the tabletop, or a public simulator that fits its robot."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from wamlab.data.robot import short_name
from wamlab.errors import InputError
from wamlab.recipes.policy import WamPolicy
from wamlab.sim.adapters import SIMULATORS, AdaptedVector, make_adapted
from wamlab.sim.render import CAMERAS
from wamlab.sim.scene import FAMILIES
from wamlab.sim.vector import TabletopVector

TABLETOP = "tabletop"
FORMS = f"{TABLETOP}, pusht, metaworld:TASK or libero:SUITE/TASK"
MOST_PLACES = 10  # of a simulator at once: each holds a scene and a renderer, and they are stepped one after another


def tasks_of(env: str, families: Sequence[str]) -> tuple[str, ...]:
    """Return the tasks to play: families of the tabletop, or a simulator and its task as they are written.

    Raises InputError for an environment or a family that there is not, and for families of a simulator.
    """
    if env == TABLETOP:
        if unknown := set(families) - set(FAMILIES):
            raise InputError(f"there is no family {sorted(unknown)}: choose from {', '.join(FAMILIES)}")
        return tuple(families)
    if env.partition(":")[0] not in SIMULATORS:
        raise InputError(f"there is no environment {env!r}: give {FORMS}")
    if tuple(families) != FAMILIES[:1]:
        raise InputError(f"families are tasks of the {TABLETOP}: leave out --family, or --env {env}")
    return (env,)


def make_env(policy: WamPolicy, task: str, num_envs: int, *, has_films: bool = False) -> TabletopVector | AdaptedVector:
    """Make environments of a task that show what a policy's robot sees; at most ``MOST_PLACES`` of a simulator.

    They keep films of every chunk if that is asked for, or if the policy has a history.
    """
    robot = policy.bench.recipe.robot
    has_films = has_films or policy.has_history
    if task in FAMILIES:
        cameras = tuple(camera for camera in map(short_name, robot.cameras) if camera in CAMERAS)
        size = (robot.view_height_px, robot.view_width_px)
        return TabletopVector(num_envs, task, size=size, cameras=cameras, has_films=has_films)
    simulator, _, name = task.partition(":")
    size_px = max(robot.view_height_px, robot.view_width_px)
    return make_adapted(simulator, name, min(num_envs, MOST_PLACES), size=size_px, has_films=has_films)


def check_fit(policy: WamPolicy, task: str) -> None:
    """Refuse a task whose cameras, state or actions are not those of the policy's robot.

    Raises InputError, which names both; also for a simulator that is not installed.
    """
    with closing(make_env(policy, task, 1)) as env:
        raw, _ = env.reset(seed=[0])
    shown = tuple(raw.get("pixels", {}))
    found = (raw["agent_pos"].shape[1], env.num_actions)
    wanted = (policy.normalizers.num_states, policy.normalizers.num_actions)
    cameras = tuple(map(short_name, policy.bench.recipe.robot.cameras))
    if set(cameras) <= set(shown) and found == wanted:
        return
    shown = CAMERAS if task in FAMILIES else shown
    raise InputError(
        f"{task} shows cameras {', '.join(shown)}, {found[0]} states and takes {found[1]} actions; "
        f"the run's robot has cameras {', '.join(cameras)}, {wanted[0]} states and {wanted[1]} actions"
    )
