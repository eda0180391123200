"""Statistics measured in a stream equal numpy's on all rows at once, and are written whole or not at all."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recordings import single_camera_episode

from wamlab.data import normalize, value_counts
from wamlab.data.lerobot import open_dataset
from wamlab.data.measure import measure_dataset, write_stats
from wamlab.data.normalize import measure_normalizers
from wamlab.data.robot import RobotConfig
from wamlab.data.statistics import QUANTILES, measure_rows
from wamlab.data.value_counts import RunningStatistics, ValueCounts
from wamlab.data.walk import walk_tables
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.recipes.measure_data import measure_data
from wamlab.types import Episode

LENGTHS, TICKS = (30, 4, 51), 6


def episode(first: int, length: int) -> Episode:
    return replace(single_camera_episode(first, length), signals={"next.done": np.arange(length) == length - 1})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    episodes = [episode(100 * n, length) for n, length in enumerate(LENGTHS)]
    return {version: write_dataset(episodes, folder / version, version=version) for version in ("v2.1", "v3.0")}


@pytest.fixture(params=["v2.1", "v3.0"])
def root(request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sources[request.param], tmp_path / "set")


@pytest.fixture
def root_v2(sources: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sources["v2.1"], tmp_path / "set")


def edit_table(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def in_parts(rows: np.ndarray, size: int) -> RunningStatistics:
    running = RunningStatistics(rows.shape[1])
    for start in range(0, len(rows), size):
        running.add(rows[start : start + size])
    return running


def test_rows_in_parts_measure_as_all_at_once() -> None:
    rng = np.random.default_rng(0)
    rows = np.stack([1e6 + rng.normal(size=5000), rng.integers(-3, 3, 5000) * 0.5, np.zeros(5000) - 0.0], axis=1)
    expected = measure_rows(rows)
    for size in (7, 1000, 5000):
        running = in_parts(rows, size)
        found = running.measure(QUANTILES)
        assert running.relative_error == 0 and found.keys() == expected.keys()
        for kind, values in expected.items():
            assert found[kind] == pytest.approx(values, rel=1e-12, abs=1e-12), kind


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e4])
def test_quantiles_of_many_values_keep_to_the_error_they_state(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_counts, "VALUES_AT_ONCE", 20_000)
    rows = np.random.default_rng(1).normal(size=(300_000, 2)).astype(np.float32) * np.float32(spread)
    monkeypatch.setattr(value_counts, "COUNTS_IN_ALL", 2**13)
    running = in_parts(rows, 4096)
    found, expected = running.measure(QUANTILES), measure_rows(rows)
    assert 0 < running.relative_error < 1e-2
    for name in QUANTILES:
        assert found[name] == pytest.approx(expected[name], rel=running.relative_error, abs=1e-4 * spread), name
    for name in ("mean", "std", "min", "max"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9 * spread), name


def test_counts_stay_few_whatever_comes() -> None:
    counts = ValueCounts(limit=1000)
    rng = np.random.default_rng(2)
    for scale in range(-60, 60):
        counts.add(rng.normal(size=500) * 10.0**scale)
        assert len(counts._keys) <= 1000


def test_counts_of_other_precision_merge() -> None:
    rng = np.random.default_rng(3)
    many, few = rng.normal(size=50_000), np.full(20_000, 0.25)
    fine, coarse = ValueCounts(), ValueCounts(limit=5000)
    fine.add(few)
    coarse.add(many)
    fine.merge(coarse)
    shares = [0.0, 0.2, 0.5, 0.97]
    assert fine.relative_error == coarse.relative_error < 1e-2
    assert fine.quantiles(shares) == pytest.approx(
        np.quantile(np.concatenate([many, few]), shares), rel=fine.relative_error
    )


def test_a_dataset_measures_as_its_rows_at_once(root: Path) -> None:
    dataset, seen = open_dataset(root), []
    measured = measure_dataset(dataset, num_ticks=TICKS, relative=["action"] if dataset.version == "v3.0" else None,
                               seen=seen.append)  # fmt: skip
    assert sum(seen) == sum(LENGTHS) and measured.relative_error == 0
    columns = [name for name in dataset.features if name not in dataset.cameras]
    assert list(measured.columns) == columns
    for name in columns:
        expected = measure_rows(np.concatenate([dataset.rows(e, name) for e in range(3)]))
        for kind, values in expected.items():
            assert measured.columns[name][kind] == pytest.approx(values, rel=1e-6, abs=1e-7), (name, kind)
    if dataset.version == "v3.0":  # without modality.json: the whole of both
        check_relative(dataset, measured, "action", slice(0, 4))


def check_relative(dataset: Any, measured: Any, name: str, span: slice) -> None:
    ahead = np.concatenate(
        [
            dataset.rows(e, "action")[row : row + TICKS][None, :, span]
            - dataset.rows(e, "observation.state")[row, span]
            for e in range(3)
            for row in range(LENGTHS[e] - TICKS + 1)
        ]
    )
    for tick in range(TICKS):
        for kind, values in measure_rows(ahead[:, tick]).items():
            found = measured.relative_ticks[name][kind]
            assert (found if kind == "count" else found[tick]) == pytest.approx(values, rel=1e-5, abs=1e-6), kind
    for kind, values in measure_rows(ahead.reshape(-1, ahead.shape[-1])).items():
        assert measured.relative[name][kind] == pytest.approx(values, rel=1e-5, abs=1e-6), kind


def test_parts_of_modality_are_relative_but_grippers(root_v2: Path) -> None:
    parts = {"arm": {"start": 0, "end": 3}, "gripper": {"start": 3, "end": 4}}
    content = {"state": parts, "action": {**parts, "base": {"start": 0, "end": 1}}}
    (root_v2 / "meta/modality.json").write_text(json.dumps(content))
    dataset = open_dataset(root_v2)
    measured = measure_dataset(dataset, num_ticks=TICKS)
    assert measured.relative.keys() == {"arm"}
    check_relative(dataset, measured, "arm", slice(0, 3))
    chosen = measure_dataset(dataset, num_ticks=TICKS, relative=["gripper"])
    assert chosen.relative.keys() == {"gripper"}
    with pytest.raises(InputError, match=r"has no part 'base' of one size in both action and state; there is arm, gri"):
        measure_dataset(dataset, relative=["base"])
    assert not measure_dataset(dataset, num_ticks=0).relative
    assert not measure_dataset(dataset, num_ticks=100).relative  # no episode is that long


def test_written_statistics_are_read_and_cameras_keep_theirs(root: Path) -> None:
    path = root / "meta/stats.json"
    before = json.loads(path.read_text())
    camera = "observation.images.top"
    path.write_text(json.dumps({camera: before[camera], "action": {"mean": [0]}}))
    dataset = open_dataset(root)
    written = write_stats(dataset, measure_dataset(dataset, num_ticks=TICKS, relative=["action"]))
    after = json.loads(path.read_text())
    assert after.keys() == before.keys() and after[camera] == before[camera]
    for name, stats in before.items():
        for kind, values in stats.items():
            assert np.array(after[name][kind]) == pytest.approx(np.array(values), rel=1e-6, abs=1e-7), (name, kind)
    assert [p.name for p in written] == [
        "stats.json", "relative_stats_dreamzero.json", "relative_horizon_stats_dreamzero.json",
    ]  # fmt: skip
    ticks = json.loads(written[2].read_text())["action"]
    assert np.array(ticks["q99"]).shape == (TICKS, 4)
    assert open_dataset(root).stats("action")["q99"] == pytest.approx(before["action"]["q99"])
    assert not [p for p in (root / "meta").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("mode", ["q99", "min_max", "mean_std"])
def test_normalisers_are_made_of_the_written_relative_statistics(
    root_v2: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"base": {"start": 3, "end": 4}, "arm": {"start": 0, "end": 3}}
    (root_v2 / "meta/modality.json").write_text(json.dumps({"state": parts, "action": parts}))
    robot = RobotConfig(
        cameras=("top",), layout="single", normalization=mode, relative_dims=(0, 2, 3),
        state_column="state.base + state.arm", action_column="action.base + action[0:3]",
    )  # fmt: skip
    dataset = open_dataset(root_v2)
    expected = measure_normalizers(dataset, robot, TICKS)
    write_stats(dataset, measure_dataset(dataset, num_ticks=TICKS))
    with monkeypatch.context() as patch:
        patch.setattr(normalize, "_sample_relative", None)  # no pass of its own over the tables
        found = measure_normalizers(open_dataset(root_v2), robot, TICKS)
    for kind, values in vars(expected.action).items():
        assert vars(found.action)[kind] == pytest.approx(values, rel=1e-5, abs=1e-6), kind
    with pytest.warns(UserWarning, match=rf"blocks of {TICKS} ticks and these are of 4: .* --write --horizon 4 keeps"):
        other = measure_normalizers(open_dataset(root_v2), robot, 4)
    for name in ("relative_stats_dreamzero.json", "relative_horizon_stats_dreamzero.json"):
        (root_v2 / "meta" / name).rename(root_v2 / name)
    anew = measure_normalizers(open_dataset(root_v2), robot, 4)
    assert other.to_dict() == anew.to_dict()
    path = root_v2 / "meta/relative_stats_dreamzero.json"
    for content, message in (("[]", "does not map parts"), ('{"arm": {}, "base": {}}', "malformed")):
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            measure_normalizers(open_dataset(root_v2), robot, TICKS)
    path.write_text('{"arm": {}}')  # without the base: measured
    assert measure_normalizers(open_dataset(root_v2), robot, 4).to_dict() == anew.to_dict()


def test_values_that_are_not_finite_are_named(root_v2: Path) -> None:
    path = root_v2 / "data/chunk-000/episode_000001.parquet"
    edit_table(path, lambda rows: rows[2].update(action=[0.0, float("nan"), 0.0, 0.0]))
    with pytest.raises(InputError, match=r"column action of episode 1 holds \[0\.0, nan, .* at row 2; repair"):
        measure_dataset(open_dataset(root_v2))


@pytest.mark.parametrize("row_group_size", [7, 10_000])
def test_episodes_are_walked_whatever_the_row_groups(root: Path, row_group_size: int) -> None:
    for path in (root / "data").rglob("*.parquet"):
        pq.write_table(pq.read_table(path), path, row_group_size=row_group_size)
    dataset = open_dataset(root)
    walked = dict(walk_tables(dataset, ["action"]))
    assert list(walked) == [0, 1, 2]
    for number, table in walked.items():
        assert table.equals(dataset.table(number).select(table.column_names))
    assert list(dict(walk_tables(dataset, ["action"], [2, 0]))) == [0, 2]


def test_rows_that_are_missing_or_scattered_are_named(root: Path) -> None:
    paths = sorted((root / "data").rglob("*.parquet"))
    edit_table(paths[0], lambda rows: rows.insert(len(rows), rows[3]))
    with pytest.raises(InputError, match=r"episode 0 has 31 rows together in|rows of episode 0 are in several places"):
        list(walk_tables(open_dataset(root), ["action"]))
    edit_table(paths[0], lambda rows: rows.clear())
    with pytest.raises(InputError, match="has no rows of episode 0, which the episode list has there"):
        list(walk_tables(open_dataset(root), ["action"]))
    paths[0].write_bytes(b"PAR1")
    with pytest.raises(InputError, match="cannot read"):
        list(walk_tables(open_dataset(root), ["action"]))


def test_the_command_prints_and_writes_only_if_asked(root_v2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root_v2 / "meta/stats.json").unlink()
    measure_data(root_v2, horizon=TICKS)
    output = capsys.readouterr().out
    assert "observation.state[3]" in output and "q99" in output and "wrote" not in output
    assert not (root_v2 / "meta/stats.json").exists()
    measure_data(root_v2, write=True, horizon=0)
    assert "stats.json" in capsys.readouterr().out
    assert open_dataset(root_v2).stats("action")["q01"].shape == (4,)
    with pytest.raises(InputError, match="--horizon is -1: give at least 0"):
        measure_data(root_v2, horizon=-1)


def test_a_short_episode_changes_no_shape(tmp_path: Path) -> None:
    bare = replace(episode(0, 1), frames={})
    dataset = open_dataset(write_dataset([bare], tmp_path / "one"))
    measured = measure_dataset(dataset, num_ticks=1)
    assert measured.columns["action"]["std"].tolist() == [0] * 4 and measured.relative_ticks["action"][
        "mean"
    ].shape == (1, 4)
