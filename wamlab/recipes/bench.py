"""Benchmarks: scripts of a checkout's ``experiments/bench``, each with a ``run(is_quick=...)`` that returns figures.

One whose ``run`` also takes ``dataset`` can measure on a dataset of the user's.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.environment import describe_environment

BENCHES = Path(__file__).parents[2] / "experiments" / "bench"


def list_benches() -> list[str]:
    """Return the names of the checkout's benchmarks."""
    return sorted(path.stem for path in BENCHES.glob("*.py"))


def run_bench(name: str, *, is_quick: bool = False, dataset: Path | None = None) -> dict[str, Any]:
    """Run one benchmark, which prints its tables; return its figures with the hardware and the commit.

    Raises InputError for an unknown name, and for a dataset given to a benchmark that takes none.
    """
    if not BENCHES.is_dir():
        raise InputError(f"there is no {BENCHES}: benchmarks run from a checkout, installed with pip install -e .")
    if name not in list_benches():
        near = difflib.get_close_matches(name, list_benches(), n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(list_benches())}"
        raise InputError(f'there is no benchmark "{name}": {hint}')
    environment = describe_environment()
    hardware = environment["gpus"] or environment["cpu"]
    commit = environment["git"].get(str(BENCHES.parents[1]), {}).get("commit")
    print(f"{name} on {hardware}, torch {environment['packages']['torch']}, commit {commit}")
    sys.path.insert(0, str(BENCHES))  # scripts may share their configuration
    try:
        spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCHES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
        spec.loader.exec_module(module)
        if dataset is None:
            figures = module.run(is_quick=is_quick)
        elif "dataset" in inspect.signature(module.run).parameters:
            figures = module.run(is_quick=is_quick, dataset=dataset)
        else:
            raise InputError(f'the benchmark "{name}" takes no dataset, got {dataset}')
    finally:
        sys.path.remove(str(BENCHES))
    return {"bench": name, **figures, "hardware": hardware, "commit": commit}
