"""Rehearsals: real processes keep the simulator's time, and play exactly the lengths they were told."""

import pytest

from wamlab.errors import InputError
from wamlab.rl.length_models import LENGTH_MODELS, draw_lengths
from wamlab.rl.play import Pace, PlayConfig
from wamlab.rl.process_workers import ProcessCrew
from wamlab.rl.rehearse import RehearsalEnv, RehearsalPolicy, measured_service, rehearse, simulator_error
from wamlab.rl.service import Service

ASLEEP = Service(fixed_s=0.01, row_s=0.002, env_s=0.001, has_parallel_envs=False)


def test_the_simulator_tells_the_makespan_of_real_processes() -> None:
    lengths = draw_lengths(LENGTH_MODELS["LIBERO-10"], 3, 4, seed=1)
    with ProcessCrew(RehearsalPolicy, RehearsalEnv, num_workers=2, num_slots=2) as crew:
        for rule in ("context", "static"):
            rollout = rehearse(lengths, ASLEEP, crew, PlayConfig(rule=rule, num_members=4), seed=1)
            assert rollout.timeline.num_chunks == lengths.lengths.sum()
            assert abs(simulator_error(rollout, lengths, ASLEEP, seed=1)) < 0.2  # a tenth on a quiet machine


def test_a_cost_line_is_found_in_rounds() -> None:
    service = Service(fixed_s=0.05, row_s=0.02, env_s=0.0, env_spread=0.0)
    paces = [Pace(0, rows, 0.1 + 0.03 * rows, 0.0, 0.0, 0.0) for rows in (1, 2, 4, 4, 4)]
    found = measured_service(paces, service)
    assert found.fixed_s == pytest.approx(0.1) and found.row_s == pytest.approx(0.03)
    with pytest.raises(InputError, match="shorter than their environments"):
        measured_service([pace._replace(cycle_s=0.01) for pace in paces], ASLEEP.__class__(env_s=1.0))
