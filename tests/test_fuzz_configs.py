"""Damaged recipes, overrides, robots, sweeps, parameters and requests: refused in one sentence, or what they say."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fuzzing import FUZZ, ODD_NUMBERS, ODD_TEXTS, Replaced, answer, damaged, damaged_bytes
from hypothesis import given
from hypothesis import strategies as st

from wamlab.data.robot_files import find_robot_file, list_robots, read_robot_file
from wamlab.errors import InputError
from wamlab.lab.records import plain
from wamlab.recipes.config import Recipe, recipe_from_dict, tiny
from wamlab.recipes.notebook import _read_yaml, read_yaml
from wamlab.recipes.sweep_file import Sweep, list_trials, read_sweep

SWEEP = {
    "name": "rates", "recipe": "tiny", "base": {"train.num_steps": 200}, "grid": {"train.seed": [0, 1]},
    "list": [{"model.layers": 2}, {"model.layers": 4}], "processes": 1, "parallel": 2,
    "budget": {"runs": 8, "minutes": 60},
}  # fmt: skip
REQUEST = {
    "observation/top": np.zeros((4, 4, 3), np.uint8), "state": np.zeros(2, np.float32), "prompt": "go",
    "session_id": "a", "endpoint": "infer", "more": {"x": [1, 2]},
}  # fmt: skip


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_recipes_are_refused_or_whole(data: st.DataObject) -> None:
    values = data.draw(damaged(plain(asdict(tiny()))))
    if not isinstance(values, dict):
        return
    found = answer(lambda: recipe_from_dict(values))
    if isinstance(found, Recipe):
        again = answer(lambda: recipe_from_dict(json.loads(json.dumps(plain(asdict(found))))))
        assert isinstance(again, Recipe)


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_robots_are_refused_or_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = find_robot_file(data.draw(st.sampled_from(list_robots()))).read_bytes()
    path = tmp_path_factory.getbasetemp() / "robot.toml"
    if data.draw(st.booleans()):
        text = data.draw(damaged_bytes(text))
    else:
        lines = text.decode().splitlines()
        place = data.draw(st.integers(0, len(lines) - 1))
        odd = data.draw(st.sampled_from([*map(str, ODD_NUMBERS), *map(json.dumps, ODD_TEXTS), "[]", "{}", "true"]))
        lines[place] = f"{lines[place].partition('=')[0]}= {odd}"
        text = "\n".join(lines).encode("utf-8", "surrogatepass")
    with Replaced(path, text):
        answer(lambda: read_robot_file(str(path)))


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_sweeps_and_parameters_are_refused_or_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "sweep.yaml"
    if data.draw(st.booleans()):
        text = data.draw(damaged_bytes(yaml.safe_dump(SWEEP).encode()))
    else:
        text = json.dumps(data.draw(damaged(SWEEP))).encode("utf-8", "surrogatepass")
    with Replaced(path, text):
        answer(lambda: _read_yaml(path))
        sweep = answer(lambda: read_sweep(read_yaml(path), str(path)))
        if isinstance(sweep, Sweep):
            trials = answer(lambda: list_trials(sweep))
            assert isinstance(trials, InputError) or all("/" not in trial.name for trial in trials)


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system [touch ran]", "&a [*a, *a]", "[" * 50_000, "a: 1" + "0" * 5000]
)
def test_yaml_runs_nothing_and_ends(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    found = answer(lambda: read_sweep(read_yaml(tmp_path / "a.yaml"), "a.yaml"))
    assert isinstance(found, InputError)


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_requests_get_a_sentence_or_are_understood(data: st.DataObject) -> None:
    arrays = pytest.importorskip("wamlab.serve.arrays")
    from wamlab.serve.protocol import Contract, Request, read_request

    contract = Contract(("top",), 2, 2)
    encoding = data.draw(st.sampled_from(("openpi", "msgpack-numpy")))
    if data.draw(st.booleans()):
        message = data.draw(damaged_bytes(arrays.encode(REQUEST, encoding)))
    else:
        values: Any = data.draw(damaged(REQUEST))
        try:
            message = arrays.encode(values, encoding)
        except (OverflowError, ValueError, TypeError):
            return
    found = answer(lambda: read_request(message, contract))
    if isinstance(found, Request) and not found.is_reset:
        assert len(found.state) == 2 and np.isfinite(found.state).all() and found.frames["top"].shape[2] == 3
