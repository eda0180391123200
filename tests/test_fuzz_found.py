"""Each fault that fuzzing found, as the smallest thing that shows it; all ended in something else than one sentence."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fuzzing import NEST, answer
from recordings import edit_json, single_camera_episode

from wamlab.checkpoint_folder import read_state
from wamlab.codec.native_weights import read_tensors
from wamlab.data.check import check_dataset
from wamlab.data.lerobot import open_dataset
from wamlab.data.normalize import normalizers_from_dict
from wamlab.data.robot_files import read_robot_file
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.ablation import read_ablation
from wamlab.lab.records import is_sound, plain
from wamlab.lab.run import open_run
from wamlab.model.tensor_files import read_index
from wamlab.recipes.config import recipe_from_dict, tiny
from wamlab.recipes.notebook import read_yaml
from wamlab.recipes.rl_progress import RolloutProgress
from wamlab.recipes.sweep_file import read_sweep
from wamlab.serve.arrays import encode
from wamlab.serve.protocol import Contract, read_request

HUGE = 10**400
SCALE = {"kind": "Quantiles", "low": [0.0], "high": [1.0]}
NORMALIZERS = {"action": SCALE, "state": SCALE, "relative_dims": [], "max_action_dim": 4, "max_state_dim": 4}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small dataset."""
    return write_dataset([single_camera_episode(0, 6)], tmp_path_factory.mktemp("set") / "set", version="v2.1")


@pytest.fixture
def dataset(written: Path, tmp_path: Path) -> Path:
    """Return a copy of it to damage."""
    return Path(shutil.copytree(written, tmp_path / "set"))


def refused(call: Any) -> bool:
    return isinstance(answer(call), InputError)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("info.json", NEST),
        ("info.json", '{"a": 1' + "0" * 5000 + "}"),
        ("stats.json", NEST),
        ("episodes.jsonl", '{"episode_index": 1' + "0" * 30 + ', "length": 6, "tasks": []}'),
        ("episodes.jsonl", '{"episode_index": 0, "length": 1' + "0" * 15 + ', "tasks": ["a"]}'),
        ("episodes.jsonl", '{"episode_index": 0.5, "length": 6, "tasks": ["a"]}'),
        ("episodes.jsonl", '{"episode_index": 0, "length": 6, "tasks": "abc"}'),
    ],
)
def test_metadata_that_no_writer_writes(dataset: Path, file: str, text: str) -> None:
    (dataset / "meta" / file).write_text(text)
    assert refused(lambda: open_dataset(dataset).stats("action"))


@pytest.mark.parametrize(
    "change",
    [
        lambda info: info.update(fps=HUGE),
        lambda info: info.update(fps=float("inf")),
        lambda info: info.update(data_path="{episode_index:0999999999d}"),
        lambda info: info.update(data_path="x" * 4000),
        lambda info: info.update(data_path="{episode_index.__class__}"),
    ],
)
def test_facts_that_no_writer_writes(dataset: Path, change: Any) -> None:
    edit_json(dataset / "meta/info.json", change)
    assert refused(lambda: open_dataset(dataset).rows(0, "action"))
    answer(lambda: open_dataset(dataset).fingerprint())


@pytest.mark.parametrize("mean", [[[], 1.0], ["a"], [1.0], {"a": 1}, HUGE])
def test_statistics_of_other_sizes(dataset: Path, mean: Any) -> None:
    edit_json(dataset / "meta/stats.json", lambda stats: stats["action"].update(mean=mean))
    opened = open_dataset(dataset)
    assert refused(lambda: opened.stats("action"))
    assert any("stats.json" in fault.place for faults in answer(lambda: [*check_dataset(opened)]) for fault in faults)


def test_a_name_that_is_a_list_in_modality(dataset: Path) -> None:
    edit_json(dataset / "meta/modality.json", lambda content: content["state"]["state"].update(original_key=["a"]))
    assert refused(lambda: open_dataset(dataset))


def test_tables_with_damaged_statistics_do_not_end_the_process(tmp_path: Path) -> None:
    """PyArrow 25 aborts in C++ where statistics are looked at one by one: 12 of 3,000 damaged footers did."""
    names = {name: pa.array(np.arange(6)) for name in ("episode_index", "frame_index", "task_index")}
    pq.write_table(pa.table(names | {"timestamp": pa.array(np.arange(6.0))}), tmp_path / "whole.parquet")
    code = """
import random, sys
from pathlib import Path
from wamlab.data.tables import read_episode, read_footer
from wamlab.errors import InputError
folder = Path(sys.argv[1])
whole = (folder / "whole.parquet").read_bytes()
footer, path = int.from_bytes(whole[-8:-4], "little"), folder / "damaged.parquet"
for seed in range(1200):
    chance, data = random.Random(seed), bytearray(whole)
    for _ in range(chance.randint(1, 2)):
        data[len(data) - 9 - chance.randrange(footer)] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    try:
        read_episode(path, read_footer(path), 3, ["timestamp"])
    except InputError:
        pass
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-500:]


@pytest.mark.parametrize(
    "change",
    [
        {"max_action_dim": HUGE}, {"max_action_dim": 10**9}, {"max_action_dim": 0}, {"relative_dims": [3]},
        {"relative_dims": [-1]}, {"action": SCALE | {"low": [float("nan")]}}, {"action": SCALE | {"low": [HUGE]}},
        {"action": SCALE | {"low": [None]}}, {"state": {"kind": "Spread", "mean": [0.0], "std": [1e-300]}},
    ],
)  # fmt: skip
def test_normalizers_that_would_act_on_nothing(change: dict[str, Any]) -> None:
    assert refused(lambda: normalizers_from_dict(NORMALIZERS | change))
    assert normalizers_from_dict(NORMALIZERS).num_actions == 1


@pytest.mark.parametrize("text", [NEST, '{"step": 1e999, "has_ema": false}', '{"step": 1, "has_ema": "no"}', "[]"])
def test_states_of_checkpoints_that_no_writer_writes(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert refused(lambda: read_state(tmp_path))


@pytest.mark.parametrize(
    "header", [NEST, '{"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}}', '{"a": {"dtype": "F32", '
    '"shape": [true], "data_offsets": [0, 4]}}', '{"a": {"dtype": "F32", "shape": [], "data_offsets": [0.0, 4.0]}}'],
)  # fmt: skip
def test_headers_of_weights_that_no_writer_writes(tmp_path: Path, header: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))
    assert refused(lambda: read_index(path))
    (tmp_path / "a.safetensors.index.json").write_text(NEST)
    assert refused(lambda: read_index(tmp_path / "a.safetensors.index.json"))


def test_every_bit_of_a_pickle(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pth")
    whole = (tmp_path / "a.pth").read_bytes()
    start = whole.index(b"data.pkl") + 8
    for place in range(start, start + 160):
        (tmp_path / "b.pth").write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        answer(lambda: read_tensors(tmp_path / "b.pth"))


@pytest.mark.parametrize("change", [{"turns": {"a": {}}}, {"turns": {"a": [{}]}}, {"turns": 3}, {"tricks": []}, {}])
def test_ablations_that_no_writer_writes(tmp_path: Path, change: dict[str, Any]) -> None:
    whole = {"tricks": ["a"], "turns": {}}
    (tmp_path / "ablation.json").write_text(json.dumps(whole | change if change else {}))
    assert refused(lambda: read_ablation(tmp_path))


def test_odds_and_ends(tmp_path: Path) -> None:
    assert refused(lambda: open_run("x" * 4000))
    assert not is_sound({"step": 1, "loss": HUGE})
    (tmp_path / "a.yaml").write_text("a: 1" + "0" * 5000)
    assert refused(lambda: read_yaml(tmp_path / "a.yaml"))
    for number in (HUGE, -HUGE):
        assert refused(lambda n=number: read_sweep({"name": "a", "recipe": "tiny", "budget": {"runs": n}}, "a"))
    for text in ("control_hz = 1e999", f"control_hz = {HUGE}"):
        (tmp_path / "a.toml").write_text(f'cameras = ["top"]\n{text}\n')
        assert refused(lambda: read_robot_file(str(tmp_path / "a.toml")))
    for text in ("{}", '{"weights": 3}', '{"weights": {"a": "b"}}', '{"weights": {"²": "b"}}'):
        (tmp_path / "progress.json").write_text(text)
        assert refused(lambda: RolloutProgress(tmp_path))


@pytest.mark.parametrize("change", [{"video": True}, {"video": None}, {"text": 3}, {"checkpoint_every": None}])
def test_recipes_with_nothing_where_something_is_needed(change: dict[str, Any]) -> None:
    assert refused(lambda: recipe_from_dict(plain(asdict(tiny())) | change))


def test_a_request_whose_words_are_arrays() -> None:
    contract = Contract(("top",), 1, 1)
    for name in ("endpoint", "session_id", "prompt", "task"):
        message = encode({name: np.zeros(3)}, "openpi")
        assert refused(lambda message=message: read_request(message, contract))
