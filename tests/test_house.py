"""The house itself: imports point down, files stay small, the two package lists agree, imports stay light."""

import ast
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "wamlab"
ROOMS = {"model", "codec", "data", "speed", "sim", "rl", "score", "serve", "lab"}
GROUND = {"types", "flow", "errors", "tensors"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def place_of(module: Path) -> str:
    """Return the room, ground file or hallway file that a module belongs to."""
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_places(module: Path) -> set[str]:
    """Return the places of wamlab a module imports, lazily or not, or names in a string."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide where they point"
            names |= {node.module or ""}
            if node.module == "wamlab":
                names |= {f"wamlab.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"^wamlab(?:\.\w+)+$", node.value))
    return {name.split(".")[1] for name in names if name.startswith("wamlab.")}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_never_sideways(module: Path) -> None:
    place = place_of(module)
    found = imported_places(module) - {place, "__version__"}
    if place in GROUND or place == "__init__":
        assert found <= GROUND, f"{place} is the ground and imports {found - GROUND}"
    elif place in ROOMS:
        assert found <= GROUND, f"room {place} visits {found - GROUND}"


def test_every_top_level_name_has_a_floor() -> None:
    hallway = {"recipes", "train", "cli", "checkpoint", "sharded_checkpoint", "checkpoint_folder"}
    hallway |= {"__init__", "__main__", "py.typed"}
    assert {place_of(module) for module in MODULES} <= ROOMS | GROUND | hallway


def test_files_stay_short() -> None:
    long = {str(m.relative_to(ROOT)): n for m in MODULES if (n := len(m.read_text().splitlines())) > 330}
    assert not long


@pytest.mark.parametrize("module", ["wamlab", "wamlab.errors", "wamlab.lab.run", "wamlab.lab.plots"])
def test_light_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_environment_yml_names_the_same_packages_as_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {Requirement(text).name: Requirement(text) for text in project["dependencies"]}
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    listed = [entry for entry in conda if isinstance(entry, str)]
    listed += [text for entry in conda if isinstance(entry, dict) for text in entry["pip"] if not text.startswith("-e")]
    renamed = {"pytorch": "torch"}
    given = {}
    for text in listed:
        requirement = Requirement(text)
        given[renamed.get(requirement.name, requirement.name)] = requirement
    assert str(given.pop("python").specifier) == project["requires-python"]
    del given["pip"]
    assert given.keys() == wanted.keys()
    for name, requirement in wanted.items():
        assert given[name].specifier == requirement.specifier, name


def test_constraints_satisfy_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    pins: dict[str, str] = {canonicalize_name(name): pin for name, pin in pairs}
    for text in [*project["dependencies"], *chain(*project["optional-dependencies"].values())]:
        requirement = Requirement(text)
        assert requirement.name in pins, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(pins[requirement.name])


def test_every_dependency_is_imported_or_run() -> None:
    """Those that nothing imports are run by their names: notebooks, batch jobs, tests."""
    run_by_name = {"jupyterlab", "ipykernel", "ipywidgets", "papermill", "nbval", "pytest"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {Requirement(text).name for text in project["dependencies"]} - run_by_name
    renamed = {"pillow": "PIL", "pyyaml": "yaml"}
    text = "\n".join(module.read_text() for module in MODULES)
    unused = {
        name
        for name in names
        if not re.search(rf"(^|\n)\s*(import|from) {renamed.get(name, name)}\b", text) and f'"{name}"' not in text
    }
    assert not unused


def test_torchcodec_stays_below_the_first_version_that_needs_cuda_libraries() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = Requirement(project["optional-dependencies"]["torchcodec"][0]).specifier
    assert allowed.contains("0.13.0") and not allowed.contains("0.14.0")


def test_no_forbidden_file_names() -> None:
    forbidden = {"utils", "common", "helpers", "base", "manager", "factory", "registry"}
    assert not [module for module in MODULES if module.stem in forbidden]
