"""Fixtures that several test files share."""

from pathlib import Path

import pytest
import torch

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
