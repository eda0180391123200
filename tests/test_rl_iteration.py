"""Iterations that are compared are the same work: episodes, chunks and updates, whoever plays them in which order."""

import numpy as np

from wamlab.recipes.rl_iteration import EndingPolicy, EndingTable, Trainer, WayToPlay, lengths_of
from wamlab.rl.play import PlayConfig, play
from wamlab.rl.segments import Group, Setting

SIZES = {"num_groups": 2, "num_members": 2}


def test_both_ways_play_the_drawn_lengths_and_learn_the_same() -> None:
    weights = []
    for way in (WayToPlay("static", is_prefix_shared=False), WayToPlay(is_streamed=True)):
        with Trainer(way, most=1, num_workers=2, num_slots=2, **SIZES) as trainer:
            found = trainer.iterate()
            drawn = lengths_of(0, 2, 2)
            assert found.num_chunks == drawn.lengths.sum()
            assert 0 < found.rollout_s < found.total_s and found.update_s > 0 and 0 < found.busy <= 1
            assert trainer.bench.notes["success"] == drawn.is_success.mean()
            assert trainer.bench.notes["ratio_error"] < 1e-3
            weights.append(np.concatenate([p.detach().numpy().ravel()[:100] for p in trainer.bench.net.parameters()]))
    np.testing.assert_allclose(weights[0], weights[1], atol=1e-4)


def test_episodes_end_when_they_are_told_to() -> None:
    policy = EndingPolicy(WayToPlay(), 1, 2)
    drawn = lengths_of(5, 1, 2)
    group = Group(0, "push", seed=3, cap=40)
    played = play([group], Setting(iteration=5), policy, EndingTable, config=PlayConfig(num_members=2))
    (found,) = played
    assert [s.num_chunks for s in found.segments] == drawn.lengths[0].tolist()
    assert [s.is_success for s in found.segments] == drawn.is_success[0].tolist()
    assert policy.policy.prefixes.counts.shared_firsts == 0.5
