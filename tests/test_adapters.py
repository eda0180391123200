"""Public simulators behind wamlab's environment: chunks, ends and seeds; each where its extra is installed."""

import importlib.util
import os
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from wamlab.errors import InputError
from wamlab.score.closed_loop import play_closed_loop
from wamlab.sim.adapters import INSTALL, SIMULATORS, AdaptedVector, Seen, axis_angle, make_adapted, xml_without_shadows
from wamlab.types import Env

MODULES = {"pusht": "gym_pusht", "metaworld": "metaworld", "libero": "libero"}
ACTIONS = {"pusht": np.full(2, 256.0), "metaworld": np.full(4, 0.1), "libero": np.full(7, 0.1)}  # a harmless one


class Counter:
    """A place whose task is to count to a number that the seed says."""

    instruction, max_ticks = "count", 6

    def __init__(self) -> None:
        self.count, self.goal, self.num_steps = 0, 0, 0

    def reset(self, seed: int) -> Seen:
        self.count, self.goal = 0, seed
        return self._seen()

    def step(self, action: np.ndarray) -> tuple[Seen, bool]:
        self.num_steps += 1
        self.count += int(action[0])
        return self._seen(), self.count >= self.goal

    def close(self) -> None:
        self.count = -1

    def _seen(self) -> Seen:
        return Seen({"top": np.full((2, 2, 3), self.count, np.uint8)}, np.array([self.count], np.float32))


def test_a_place_that_has_ended_is_stepped_no_more() -> None:
    places = [Counter(), Counter(), Counter()]
    env = AdaptedVector(places)
    assert isinstance(env, Env) and env.is_done.all()
    with pytest.raises(InputError, match="call reset"):
        env.chunk_step(np.ones((3, 4, 1)))
    raw, _ = env.reset(seed=[2, 5, 99])
    assert raw["agent_pos"].shape == (3, 1) and not env.is_done.any()
    *_, infos = env.chunk_step(np.ones((3, 4, 1)))
    assert infos["num_ticks"].tolist() == [2, 4, 4] and env.is_success.tolist() == [True, False, False]
    raw, *_, infos = env.chunk_step(np.ones((3, 4, 1)))
    assert infos["num_ticks"].tolist() == [0, 1, 2] and env.is_done.all()  # the last met its time limit
    assert env.is_success.tolist() == [True, True, False]
    assert raw["pixels"]["top"][:, 0, 0, 0].tolist() == [2, 5, 6]
    assert [place.num_steps for place in places] == [2, 5, 6]
    with pytest.raises(InputError, match="as many seeds"):
        env.reset(seed=[1])


def test_films_show_the_ticks_that_each_place_executed_and_are_kept_only_if_asked_for() -> None:
    for has_films in (False, True):
        env = AdaptedVector([Counter(), Counter()], has_films=has_films)
        env.reset(seed=[2, 99])
        shown = [env.chunk_step(np.ones((2, 4, 1)))[-1].get("films") for _ in range(2)]
        counts = [[film["top"][:, 0, 0, 0].tolist() for film in films or ()] for films in shown]
        assert counts == ([[[1, 2], [1, 2, 3, 4]], [[], [5, 6]]] if has_films else [[], []])


def test_closed_loop_plays_adapted_places_too() -> None:
    env = AdaptedVector([Counter(), Counter()])
    played = play_closed_loop(env, lambda seen: np.ones((len(seen.state), 3, 1), np.float32), [1, 4, 99])
    assert [(e.is_success, e.num_ticks, e.num_calls) for e in played.episodes] == [
        (True, 1, 1),
        (True, 4, 2),
        (False, 6, 2),
    ]


def test_rotations_become_axis_times_angle() -> None:
    half = np.sqrt(0.5)
    for quaternion, wanted in (
        ((0, 0, 0, 1), (0, 0, 0)),
        ((0, 0, half, half), (0, 0, np.pi / 2)),
        ((1, 0, 0, 0), (np.pi, 0, 0)),
        ((0, half, 0, -half), (0, 1.5 * np.pi, 0)),  # as published states have it: not the shorter way round
    ):
        np.testing.assert_allclose(axis_angle(np.array(quaternion, np.float64)), wanted, atol=1e-12)


def test_scenes_lose_their_shadows_and_nothing_else() -> None:
    scene = '<mujoco><visual><quality shadowsize="4096" numslices="9"/></visual><worldbody><body name="a"/></worldbody>'
    scene += "</mujoco>"
    for xml, kept in ((scene, {"numslices": "9"}), ("<mujoco/>", {})):
        quality = ElementTree.fromstring(xml_without_shadows(xml)).find("visual/quality")
        assert quality is not None and quality.attrib == {"shadowsize": "0", "offsamples": "0", **kept}
    assert 'body name="a"' in xml_without_shadows(scene)


@pytest.mark.parametrize("simulator", MODULES)
def test_a_simulator_that_is_not_there_is_named_with_its_install_command(simulator: str) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert simulator in project["optional-dependencies"] and f"wamlab[{simulator}]" in INSTALL[simulator]
    if importlib.util.find_spec(MODULES[simulator]) is None:
        with pytest.raises(InputError, match=r"is not installed: pip install 'wamlab\["):
            make_adapted(simulator)
    with pytest.raises(InputError, match="no simulator"):
        make_adapted("isaac")


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("simulator", SIMULATORS)
def test_a_simulator_starts_by_its_seed_and_plays_chunks(simulator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(MODULES[simulator], reason=INSTALL[simulator])
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", "egl"))
    env = make_adapted(simulator, size=64)
    try:
        first, _ = env.reset(seed=[3])
        assert all(frames.shape == (1, 64, 64, 3) and frames.std() > 5 for frames in first["pixels"].values())
        chunk = np.tile(ACTIONS[simulator], (1, 4, 1)).astype(np.float32)
        moved, *_, infos = env.chunk_step(chunk)
        assert infos["num_ticks"].tolist() == [4] and np.abs(moved["agent_pos"] - first["agent_pos"]).max() > 1e-4
        again, _ = env.reset(seed=[3])
        np.testing.assert_allclose(again["agent_pos"], first["agent_pos"], atol=1e-6)
        for camera, frames in first["pixels"].items():
            np.testing.assert_array_equal(again["pixels"][camera], frames)
        assert env.instructions[0]
    finally:
        env.close()
