"""Damaged records of post-training: refused in one sentence, or what they say."""

from dataclasses import replace
from datetime import datetime

import pytest
from fuzzing import FUZZ, Replaced, answer, damaged_json
from hypothesis import given
from hypothesis import strategies as st

from wamlab.errors import InputError
from wamlab.lab.run import Run, create_run, open_run
from wamlab.recipes.rl_config import rl_tabletop_grpo
from wamlab.recipes.rl_order import RlOrder, start_of
from wamlab.recipes.rl_progress import RolloutProgress


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the folder of a finished post-training."""
    root = tmp_path_factory.mktemp("runs")
    with create_run(root, rl_tabletop_grpo().name, {"name": "a"}, started=datetime(2026, 4, 1)) as made:
        (made.folder / "rollout").mkdir()
    return open_run(made.folder)


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_progress_and_starts_of_post_training_are_refused_or_right(run: Run, data: st.DataObject) -> None:
    name, whole = data.draw(
        st.sampled_from(
            [
                ("rl.json", {"start": str(run.folder), "recipe": {}}),
                ("rollout/progress.json", {"weights": {"3": "abc", "4": "def"}}),
            ]
        )
    )
    with Replaced(run.folder / name, data.draw(damaged_json(whole))):
        if name == "rl.json":
            order = replace(RlOrder(rl_tabletop_grpo()), runs=run.folder.parent)
            started = answer(lambda: start_of(order))
            assert isinstance(started, InputError | Run)
        else:
            kept = answer(lambda: RolloutProgress(run.folder / "rollout").weights)
            assert isinstance(kept, InputError) or all(key.isdigit() for key in kept)
