"""Fixtures that several test files share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# One thread a process, also of those that tests start: several processes whose threads wait for each other's cores take
# ten times as long, and sums over a vector depend on how many threads add it up.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of real robot clips and awkward videos that may lie beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"real robot clips are not at {SHARED}")
    return SHARED


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def notes_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what is noted of the tests' videos out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
