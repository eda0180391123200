"""Robots as TOML files: the fields of ``RobotConfig``, and of ``WindowConfig`` in a table [window]."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from wamlab.data.lerobot import RobotDataset
from wamlab.data.robot import RobotConfig, list_mismatches, nearest
from wamlab.data.windows import WindowConfig
from wamlab.errors import InputError

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list"}


@dataclass(frozen=True)
class RobotFile:
    """What a robot file says."""

    path: Path
    robot: RobotConfig
    window: WindowConfig
    given: frozenset[str]  # fields of the robot that the file names


def list_robots() -> list[str]:
    """Return the names of the robots that come with the library."""
    return sorted(path.name.removesuffix(".toml") for path in (files("wamlab.data") / "robots").iterdir())


def find_robot_file(name: str) -> Path:
    """Return the path of a robot: a file's own, or that of one of ``list_robots``."""
    if name in list_robots():
        return Path(str(files("wamlab.data") / "robots" / f"{name}.toml"))
    if not Path(name).is_file():
        raise InputError(f'there is no robot file "{name}"{nearest(name, list_robots())}')
    return Path(name)


def read_robot_file(name: str) -> RobotFile:
    """Read a robot file by path or name; one InputError names everything that is wrong in it."""
    return check_robot_file(name, None)


def check_robot_file(name: str, dataset: RobotDataset | None, *, patch_px: int = 1) -> RobotFile:
    """Read a robot file; one InputError names all that is wrong in it and all in which a dataset differs from it.

    The robot is held against the dataset as soon as its own fields are consistent, whatever the window is.
    """
    path = find_robot_file(name)
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML ({error}): mend that line") from error
    window_values = values.pop("window", {})
    wrong: list[str] = []
    robot = _built(RobotConfig, values, "", wrong)
    if isinstance(window_values, dict):
        window = _built(WindowConfig, window_values, "window.", wrong)
    else:
        window, _ = None, wrong.append("window is not a table: write [window] above its fields")
    if dataset is not None and robot is not None:
        wrong += [
            f"dataset {dataset.root}: {text}" for text in list_mismatches(robot, dataset, window, patch_px=patch_px)
        ]
    if wrong or robot is None or window is None:
        raise InputError(f"{path}: " + "; ".join(wrong))
    return RobotFile(path, robot, window, frozenset(values))


def _built(kind: Any, values: Mapping[str, Any], prefix: str, wrong: list[str]) -> Any:
    """Return a configuration, or None after adding to ``wrong`` why there is none."""
    found = list(_problems(kind, values, prefix))
    if not found:
        empty_as_none = {
            key: None if value == "" and key.endswith("_column") else value for key, value in values.items()
        }
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in empty_as_none.items()}
        is_fraction = {f.name for f in fields(kind) if type(f.default) is float}
        given = {key: float(str(value)) if key in is_fraction else value for key, value in given.items()}
        try:
            return kind(**given)
        except InputError as error:
            found = [str(error).removeprefix("robot: ")]
    wrong += found
    return None


def _problems(kind: Any, values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    defaults = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
    for name, value in values.items():
        if name not in defaults:
            yield f"unknown field {prefix}{name}{nearest(name, list(defaults))}"
            continue
        wanted = type(defaults[name])
        given = {list: tuple}.get(type(value), type(value))
        if given is not wanted and not (wanted is float and given is int):
            yield f"{prefix}{name} is {value!r}, not {KINDS[wanted]}"
        elif wanted is float and not abs(value) < 1e300:
            yield f"{prefix}{name} is {str(value)[:40]}, not {KINDS[wanted]} to compute with"
        elif wanted is tuple:
            element = str if name == "cameras" else int
            if odd := [item for item in value if type(item) is not element]:
                yield f"{prefix}{name} holds {odd[0]!r}, not {KINDS[element]}"
