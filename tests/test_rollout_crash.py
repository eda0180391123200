"""A rollout killed at any moment goes on from its disk, and plays what it would have played."""

import random
import subprocess
import sys
import time
from pathlib import Path

from players import EXACT, SmallHands, all_bits, groups_of, make_table

from wamlab.rl.play import PlayConfig, play
from wamlab.rl.schedule import ScheduleConfig
from wamlab.rl.store import StoreConfig

CONFIG = PlayConfig(num_members=3, num_slots=2, num_workers=2, schedule=ScheduleConfig(segment_chunks=2, tail_chunks=1))
CODE = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_rollout_crash import *
store = StoreConfig(disk_folder=Path(sys.argv[2])).open()
rollout = play(groups_of(4), EXACT, SmallHands(sleep_s=0.002), make_table, config=CONFIG, store=store)
print("begun", rollout.scheduler.num_left, flush=True)
for played in rollout:
    print("played", played.group.number, flush=True)
"""


def test_killed_at_random_moments_it_ends_with_the_same_trajectories(tmp_path: Path) -> None:
    draw, num_kills, pieces_before = random.Random(time.time_ns()), 0, 0
    command = [sys.executable, "-c", CODE, str(Path(__file__).parent), str(tmp_path)]
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("begun")
        time.sleep(draw.uniform(0.05, 0.6))
        num_kills += process.poll() is None
        process.kill()
        process.wait()
        process.stdout.close()
        pieces = len(list(tmp_path.glob("*.safetensors")))
        assert pieces >= pieces_before
        pieces_before = pieces
    store = StoreConfig(disk_folder=tmp_path).open()
    rollout = play(groups_of(4), EXACT, SmallHands(), make_table, config=CONFIG, store=store)
    resumed = list(rollout)
    assert all_bits(resumed) == all_bits(list(play(groups_of(4), EXACT, SmallHands(), make_table, config=CONFIG)))
    assert {played.group.number for played in resumed} == {0, 1, 2, 3}  # finished ones are told again
    total = sum(segment.num_chunks for played in resumed for segment in played.segments)
    if pieces_before:
        assert rollout.timeline.num_chunks < total
    assert num_kills
