"""Robots as files: what comes with the library, what is refused, and everything that differs named at once."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wamlab.cli import main
from wamlab.data.clips import ClipReader
from wamlab.data.lerobot import open_dataset
from wamlab.data.robot import ColumnPart, RobotConfig, column_parts
from wamlab.data.robot_files import check_robot_file, list_robots, read_robot_file
from wamlab.data.windows import WindowConfig
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.recipes.config import tiny
from wamlab.recipes.order import with_robot
from wamlab.sim.experts import play_episodes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(play_episodes(("reach",), 3, seed=0, size=32), tmp_path_factory.mktemp("data") / "reach")


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_every_robot_of_the_library_is_consistent() -> None:
    assert list_robots() == ["droid", "libero", "tabletop", "yam"]
    found = {name: read_robot_file(name) for name in list_robots()}
    assert {name: (f.robot.canvas_height_px, f.robot.canvas_width_px) for name, f in found.items()} == {
        "droid": (352, 640), "libero": (256, 512), "tabletop": (64, 128), "yam": (352, 640),
    }  # fmt: skip
    assert found["droid"].robot.relative_dims == tuple(range(7))
    assert found["yam"].robot.relative_dims == tuple(range(14))
    assert found["libero"].window == WindowConfig(actions_per_block=16, is_action_span_free=True)
    assert found["droid"].window == found["yam"].window == WindowConfig()
    assert found["tabletop"].robot == replace(tiny().robot, prompt="{task}")
    assert found["droid"].robot.instruct("lifts a cup").count("lifts a cup") == 2


def test_the_tabletop_file_fits_recordings_of_the_tabletop(root: Path) -> None:
    check_robot_file("tabletop", open_dataset(root), patch_px=16)


def test_all_that_is_wrong_in_a_file_is_named_at_once(tmp_path: Path) -> None:
    text = 'camera = ["top"]\nview_width_px = "wide"\nrelative_dims = [0.5]\n'
    text += "[window]\nframe_strid = 3\nmax_blocks = true\n"
    with pytest.raises(InputError) as error:
        read_robot_file(written(tmp_path, text))
    for part in (
        "unknown field camera, did you mean 'cameras'?",
        "view_width_px is 'wide', not a whole number",
        "relative_dims holds 0.5, not a whole number",
        "unknown field window.frame_strid, did you mean 'frame_stride'?",
        "window.max_blocks is True, not a whole number",
    ):
        assert part in str(error.value)


def test_all_in_which_a_dataset_differs_is_named_at_once(root: Path, tmp_path: Path) -> None:
    text = """
        cameras = ["top", "wirst"]
        view_height_px = 40
        view_width_px = 32
        state_column = "state"
        action_column = "action[0:3]"
        relative_dims = [0, 3]
        control_hz = 15
        max_action_dim = 2
        [window]
        frame_stride = 3
        actions_per_block = 16
    """
    with pytest.raises(InputError) as error:
        check_robot_file(written(tmp_path, text), open_dataset(root), patch_px=16)
    for part in (
        "frame_stride 3 x 8 frames = 24 ticks but its actions 16",
        "no camera 'wirst', did you mean 'wrist'?",
        "no column 'state': name another state_column",
        "has 3 dimensions, more than max_action_dim 2",
        "relative_dims [3] are outside the 3 dimensions of the action",
        "it has 10 ticks a second, control_hz is 15",
        "canvas_height_px is 40, not a multiple of a patch's 16 px",
    ):
        assert part in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cameras = [", "is not TOML"),
        ('layout = "ring"', "layout 'ring' is none of"),
        ("window = 3", "write \\[window\\] above its fields"),
        ('action_column = "action[2:"', "is not written like"),
        ("control_hz = -1", "need a number from 0 up"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_robot_file(written(tmp_path, text))


def test_a_file_can_say_that_there_are_no_actions(tmp_path: Path) -> None:
    robot = read_robot_file(written(tmp_path, 'state_column = ""\naction_column = ""\ncontrol_hz = 30')).robot
    assert (robot.state_column, robot.action_column, robot.control_hz) == (None, None, 30)


def test_columns_are_joined_and_cut(root: Path) -> None:
    assert column_parts("joints[0:7] + gripper") == (ColumnPart("joints", 0, 7), ColumnPart("gripper"))
    assert column_parts("joints[6]") == (ColumnPart("joints", 6, 7),)
    dataset, window = open_dataset(root), WindowConfig(1, 1, 4, 2)
    plain = RobotConfig(view_height_px=32, view_width_px=32)
    turned = replace(plain, action_column="action[2:4] + action[0]", relative_dims=(1,))
    clips = [ClipReader(dataset, robot, window, is_training=False) for robot in (plain, turned)]
    whole, cut = (reader.read(5, seed=0) for reader in clips)
    np.testing.assert_array_equal(cut.actions[:, [0, 2]], whole.actions[:, [2, 0]])
    assert cut.action_mask[0].sum() == 3
    with pytest.raises(InputError, match="has 4 dimensions, so not those of action_column"):
        ClipReader(dataset, replace(plain, action_column="action[2:9]"), window, is_training=False)


def test_a_recipe_takes_a_robot_and_its_windows() -> None:
    recipe = with_robot(replace(tiny(), data=replace(tiny().data, root=Path("x"))), "tabletop")
    assert recipe.robot == read_robot_file("tabletop").robot
    wide = replace(
        tiny(),
        robot=replace(tiny().robot, max_action_dim=32, max_state_dim=64),
        model=replace(tiny().model, max_action_dim=32, max_state_dim=64),
    )
    droid = with_robot(wide, "droid")
    assert (droid.robot.max_action_dim, droid.model.max_action_dim, droid.model.actions_per_block) == (32, 32, 24)


def test_the_command_checks_a_robot(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["robot"]) == 0
    assert capsys.readouterr().out.split() == list_robots()
    assert main(["robot", "tabletop", "--data", str(root)]) == 0
    assert f"fits {root}" in capsys.readouterr().out
    assert main(["robot", "tabeltop"]) == 2
    assert "did you mean 'tabletop'?" in capsys.readouterr().err
    words = ["train", "tiny", "--data.root", str(root), "--runs", str(tmp_path / "runs")]
    assert main([*words, "--robot-file", "yam"]) == 2
    assert "no camera 'left'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_robot_file_trains_and_its_options_can_be_changed(root: Path, tmp_path: Path) -> None:
    from wamlab.lab.run import find_run

    text = 'cameras = ["wrist"]\nlayout = "single"\nview_height_px = 64\nview_width_px = 64\n'
    text += 'action_column = "action[0:2]"\n[window]\nframe_stride = 2\n'
    text += "latents_per_block = 1\nactions_per_block = 8\nmax_blocks = 2"
    file = written(tmp_path, text)
    words = ["train", "tiny", "--data.root", str(root), "--runs", str(tmp_path / "runs"), "--train.num-steps", "1"]
    words += [f"--robot-file={file}", "--robot.view-width-px", "32", "--model.layers", "1", "--train.batch-size", "2"]
    assert main([*words, "--evaluation.num-clips", "1"]) == 0
    config = find_run(tmp_path / "runs").config
    assert config["robot"]["view_width_px"] == 32
    assert config["robot"]["cameras"] == ["wrist"]
    assert config["model"]["actions_per_block"] == 8
