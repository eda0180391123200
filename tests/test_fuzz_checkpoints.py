"""Damaged weights: whole files, shards with their index, adapters, native files, a run's checkpoint."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from fuzzing import FUZZ, Replaced, answer, as_text, damaged, damaged_bytes, damaged_json
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from wamlab.checkpoint import load_checkpoint, write_checkpoint
from wamlab.checkpoint_folder import read_state
from wamlab.codec.native_weights import read_tensors
from wamlab.errors import InputError
from wamlab.model.lora import LoraConfig, read_lora, with_lora, write_lora
from wamlab.model.tensor_files import read_index, read_tensor
from wamlab.model.weights import describe, fingerprint


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file, two shards and their index, a pickled file, and a checkpoint."""
    root = tmp_path_factory.mktemp("weights")
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, root / "whole.safetensors")
    (root / "shards").mkdir()
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        save_file({name: tensor}, root / f"shards/model-{number:05d}-of-00002.safetensors")
    places = {name: f"model-{number:05d}-of-00002.safetensors" for number, name in enumerate(tensors, 1)}
    (root / "shards/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    torch.save(tensors, root / "plain.pth")
    net, optimizer = trained()
    write_checkpoint(root / "checkpoints", 7, net, optimizer, None)
    write_lora(adapted(), root / "lora.safetensors", "base")
    return root


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a layer that has taken a step, and its optimiser."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def adapted() -> nn.Module:
    """Return a small network with adapters."""
    torch.manual_seed(0)
    return with_lora(nn.Sequential(nn.Linear(4, 4)), LoraConfig(rank=2, alpha=2.0, targets=("0",), trained=()))


def use(path: Path) -> None:
    """Read every tensor of a checkpoint by its header, and describe it."""
    index = answer(lambda: read_index(path))
    if not isinstance(index, InputError):
        for entry in index.entries.values():
            tensor = answer(lambda entry=entry: read_tensor(entry))
            assert isinstance(tensor, InputError) or tuple(tensor.shape) == entry.shape
    answer(lambda: describe(path))
    answer(lambda: fingerprint(path))


def with_header(data: bytes, header: bytes) -> bytes:
    """Return a safetensors file with another header before its bytes."""
    return len(header).to_bytes(8, "little") + header + data[8 + int.from_bytes(data[:8], "little") :]


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_safetensors_are_refused_or_read(weights: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([weights / "whole.safetensors", *sorted((weights / "shards").glob("*.safe*"))]))
    whole = path.read_bytes()
    if path.suffix == ".json":
        damage = data.draw(damaged_json(json.loads(whole)))
    elif data.draw(st.booleans()):
        damage = data.draw(damaged_bytes(whole))
    else:
        header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
        damage = with_header(whole, as_text(data.draw(damaged(header))))
    with Replaced(path, damage):
        use(path.parent if path.parent.name == "shards" else path)
        answer(lambda: read_tensors(path.parent if path.parent.name == "shards" else path))


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_pickles_run_nothing_and_are_refused_or_read(weights: Path, data: st.DataObject) -> None:
    path = weights / "plain.pth"
    with Replaced(path, data.draw(damaged_bytes(path.read_bytes()))):
        found = answer(lambda: read_tensors(path))
        assert isinstance(found, InputError) or all(isinstance(value, torch.Tensor) for value in found.values())


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_checkpoints_are_refused_or_resumed(weights: Path, data: st.DataObject) -> None:
    checkpoint = weights / "checkpoints/step_00000007"
    name = data.draw(st.sampled_from(("state.json", "optimizer.pt", "model.safetensors")))
    path = checkpoint / name
    if name == "state.json":
        damage = data.draw(damaged_json(json.loads(path.read_text())))
    else:
        damage = data.draw(damaged_bytes(path.read_bytes()))
    with Replaced(path, damage):
        answer(lambda: read_state(checkpoint))
        net, optimizer = trained()
        step = answer(lambda: load_checkpoint(checkpoint, net, optimizer, None))
        assert isinstance(step, InputError | int)


@pytest.mark.timeout(3000)
@FUZZ
@given(data=st.data())
def test_damaged_adapters_are_refused_or_read(weights: Path, data: st.DataObject) -> None:
    path = weights / "lora.safetensors"
    with Replaced(path, data.draw(damaged_bytes(path.read_bytes()))):
        answer(lambda: read_lora(adapted(), path, "base"))


def test_a_pickle_that_would_run_a_command_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    for name in ("plain.pth", "optimizer.pt"):
        torch.save({"a": Bomb()}, tmp_path / name)
        with pytest.raises(InputError, match="cannot be read"):
            read_tensors(tmp_path / name)
    net, optimizer = trained()
    checkpoint = write_checkpoint(tmp_path / "checkpoints", 1, net, optimizer, None)
    shutil.copy(tmp_path / "optimizer.pt", checkpoint / "optimizer.pt")
    with pytest.raises(InputError, match="cannot be read"):
        load_checkpoint(checkpoint, net, optimizer, None)
    stream = io.BytesIO()
    torch.save({"a": Bomb()}, stream)
    assert b"touch" in stream.getvalue() and not (tmp_path / "ran").exists()
