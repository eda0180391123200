"""Normalisation: inverse pairs, statistics of relative actions, and a robot checked against its dataset."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from wamlab.data.lerobot import RobotDataset, open_dataset
from wamlab.data.normalize import (
    Normalizers,
    Quantiles,
    Spread,
    measure_normalizers,
    normalizers_from_dict,
    read_vectors,
    to_absolute,
    to_relative,
)
from wamlab.data.robot import RobotConfig, check_robot, read_robot, robot_from_dict, write_robot
from wamlab.data.windows import WindowConfig
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.types import Episode

ROBOT = RobotConfig(
    cameras=("top",),
    layout="single",
    view_height_px=32,
    view_width_px=32,
    relative_dims=(0, 2),
    max_action_dim=5,
    max_state_dim=6,
)
WINDOW = WindowConfig(frame_stride=1, latents_per_block=1, actions_per_block=4, max_blocks=2)


def recorded(num_ticks: int, *, action_dim: int = 3, state_dim: int = 4) -> Episode:
    rng = np.random.default_rng(num_ticks)
    return Episode(
        frames={"top": np.zeros((num_ticks, 32, 32, 3), np.uint8)},
        state=rng.normal(size=(num_ticks, state_dim)).astype(np.float32),
        action=rng.normal(size=(num_ticks, action_dim)).astype(np.float32),
        instruction="push it",
        fps=10.0,
    )


def quantiles_of(normalizers: Normalizers) -> Quantiles:
    assert isinstance(normalizers.action, Quantiles)
    return normalizers.action


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> RobotDataset:
    root = tmp_path_factory.mktemp("normalize") / "robot"
    return open_dataset(write_dataset(map(recorded, (12, 9, 3, 20)), root, version="v2.1"))


@pytest.fixture(scope="module")
def video_only(tmp_path_factory: pytest.TempPathFactory) -> RobotDataset:
    root = tmp_path_factory.mktemp("normalize") / "video"
    return open_dataset(write_dataset([recorded(12, action_dim=0, state_dim=0)], root))


@pytest.mark.parametrize("seed", range(20))
def test_quantiles_there_and_back_is_clipping(seed):
    rng = np.random.default_rng(seed)
    low = rng.normal(size=7) * 10 ** rng.uniform(-3, 3, 7)
    high = low + 10 ** rng.uniform(-3, 3, 7) * (rng.random(7) > 0.2)  # a fifth of the dimensions is constant
    scale = Quantiles(low, high)
    values = rng.uniform(low - 2 * (high - low), high + 2 * (high - low), (4, 5, 7))
    there = scale.to_model(values)
    assert np.abs(there).max() <= 1
    np.testing.assert_allclose(
        scale.to_robot(there), np.clip(values, low, high), rtol=1e-5, atol=1e-6 * (high - low).max()
    )


def test_the_outermost_quantiles_become_minus_one_and_one():
    scale = Quantiles(np.array([-3.0, 10.0]), np.array([5.0, 12.0]))
    values = np.array([[-3, 10], [1, 11], [5, 12], [9, 0]])
    np.testing.assert_array_equal(scale.to_model(values), [[-1, -1], [0, 0], [1, 1], [1, -1]])


def test_a_constant_dimension_passes_clipped_and_comes_back_constant():
    scale = Quantiles(np.array([0.4]), np.array([0.4]))
    np.testing.assert_allclose(scale.to_model(np.array([[0.4], [0.7], [9.0]])), [[0.4], [0.7], [1]])
    np.testing.assert_allclose(scale.to_robot(np.array([[-1.0], [0.2], [1.0]])), [[0.4]] * 3)


def test_spread_there_and_back_changes_nothing():
    rng = np.random.default_rng(0)
    scale = Spread(rng.normal(size=6), np.append(rng.uniform(0.1, 9, 5), 0))
    values = rng.normal(size=(3, 4, 6))
    np.testing.assert_allclose(scale.to_robot(scale.to_model(values)), values, atol=1e-5)


def test_relative_there_and_back_changes_nothing():
    rng = np.random.default_rng(0)
    actions, state = rng.normal(size=(2, 5, 4)), rng.normal(size=(2, 6))
    relative = to_relative(actions, state, (0, 3))
    np.testing.assert_array_equal(relative[..., 1:3], actions[..., 1:3])
    np.testing.assert_allclose(relative[1, :, 3], actions[1, :, 3] - state[1, 3])
    np.testing.assert_allclose(to_absolute(relative, state, (0, 3)), actions)


def test_relative_statistics_pool_the_ticks_of_every_block(dataset):
    differences = []
    for episode in range(dataset.num_episodes):
        actions, state = dataset.rows(episode, "action"), dataset.rows(episode, "observation.state")
        for row in range(len(actions) - 3):
            differences += [actions[row + tick] - state[row, :3] for tick in range(4)]
    low, high = np.quantile(differences, [0.01, 0.99], axis=0)
    scale = quantiles_of(measure_normalizers(dataset, ROBOT, 4))
    np.testing.assert_allclose(scale.low[[0, 2]], low[[0, 2]], rtol=1e-5)
    np.testing.assert_allclose(scale.high[[0, 2]], high[[0, 2]], rtol=1e-5)
    np.testing.assert_allclose(scale.low[1], dataset.stats("action")["q01"][1])  # absolute, as stored
    assert not np.allclose(scale.low[0], dataset.stats("action")["q01"][0])


@pytest.mark.parametrize(("mode", "names"), [("min_max", ("min", "max")), ("mean_std", ("mean", "std"))])
def test_other_normalizations_use_their_own_statistics(dataset, mode, names):
    normalizers = measure_normalizers(dataset, replace(ROBOT, normalization=mode), 4)
    for values, name in zip(vars(normalizers.state).values(), names, strict=True):
        np.testing.assert_allclose(values, dataset.stats("observation.state")[name])


def test_fewer_measured_rows_stop_early_and_repeat_themselves(dataset):
    one, again = (quantiles_of(measure_normalizers(dataset, ROBOT, 4, max_rows=1)) for _ in range(2))
    np.testing.assert_array_equal(one.low, again.low)
    assert (one.low != quantiles_of(measure_normalizers(dataset, ROBOT, 4)).low).any()


def test_normalizers_there_and_back_is_clipping_in_robot_units(dataset):
    normalizers = measure_normalizers(dataset, ROBOT, 4)
    actions = dataset.rows(0, "action")[:8].reshape(2, 4, 3)
    state = dataset.rows(0, "observation.state")[[0, 4]]
    there = normalizers.actions_to_model(actions, state)
    assert there.shape == (2, 4, 5)
    assert not there[..., 3:].any()
    assert normalizers.action_mask.tolist() == [True] * 3 + [False] * 2
    relative = to_relative(actions, state, (0, 2))
    scale = quantiles_of(normalizers)
    clipped = np.clip(relative, scale.low, scale.high)
    np.testing.assert_allclose(
        normalizers.actions_to_robot(there, state), to_absolute(clipped, state, (0, 2)), atol=1e-5
    )
    assert normalizers.state_to_model(state).shape == (2, 6)


@pytest.mark.parametrize("mode", ["q99", "mean_std"])
def test_normalizers_survive_json_exactly(dataset, mode):
    normalizers = measure_normalizers(dataset, replace(ROBOT, normalization=mode), 4)
    returned = normalizers_from_dict(json.loads(json.dumps(normalizers.to_dict())))
    assert returned.to_dict() == normalizers.to_dict()
    assert isinstance(returned, Normalizers)
    state = dataset.rows(0, "observation.state")
    np.testing.assert_array_equal(returned.state_to_model(state), normalizers.state_to_model(state))


def test_a_state_of_another_robot_is_refused(dataset):
    with pytest.raises(InputError, match="the state has 7 dimensions, the dataset's has 4"):
        measure_normalizers(dataset, ROBOT, 4).state_to_model(np.zeros((1, 7)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_found(tmp_path, bad):
    root = tmp_path / "broken"
    write_dataset([recorded(12), recorded(9)], root, version="v2.1")
    path = root / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(path)
    column = table.schema.get_field_index("action")
    rows = table["action"].to_pylist()
    rows[5][1] = bad
    field = table.schema.field(column)
    pq.write_table(table.set_column(column, field, pa.array(rows, field.type)), path)
    broken = open_dataset(root)
    read_vectors(broken, 0, "action")
    with pytest.raises(InputError, match=rf"column action of episode 1 holds \[.*{bad}.*\] at row 5"):
        read_vectors(broken, 1, "action")


def test_a_video_only_dataset_has_normalizers_of_no_dimension(video_only):
    robot = replace(ROBOT, state_column=None, action_column=None, relative_dims=())
    check_robot(robot, video_only, WINDOW)
    normalizers = measure_normalizers(video_only, robot, 4)
    assert not normalizers.action_mask.any()
    np.testing.assert_array_equal(normalizers.state_to_model(np.zeros((2, 0))), np.zeros((2, 6)))


def test_a_robot_survives_its_file(tmp_path: Path):
    write_robot(ROBOT, tmp_path / "robot.json")
    assert read_robot(tmp_path / "robot.json") == ROBOT
    assert [path.name for path in tmp_path.iterdir()] == ["robot.json"]


def test_an_unknown_setting_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="robot has no setting 'camera', did you mean 'cameras'"):
        robot_from_dict({"camera": ["top"]})


def test_a_robot_names_all_its_own_mistakes_at_once():
    with pytest.raises(InputError) as raised:
        replace(ROBOT, layout="gird", crop_fraction=1.5, normalization="q95", prompt="{taks}", relative_dims=(1, 1))
    for part in ("layout 'gird'", "crop_fraction is 1.5", "normalization 'q95'", "{taks}", "relative_dims (1, 1)"):
        assert part in str(raised.value)


def test_a_layout_counts_its_cameras():
    with pytest.raises(InputError, match="layout 'droid' shows 3 to 3 cameras, got 1"):
        replace(ROBOT, layout="droid")


def test_everything_wrong_with_a_dataset_is_named_at_once(dataset):
    robot = replace(
        ROBOT, cameras=("tpo", "wrist"), layout="row", state_column="state", max_action_dim=2, relative_dims=(0, 8)
    )
    with pytest.raises(InputError) as raised:
        check_robot(robot, dataset, replace(WINDOW, max_blocks=9))
    for part in (
        "no camera 'tpo', did you mean 'top'?",
        "no camera 'wrist'; there is 'top'",
        "no column 'state': name another state_column, or None",
        "column 'action' has 3 dimensions, more than max_action_dim 2",
        "relative_dims [8] are outside the 3 dimensions of the action",
        "a window needs 37 rows, the longest episode has 20",
    ):
        assert part in str(raised.value)


def test_a_robot_that_fits_its_dataset_passes(dataset):
    check_robot(ROBOT, dataset, WINDOW)
    check_robot(replace(ROBOT, cameras=("observation.images.top",)), dataset, WINDOW)


@pytest.mark.parametrize(
    "damage",
    [
        {"action": {}},
        {"action": {"kind": "Quantiles", "low": [0.0]}},
        {"state": {"kind": "Quantiles", "low": [0.0], "high": [1.0, 2.0]}},
        {"state": {"kind": "Other"}},
        {"relative_dims": 3},
        {"max_action_dim": "many"},
    ],
)
def test_damaged_normalisers_are_refused_in_one_sentence(dataset: RobotDataset, damage: dict[str, object]) -> None:
    values = measure_normalizers(dataset, ROBOT, 4).to_dict()
    with pytest.raises(InputError, match=r"^runs/normalizers\.json is damaged \(.*\): restore it from a copy$"):
        normalizers_from_dict(json.loads(json.dumps(values)) | damage, where="runs/normalizers.json")
