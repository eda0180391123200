"""The order of samples: whole epochs, groups of one episode, the same for any number of ranks."""

from collections import Counter

import numpy as np
import pytest

from wamlab.data.order import NEVER, SampleOrder
from wamlab.errors import InputError

EPISODES = np.repeat(np.arange(9), [13, 1, 7, 20, 5, 8, 8, 11, 4])  # 77 samples
NUM = len(EPISODES)


def order(pool: int = 1, lanes: int = 4, seed: int = 3) -> SampleOrder:
    return SampleOrder(NUM, seed, pool=pool, num_lanes=lanes, episodes=EPISODES)


@pytest.mark.parametrize("pool", [1, 2, 5, 100])
@pytest.mark.parametrize("lanes", [1, 4, 10, 77, 90])
def test_every_epoch_shows_every_sample_once(pool, lanes):
    drawn = order(pool, lanes)
    for epoch in range(2):
        samples = [drawn.draw(epoch * NUM + place).sample for place in range(NUM)]
        assert sorted(samples) == list(range(NUM))


def test_epochs_and_seeds_differ():
    def first(drawn: SampleOrder, epoch: int) -> list[int]:
        return [drawn.draw(epoch * NUM + place).sample for place in range(NUM)]

    for pool in (1, 4):
        assert first(order(pool), 0) != first(order(pool), 1)
        assert first(order(pool), 0) != first(order(pool, seed=4), 0)


def test_a_group_is_of_one_episode_and_fills_one_place_of_successive_batches():
    drawn = order(pool=5, lanes=4)
    places: dict[tuple[int, int], list[int]] = {}
    for position in range(NUM):
        draw = drawn.draw(position)
        assert draw.sample in draw.members
        assert len({int(EPISODES[member]) for member in draw.members}) == 1
        assert len(draw.members) <= 5
        places.setdefault(draw.group, []).append(position)
    for positions in places.values():
        assert set(np.diff(positions)) <= {4}
    sizes = Counter(len(p) for p in places.values())
    assert sizes[5] > 8  # most groups are whole


def test_a_batch_mixes_as_many_groups_as_it_has_places():
    drawn = order(pool=5, lanes=4)
    for batch in range(NUM // 4):
        assert len({drawn.draw(4 * batch + place).group for place in range(4)}) == 4


@pytest.mark.parametrize("pool", [1, 5])
def test_the_next_use_of_an_episode_is_the_next_position_that_decodes_it(pool):
    drawn = order(pool)
    draws = [drawn.draw(position) for position in range(3 * NUM)]
    shown = [int(EPISODES[draw.sample]) if draw.sample == draw.members[0] else -1 for draw in draws]
    for after in (-1, 0, 17, NUM - 1, NUM, 2 * NUM - 2):
        for episode in range(9):
            wanted = next(p for p in range(after + 1, 3 * NUM) if shown[p] == episode)
            assert drawn.next_use(episode, after) == wanted
    assert drawn.next_use(99, 0) == NEVER


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": 0}, "pool is 0, need at least 1"),
        ({"pool": 2}, "have no episodes"),
        ({"pool": 2, "episodes": EPISODES, "is_shuffled": False}, "come in order"),
    ],
)
def test_wrong_orders_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        SampleOrder(NUM, 0, **options)
