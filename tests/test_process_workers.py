"""Workers as processes: the same trajectories as in this one, whoever dies, sleeps or is late; nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from players import EXACT, SmallHands, TroubledHands, all_bits, groups_of, make_table

from wamlab.errors import InputError
from wamlab.rl.play import PlayConfig, Rollout, play
from wamlab.rl.process_workers import ProcessCrew
from wamlab.rl.schedule import ScheduleConfig
from wamlab.rl.segments import Setting

CONFIG = PlayConfig(num_members=3, num_slots=2, schedule=ScheduleConfig(segment_chunks=2, tail_chunks=1))
Crewed = tuple[ProcessCrew, Path]


@pytest.fixture(scope="module")
def crewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crewed]:
    folder = tmp_path_factory.mktemp("troubles")
    with ProcessCrew(partial(TroubledHands, folder), make_table, num_workers=2, num_slots=2) as crew:
        yield crew, folder
    assert not list(Path("/dev/shm").glob(f"wamlab-weights-{os.getpid()}-*"))


def alone(setting: Setting = EXACT, hands: SmallHands | None = None) -> dict:
    return all_bits(list(play(groups_of(4), setting, hands or SmallHands(), make_table, config=CONFIG)))


def test_processes_play_what_this_one_plays(crewed: Crewed) -> None:
    rollout = Rollout(groups_of(4), EXACT, crewed[0], config=CONFIG)
    assert all_bits(list(rollout)) == alone()
    timeline = rollout.timeline
    assert {bar[0] for bar in timeline.bars} == {0, 1}
    assert 0 < timeline.utilisation <= 1.01 and not rollout.num_reissued


@pytest.mark.parametrize("trouble", ["die", "sleep"])
def test_what_a_dead_or_silent_worker_held_is_played_by_others(crewed: Crewed, trouble: str) -> None:
    crew, folder = crewed
    (folder / trouble).touch()
    before = dict(crew.pids)
    config = replace(CONFIG, schedule=replace(CONFIG.schedule, silent_s=0.4))
    rollout = Rollout(groups_of(4), EXACT, crew, config=config)
    assert all_bits(list(rollout)) == alone()
    assert rollout.num_reissued > 0 and not (folder / trouble).exists()
    if trouble == "die":
        assert rollout.deaths == ["worker 0 ended with status -9"]
        list(Rollout(groups_of(1), EXACT, crew, config=config))  # waits for the new one
        assert crew.pids[0] != before[0] and crew.pids[1] == before[1]


def test_changed_weights_reach_every_worker_and_no_iteration_is_played_by_others(crewed: Crewed) -> None:
    crew, _ = crewed
    changed = {"out.bias": torch.tensor([0.3, -0.2, 0.1, 0.0], dtype=torch.float64)}
    hands = SmallHands()
    hands.load_weights(changed, 7)
    crew.load(changed, 7)
    setting = replace(EXACT, policy_version=7)
    expected = alone(setting, hands)
    assert all_bits(list(Rollout(groups_of(4), setting, crew, config=CONFIG))) == expected != alone()
    os.kill(crew.pids[1], signal.SIGKILL)  # who comes back has them too
    assert all_bits(list(Rollout(groups_of(4), setting, crew, config=CONFIG))) == expected
    assert all_bits(list(Rollout(groups_of(4), setting, crew, config=CONFIG))) == expected
    crew.load(SmallHands().net.state_dict(), 0)


def test_a_rollout_that_is_given_up_leaves_the_crew_fit_for_the_next(crewed: Crewed) -> None:
    first = Rollout(groups_of(4), EXACT, crewed[0], config=CONFIG)
    next(first)
    first.close()
    assert all_bits(list(Rollout(groups_of(4), EXACT, crewed[0], config=CONFIG))) == alone()


def test_the_words_of_a_failing_policy_come_through(crewed: Crewed) -> None:
    crew, folder = crewed
    (folder / "fail").touch()
    with pytest.raises(RuntimeError, match="these hands are tied"):
        list(Rollout(groups_of(4), EXACT, crew, config=CONFIG))
    assert all_bits(list(Rollout(groups_of(4), EXACT, crew, config=CONFIG))) == alone()
    pids = list(crew.pids.values())
    crew.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_of_a_killed_parent_leave(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from functools import partial; from pathlib import Path; from players import *; from players import EXACT\n"
        "from wamlab.rl.play import PlayConfig, Rollout; from wamlab.rl.process_workers import ProcessCrew\n"
        "if __name__ == '__main__':\n"
        "    crew = ProcessCrew(partial(TroubledHands, Path(sys.argv[2])), make_table, num_workers=1, num_slots=2)\n"
        "    config = PlayConfig('fifo', num_members=1)\n"
        "    for _ in Rollout(groups_of(999), EXACT, crew, config=config): print(crew.pids[0], flush=True)\n"
    )
    path = tmp_path / "parent.py"
    path.write_text(code)
    command = [sys.executable, str(path), str(Path(__file__).parent), str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = Path("/proc") / parent.stdout.readline().strip()
    assert child.exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.exists()


def test_wrong_input_is_told() -> None:
    with pytest.raises(InputError, match="workers with slots"):
        ProcessCrew(partial(TroubledHands, Path()), make_table, num_workers=0)
