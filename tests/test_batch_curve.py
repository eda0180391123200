"""Workers plan for as many episodes at a time as their own measured calls say; trajectories do not depend on it."""

import time
from dataclasses import replace

import numpy as np
import pytest
from network_player import NetworkHands
from players import EXACT, SmallHands, all_bits, groups_of, make_seen_table, make_table

from wamlab.errors import InputError
from wamlab.rl.batch_curve import BatchCurve
from wamlab.rl.play import PlayConfig, play
from wamlab.rl.segments import Asked, Planned

CONFIG = PlayConfig(rule="fifo", num_members=4, num_slots=15)
CHOSEN = replace(EXACT, is_exact=False, is_batch_chosen=True)


class CostlyHands(SmallHands):
    """Hands whose calls take a time of their own for each batch."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power, self.sizes = power, []

    def __call__(self, asked: Asked) -> Planned:
        self.sizes.append(len(asked.keys))
        time.sleep(0.004 if not self.power else 0.002 * len(asked.keys) ** self.power)
        return super().__call__(asked)


@pytest.mark.parametrize(("power", "wanted"), [(0, 16), (2, 1)], ids=["calls cost alike", "cost grows with its square"])
def test_the_size_of_calls_follows_their_measured_cost(power: int, wanted: int) -> None:
    hands, curve = CostlyHands(power), BatchCurve()
    played = list(play(groups_of(4, cap=6), CHOSEN, hands, make_table, config=CONFIG, curve=curve))
    assert len(played) == 4 and {1, 2, 4, 8} <= set(curve.measured_s)
    assert {1, 2, 4, 8} <= set(hands.sizes)  # the whole curve was measured, in real rounds
    assert curve.choose(16) in ((8, 16) if wanted == 16 else (1, 2))
    hands.sizes.clear()
    list(play(groups_of(4, cap=6), replace(CHOSEN, iteration=3), hands, make_table, config=CONFIG, curve=curve))
    early = hands.sizes[:4]  # the next iteration goes on with what was measured
    assert (min(early) >= 7) if wanted == 16 else (max(early) <= 2)


def test_every_episode_is_planned_for_once_a_round_whatever_was_measured() -> None:
    curve = BatchCurve()
    draw = np.random.default_rng(0)
    for _ in range(200):
        num_rows = int(draw.integers(1, 70))
        sizes = curve.cut(num_rows)
        assert sum(sizes) == num_rows and min(sizes) >= 1
        for size in sizes:
            curve.add(size, float(draw.uniform(0.5, 1.5)) * (0.01 + 0.002 * size))
    with pytest.raises(InputError, match="at least 1"):
        curve.cut(0)


def test_exact_trajectories_are_bit_equal_with_and_without() -> None:
    groups = groups_of(2, cap=4)
    plain = list(play(groups, EXACT, SmallHands(), make_table, config=CONFIG))
    chosen = list(play(groups, replace(EXACT, is_batch_chosen=True), SmallHands(), make_table, config=CONFIG))
    assert all_bits(chosen) == all_bits(plain)
    setting = replace(EXACT, is_batch_chosen=True)
    small = replace(CONFIG, num_members=2, num_workers=2, num_slots=2)
    others = list(play(groups, setting, SmallHands(), make_table, config=small))
    assert all_bits(others).items() <= all_bits(plain).items()


def test_the_real_network_plans_the_same_to_rounding_in_calls_of_any_size() -> None:
    groups, hands = groups_of(2, cap=3), NetworkHands()
    whole, cut = (
        list(play(groups, setting, hands, make_seen_table, config=CONFIG))
        for setting in (replace(CHOSEN, is_batch_chosen=False), CHOSEN)
    )
    first = {s.key: s.chunks["actions"][0] for p in whole for s in p.segments}
    for played in cut:
        for segment in played.segments:
            np.testing.assert_allclose(segment.chunks["actions"][0], first[segment.key], atol=1e-5)
