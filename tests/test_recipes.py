"""The whole path at the smallest size: data, training, exact resume, evaluation, policy, command line."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from wamlab.cli import main
from wamlab.data.import_videos import import_videos
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.run import Run, find_run, open_run, read_evaluations, read_metrics
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe, recipe_from_dict, tiny, tiny_video
from wamlab.recipes.evaluate import copy_last, read_held_out
from wamlab.recipes.fit import fit, start_run, summarize
from wamlab.recipes.playing import play_task
from wamlab.recipes.policy import load_policy
from wamlab.recipes.published import find_recipe
from wamlab.sim.experts import play_episodes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "reach"
    return write_dataset(play_episodes(("reach",), 8, seed=0, size=32), root)


def small(root: Path, num_steps: int = 6) -> Recipe:
    """Return ``tiny`` cut to a second of training."""
    recipe = tiny()
    return replace(
        recipe,
        name="small",
        data=replace(recipe.data, root=root, held_out_fraction=0.25),
        robot=replace(recipe.robot, view_height_px=32, view_width_px=32),
        model=replace(recipe.model, dim=32, layers=1, heads=2, ffn_dim=64, mlp_dim=32),
        train=replace(recipe.train, num_steps=num_steps, batch_size=4, num_micro_batches=2),
        evaluation=replace(recipe.evaluation, every=3, num_clips=5, noise_levels=(0.5,)),
        checkpoint_every=2,
    )


def trained(recipe: Recipe, runs: Path) -> Run:
    bench = Workbench(recipe)
    with start_run(bench, runs) as run:
        for _ in fit(bench, run):
            pass
        run.finish(summary=summarize(run))
    return open_run(run.folder)


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(small(dataset), tmp_path_factory.mktemp("work") / "runs")


def test_a_run_folder_tells_the_whole_story(run: Run) -> None:
    records, _ = read_metrics(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[0]["split_s"].keys() == {"data", "encode", "forward", "backward", "optimizer"}
    assert all(0 < record["mfu"] < 1 and 0 < record["hfu"] < 1 for record in records)
    assert all(record["samples_per_s_device"] == record["samples_per_s"] for record in records)
    assert [line["step"] for line in read_evaluations(run)] == [0, 3, 6]
    assert [path.name for path in sorted(run.pictures.iterdir())] == [f"step_{step:08d}.png" for step in (0, 3, 6)]
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step_00000004", "step_00000006"]
    assert run.environment["fingerprints"].keys() == {"clips", "video codec", "text encoder"}
    assert run.summary is not None
    assert run.summary["steps"] == 6


def test_a_recipe_is_rebuilt_from_its_run(run: Run, dataset: Path) -> None:
    assert recipe_from_dict(run.config) == small(dataset)
    with pytest.raises(InputError, match="has the fields colour, which this version lacks"):
        recipe_from_dict(run.config | {"colour": 1})
    older = {name: value for name, value in run.config.items() if name not in ("features", "speed")}
    with pytest.warns(UserWarning, match="is of an older version and lacks features, speed: taken as by default"):
        assert recipe_from_dict(older) == small(dataset)
    with pytest.raises(InputError, match="config lacks the fields name"):
        recipe_from_dict({name: value for name, value in older.items() if name != "name"})


def test_an_interrupted_run_continues_bit_for_bit(run: Run, dataset: Path, tmp_path: Path) -> None:
    """Stop after step 5, go on from the checkpoint of step 4: the same losses and weights as without a stop."""
    recipe = small(dataset)
    with pytest.raises(KeyboardInterrupt), start_run(Workbench(recipe), tmp_path / "runs") as stopped:
        bench = Workbench(recipe)
        for _ in islice(fit(bench, stopped), 5):
            pass
        raise KeyboardInterrupt
    assert open_run(stopped.folder).state == "stopped"
    bench = Workbench(recipe)
    with start_run(bench, tmp_path / "runs", is_resumed=True) as resumed:
        steps = [record.step for record in fit(bench, resumed)]
    assert steps == [5, 6]

    def story(of: Run) -> list[tuple[float, float]]:
        return [(record["loss"], record["gradient_norm"]) for record in read_metrics(of)[0]]

    assert story(resumed) == story(run)
    for name in ("model.safetensors", "ema.safetensors"):
        files = [folder.checkpoints / "step_00000006" / name for folder in (run, resumed)]
        assert files[0].read_bytes() == files[1].read_bytes()
    evaluations = [read_evaluations(folder)[-1]["held_out_loss"] for folder in (run, resumed)]
    assert evaluations[0] == evaluations[1]


def test_a_killed_run_resumes_from_its_newest_checkpoint(dataset: Path, run: Run, tmp_path: Path) -> None:
    """SIGKILL in mid-training, then --resume in a new process: the loss curve of an undisturbed run."""
    script = tmp_path / "job.py"
    script.write_text(
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from test_recipes import small; from wamlab.recipes.order import TrainOrder\n"
        "from wamlab.recipes.training import train_recipe\n"
        "recipe, is_resumed = small(Path(sys.argv[2]), int(sys.argv[4])), len(sys.argv) > 5\n"
        "train_recipe(TrainOrder(recipe, Path(sys.argv[3]), resume=is_resumed))\n"
    )
    command = [sys.executable, str(script), str(Path(__file__).parent), str(dataset), str(tmp_path / "runs"), "40"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not list((tmp_path / "runs").glob("*/checkpoints/step_00000004")):
        assert job.poll() is None, "the job ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    killed = find_run(tmp_path / "runs")
    assert killed.state == "lost"
    before = {record["step"]: record["loss"] for record in read_metrics(killed)[0]}
    subprocess.run([*command, "resume"], check=True, capture_output=True)
    after = {record["step"]: record["loss"] for record in read_metrics(killed)[0]}
    assert list(after) == list(range(1, 41))
    assert all(after[step] == loss for step, loss in before.items())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": {"shift": 1.0}}, r"noise.shift \(was 5.0, now 1.0\)"),
        ({"model": {"layers": 2}}, "model.layers"),
        ({"train": {"seed": 7}}, "train.seed"),
        ({"train": {"ema_decay": 0.0}}, "train.ema_decay"),
        ({"data": {"held_out_fraction": 0.5}}, "trained on other input"),
        ({}, "has 6 steps"),
    ],
)
def test_resuming_as_another_run_is_refused_and_changes_nothing(
    run: Run, dataset: Path, change: dict, message: str
) -> None:
    recipe = small(dataset)
    for part, values in change.items():
        recipe = replace(recipe, **{part: replace(getattr(recipe, part), **values)})
    before = contents(run.folder)
    with pytest.raises(InputError, match=message):
        start_run(Workbench(recipe), run.folder.parent, is_resumed=True)
    assert contents(run.folder) == before


def test_evaluation_leaves_training_alone(dataset: Path, run: Run, tmp_path: Path) -> None:
    recipe = small(dataset)
    rarely = replace(recipe, evaluation=replace(recipe.evaluation, every=100))
    losses = [[r["loss"] for r in read_metrics(of)[0]] for of in (run, trained(rarely, tmp_path / "runs"))]
    assert losses[0] == losses[1]


def test_held_out_episodes_are_never_trained_on(dataset: Path) -> None:
    bench = Workbench(small(dataset))
    training, held_out = (set(reader.episodes) for reader in bench.readers)
    assert len(held_out) == 2
    assert not training & held_out
    assert {clip.episode for clip in read_held_out(bench).clips} <= held_out


def test_copying_repeats_the_last_frame_before_each_block() -> None:
    frames = np.arange(9, dtype=np.uint8).reshape(1, 9, 1, 1, 1).repeat(3, axis=-1)
    assert copy_last(frames, 4)[0, :, 0, 0, 0].tolist() == [0, 0, 0, 0, 4, 4, 4, 4]


def test_a_policy_is_loaded_without_the_dataset_and_repeats_itself(run: Run) -> None:
    rates = []
    for _ in range(2):
        policy = load_policy(run)
        assert "parts" not in vars(policy.bench)
        rates.append(play_task(policy, "reach", range(3), num_envs=2))
    assert rates[0].episodes == rates[1].episodes
    assert rates[0].num_episodes == 3
    assert 0 <= rates[0].low <= rates[0].rate <= rates[0].high <= 1


def test_video_without_actions_trains_with_the_action_loss_masked(shared: Path, tmp_path: Path) -> None:
    """The three DROID clips, wrapped as a dataset: only video is learnt (spec 1.7)."""
    recipe = tiny_video()
    files = {camera: shared / "data" / "droid_clip" / f"{camera}.mp4" for camera in recipe.robot.cameras}
    root = import_videos(files, tmp_path / "droid", instruction="move the arm")
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=root),
        train=replace(recipe.train, num_steps=12, batch_size=2),
        evaluation=replace(recipe.evaluation, every=12, num_clips=2, noise_levels=(0.5,)),
    )
    with pytest.warns(UserWarning, match="no episode is held out"):
        run = trained(recipe, tmp_path / "runs")
    records, _ = read_metrics(run)
    assert all(record["action_loss"] == 0 for record in records)
    first, last = read_evaluations(run)
    assert last["held_out_video_loss"] < first["held_out_video_loss"]


# The command line: one sentence, a non-zero exit, nothing half-written.


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main([str(word) for word in words]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("wamlab: ")
    assert len(message.splitlines()) == 1
    return message


def train_words(root: Path, runs: Path, *more: str) -> list[str]:
    sizes = ["--train.num-steps", "1", "--robot.view-height-px", "32", "--robot.view-width-px", "32"]
    return ["train", "tiny", "--data.root", str(root), "--runs", str(runs), *sizes, *more]


def test_unknown_names_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'did you mean "runs"?' in refused(capsys, "rums")
    assert 'did you mean "tiny"?' in refused(capsys, "train", "tinny")
    assert "name a recipe to train" in refused(capsys, "train")
    with pytest.raises(InputError, match='no recipe "x": there are tiny'):
        find_recipe("x")


def test_an_unknown_field_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "tiny", "--model.layer", "3"])
    assert stop.value.code == 2
    assert "--model.layers" in capsys.readouterr().err


def test_a_value_of_the_wrong_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "tiny", "--train.num-steps", "many"])
    assert "--train.num-steps" in capsys.readouterr().err


def test_datasets_that_cannot_be_trained_on_are_refused(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    assert "nowhere" in refused(capsys, *train_words(tmp_path / "nowhere", runs))
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, *train_words(tmp_path / "empty", runs))
    assert "camera" in refused(capsys, *train_words(dataset, runs, "--robot.cameras", "top", "side"))
    wrong_action = refused(
        capsys, *train_words(dataset, runs, "--robot.max-action-dim", "3", "--model.max-action-dim", "3")
    )
    assert "action" in wrong_action
    assert "backend" in refused(capsys, *train_words(dataset, runs, "--data.backend", "vhs"))
    assert "differ: give both the same value" in refused(capsys, *train_words(dataset, runs, "--model.max-blocks", "3"))
    assert not runs.exists()


def test_a_damaged_dataset_is_refused(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN actions, and a parquet that promises more rows than the mp4 shows."""
    import shutil

    broken = tmp_path / "nan"
    shutil.copytree(dataset, broken)
    (path,) = (broken / "data").rglob("*.parquet")
    table = pq.read_table(path)
    actions = np.array(table["action"].to_pylist(), dtype=np.float32)
    actions[3, 1] = np.nan
    index = table.column_names.index("action")
    import pyarrow as pa

    listed = pa.FixedSizeListArray.from_arrays(pa.array(actions.reshape(-1)), 4)
    pq.write_table(table.set_column(index, table.schema.field("action"), listed), path)
    message = refused(capsys, *train_words(broken, tmp_path / "runs"))
    assert "action" in message
    assert "3" in message


def test_a_run_that_is_not_there_cannot_be_resumed(run: Run) -> None:
    with pytest.raises(InputError, match="no run named"):
        start_run(
            Workbench(replace(small(Path(run.config["data"]["root"])), name="other")),
            run.folder.parent,
            is_resumed=True,
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [("--train.max-gradient-norm", "-1"), ("--train.beta2", "1.5"), ("--train.learning-rate", "1e30"),
     ("--sampler.num-steps", "0"), ("--noise.shift", "nan"), ("--data.cache-gib", "inf"),
     ("--model.freq-dim", "7")],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_by_name(
    option: str, value: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(train_words(dataset, tmp_path / "runs", option, value))
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert option.removeprefix("--").replace("-", "_") in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_device_that_is_not_there_is_refused(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for device in ("warp", "cuda:99", "meta"):
        assert device in refused(capsys, *train_words(dataset, tmp_path / "runs", "--device", device))
    assert not (tmp_path / "runs").exists()


def test_a_damaged_run_hides_no_other(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = run.folder.parent / "2026-01-01-damaged-000000"
    damaged.mkdir()
    (damaged / "status.json").write_text("{}")
    assert main(["runs", "--root", str(run.folder.parent)]) == 0
    listed = capsys.readouterr().out
    assert "damaged" in listed
    assert run.name in listed
    (damaged / "status.json").unlink()
    damaged.rmdir()


def test_commands_list_and_show_runs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(run.folder.parent)
    assert main(["runs", "--root", root]) == 0
    assert run.name in capsys.readouterr().out
    assert main(["show", "small", "--root", root]) == 0
    assert "report:" in capsys.readouterr().out
    assert "<svg" in (run.folder / "report.html").read_text()
    assert "fits 'nothing'" in refused(capsys, "show", "nothing", "--root", root)


def test_the_command_makes_data_and_refuses_to_overwrite_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "made"
    words = ["data", "make", str(root), "--episodes", "2", "--size-px", "32", "32", "--version", "v2.1"]
    assert main(words) == 0
    assert json.loads((root / "meta" / "info.json").read_text())["codebase_version"] == "v2.1"
    capsys.readouterr()
    assert "exists" in refused(capsys, *words)
    assert "at least 1" in refused(capsys, "data", "make", tmp_path / "none", "--episodes", "0")
    assert not (tmp_path / "none").exists()


def test_the_command_imports_videos(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = shared / "data" / "droid_clip" / "wrist_image_left.mp4"
    assert main(["data", "import-videos", str(tmp_path / "one"), "--video", f"wrist={clip}"]) == 0
    assert (tmp_path / "one" / "meta" / "info.json").exists()
    capsys.readouterr()
    assert "write CAMERA=FILE" in refused(capsys, "data", "import-videos", tmp_path / "two", "--video", str(clip))
    text = shared / "data" / "video_edge" / "text.mp4"
    assert "text.mp4" in refused(capsys, "data", "import-videos", tmp_path / "two", "--video", f"wrist={text}")
    assert not (tmp_path / "two").exists()
