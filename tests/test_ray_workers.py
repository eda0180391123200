"""Workers on a cluster of two Ray nodes: the same trajectories as in this process, also when a node is lost."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from players import EXACT, SmallHands, TroubledHands, all_bits, groups_of, make_table

from wamlab.rl.play import PlayConfig, Rollout, play
from wamlab.rl.ray_workers import RayCrew
from wamlab.rl.schedule import ScheduleConfig

ray = pytest.importorskip("ray", reason="Ray is not installed: run pip install -e '.[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's own code
CONFIG = PlayConfig(num_members=3, num_slots=2, schedule=ScheduleConfig(segment_chunks=2, tail_chunks=1))


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple]:
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine takes more than 30
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = nodes.add_node(num_cpus=1)
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    ray.init(address=nodes.address, runtime_env={"env_vars": paths}, log_to_driver=False)
    yield nodes, second
    ray.shutdown()
    nodes.shutdown()


def test_two_nodes_play_what_one_process_plays_and_one_does_when_the_other_is_lost(cluster, tmp_path: Path) -> None:
    nodes, second = cluster
    alone = all_bits(list(play(groups_of(4), EXACT, SmallHands(), make_table, config=CONFIG)))
    with RayCrew(partial(TroubledHands, tmp_path), make_table, num_workers=2, num_slots=2) as crew:
        first = Rollout(groups_of(4), EXACT, crew, config=CONFIG)
        assert all_bits(list(first)) == alone
        assert {bar[0] for bar in first.timeline.bars} == {0, 1}
        assert sum(node["Alive"] for node in ray.nodes()) == 2  # of one core each: a worker on either

        changed = {"out.bias": torch.tensor([0.3, -0.2, 0.1, 0.0], dtype=torch.float64)}
        crew.load(changed, 7)
        hands = SmallHands()
        hands.load_weights(changed, 7)
        setting = replace(EXACT, policy_version=7)
        expected = all_bits(list(play(groups_of(4), setting, hands, make_table, config=CONFIG)))
        assert all_bits(list(Rollout(groups_of(4), setting, crew, config=CONFIG))) == expected != alone

        (tmp_path / "die").touch()  # one process dies, and is started again with the weights
        died = Rollout(groups_of(4), setting, crew, config=CONFIG)
        assert all_bits(list(died)) == expected and len(died.deaths) == 1

        nodes.remove_node(second)
        crew.patience_s = 25.0  # the lost one finds no room on the node that is left
        left = Rollout(groups_of(4), setting, crew, config=CONFIG)
        assert all_bits(list(left)) == expected and len({bar[0] for bar in left.timeline.bars}) == 1
        nodes.add_node(num_cpus=1)
        back = Rollout(groups_of(4), setting, crew, config=CONFIG)
        crew.patience_s = 60.0
        assert all_bits(list(back)) == expected and {bar[0] for bar in back.timeline.bars} == {0, 1}
