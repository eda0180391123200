"""Published checkpoints: every layout there and back, what may be missing, memory, and what an accident leaves."""

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wamlab.errors import InputError
from wamlab.model import presets
from wamlab.model.fit import network_shapes
from wamlab.model.key_maps import ACTION_MODULES, KeyLayout, find_layout, from_wamlab, to_wamlab
from wamlab.model.tensor_files import Spec, read_index, read_tensor, write_tensors
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.model.weights import convert, describe, fingerprint, load_pretrained

TI2V = presets.tiny(dim=32, layers=2, ffn_dim=48, mlp_dim=16, image_dim=24, has_image=True)  # as Wan2.2-TI2V-5B
I2V = replace(TI2V, has_condition=True)  # as Wan2.1-I2V-14B
LAYOUTS: tuple[KeyLayout, ...] = ("wamlab", "wan", "diffusers", "dreamzero")
IMAGE_MARKS = ("img_emb.", "k_img.", "v_img.")  # the last two are also in norm_k_img


def random_net(config: WAMConfig = I2V, seed: int = 0) -> WorldActionModel:
    net, generator = WorldActionModel(config), torch.Generator().manual_seed(seed)
    for tensor in net.state_dict().values():
        tensor.normal_(generator=generator)
    return net


def state_of(net: WorldActionModel, keep: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items() if keep(name)}


def stored(path: Path) -> dict[str, Tensor]:
    """Read a checkpoint with the public reader, whatever its sharding."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Write a small DreamZero bundle in bfloat16, encoders beside the network."""
    tensors = {f"action_head.model.{name}": x.bfloat16() for name, x in state_of(random_net()).items()}
    tensors |= {
        "action_head.text_encoder.norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "action_head.image_encoder.model.log_scale": torch.tensor(4.6),
        "action_head.vae.model.conv1.weight": torch.randn(3, 3),
    }
    save_file(tensors, tmp_path / "bundle.safetensors")
    return tmp_path / "bundle.safetensors"


@pytest.mark.parametrize("config", [TI2V, I2V, replace(TI2V, has_image=False)], ids=["ti2v", "i2v", "no image"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_bit_for_bit(tmp_path: Path, layout: KeyLayout, config: WAMConfig) -> None:
    net = random_net(config)
    save_file(state_of(net), tmp_path / "start.safetensors")
    there = convert(tmp_path / "start.safetensors", tmp_path / "there", layout=layout, max_shard_bytes=20_000)
    assert len(there.files) > 3
    assert there.left_out == ()
    assert find_layout(stored(there.target)) == {"wan": "wamlab"}.get(layout, layout)
    back = convert(there.target, tmp_path / "back.safetensors", layout="wamlab")
    assert back.files == (tmp_path / "back.safetensors",)
    assert equal(stored(back.target), state_of(net))
    other = random_net(config, seed=1)
    loaded = load_pretrained(other, there.target)
    assert equal(state_of(other), state_of(net))
    assert set(loaded.loaded) == set(state_of(net))
    assert loaded.initialized == ()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("blocks.7.norm3.weight", "blocks.7.norm2.weight"),
        ("blocks.7.modulation", "blocks.7.scale_shift_table"),
        ("head.modulation", "scale_shift_table"),
        ("head.head.bias", "proj_out.bias"),
        ("blocks.12.self_attn.o.weight", "blocks.12.attn1.to_out.0.weight"),
        ("blocks.0.cross_attn.norm_k_img.weight", "blocks.0.attn2.norm_added_k.weight"),
        ("blocks.0.cross_attn.k_img.bias", "blocks.0.attn2.add_k_proj.bias"),
        ("blocks.0.ffn.0.weight", "blocks.0.ffn.net.0.proj.weight"),
        ("time_projection.1.weight", "condition_embedder.time_proj.weight"),
        ("img_emb.proj.4.weight", "condition_embedder.image_embedder.norm2.weight"),
        ("action_encoder.W1.W", "action_encoder.W1.W"),
    ],
)
def test_diffusers_names_are_the_published_ones(ours: str, theirs: str) -> None:
    assert from_wamlab(ours, "diffusers") == theirs
    assert to_wamlab(theirs, "diffusers") == ours


def test_the_maps_name_every_tensor_once_and_no_other() -> None:
    for config in (presets.wan21_14b(), presets.wan22_5b()):
        names = set(network_shapes(config))
        for layout in LAYOUTS:
            renamed = {from_wamlab(name, layout) for name in names}
            assert len(renamed) == len(names)
            assert {to_wamlab(name, layout) for name in renamed} == names
    assert to_wamlab("blocks.0.norm3.weight", "diffusers") is None  # it has no weights there
    assert to_wamlab("action_head.vae.model.conv1.weight", "dreamzero") is None
    with pytest.raises(InputError, match=r"blocks\.0\.gate is no tensor"):
        from_wamlab("blocks.0.gate", "wamlab")


def is_of_base(name: str) -> bool:
    return not name.startswith(ACTION_MODULES)


def is_of_ti2v(name: str) -> bool:
    return is_of_base(name) and not any(mark in name for mark in IMAGE_MARKS)


@pytest.mark.parametrize("layout", ["wan", "diffusers"])
@pytest.mark.parametrize(("config", "keep"), [(I2V, is_of_base), (TI2V, is_of_ti2v)], ids=["i2v", "ti2v"])
def test_a_wan_base_leaves_exactly_what_it_lacks_to_a_fresh_draw(
    tmp_path: Path, config: WAMConfig, keep: Callable[[str], bool], layout: KeyLayout
) -> None:
    base = state_of(random_net(config), keep)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file({from_wamlab(name, layout): x for name, x in base.items()}, file)
    nets = [random_net(config, seed) for seed in (1, 2)]
    for net in nets:
        loaded = load_pretrained(net, tmp_path, generator=torch.Generator().manual_seed(3))
        assert loaded.layout == layout
        assert set(loaded.initialized) == {name for name in state_of(net) if not keep(name)}
        assert equal(state_of(net, keep), base)
    assert equal(state_of(nets[0]), state_of(nets[1])), "one generator must draw the same weights over any old ones"
    state = state_of(nets[0])
    drawn = torch.cat([x.flatten() for name, x in state.items() if name.endswith(".W")])
    assert drawn.std().item() == pytest.approx(0.02, rel=0.05)
    assert all(not x.any() for name, x in state.items() if name.endswith(".b"))
    if config is TI2V:
        assert (state["blocks.0.cross_attn.norm_k_img.weight"] == 1).all()
        assert (state["img_emb.proj.0.weight"] == 1).all()
        assert state["img_emb.proj.1.weight"].std().item() == pytest.approx(24**-0.5, rel=0.2)


@pytest.mark.parametrize(
    ("layout", "config", "keep"),
    [
        ("dreamzero", I2V, is_of_base),  # a bundle must be whole
        ("dreamzero", TI2V, lambda name: not any(mark in name for mark in IMAGE_MARKS)),
        ("wan", I2V, is_of_ti2v),  # Wan2.1-I2V has an image path
        ("wamlab", TI2V, lambda name: not any(mark in name for mark in IMAGE_MARKS)),  # trained without
        ("wamlab", TI2V, lambda name: not name.startswith("action_encoder")),  # some action modules only
        ("wan", TI2V, lambda name: is_of_base(name) and "v_img" not in name),  # a part of the image path
        ("wan", TI2V, lambda name: is_of_ti2v(name) and name != "head.modulation"),
    ],
)
def test_nothing_else_may_be_missing(
    tmp_path: Path, layout: KeyLayout, config: WAMConfig, keep: Callable[[str], bool]
) -> None:
    base = {from_wamlab(name, layout): x for name, x in state_of(random_net(config), keep).items()}
    save_file(base, tmp_path / "model.safetensors")
    net = random_net(config, 1)
    before = state_of(net)
    with pytest.raises(InputError, match="missing"):
        load_pretrained(net, tmp_path)
    assert equal(state_of(net), before)


def test_wrong_names_and_shapes_are_listed_and_counted(tmp_path: Path) -> None:
    tensors = state_of(random_net())
    for index in range(2):
        for name in ("self_attn.q", "self_attn.k", "ffn.0"):
            del tensors[f"blocks.{index}.{name}.weight"], tensors[f"blocks.{index}.{name}.bias"]
    tensors["blocks.0.gate"] = torch.zeros(2)
    tensors["head.head.bias"] = torch.zeros(5)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError) as error:
        load_pretrained(random_net(), tmp_path)
    sentence = str(error.value)
    assert "missing 12 (blocks.0.ffn.0.bias, " in sentence
    assert sentence.count("blocks.1.") == 2  # eight of twelve are named
    assert "extra 1 (blocks.0.gate)" in sentence
    assert "another shape 1 (head.head.bias: (5,) in the file, (192,) in the network)" in sentence
    with pytest.raises(InputError, match=r"blocks\.0\.gate, which no world action model has"):
        convert(tmp_path, tmp_path / "new", layout="wan")


def test_a_given_layout_is_believed_and_an_unknown_one_refused(tmp_path: Path) -> None:
    save_file(state_of(random_net()), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="diffusers"):
        load_pretrained(random_net(), tmp_path, layout="diffusers")
    load_pretrained(random_net(), tmp_path, layout="wan")
    save_file({"encoder.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"no known layout"):
        describe(tmp_path)
    save_file(
        {"action_head.model.base_model.model.x.lora_A.default.weight": torch.zeros(1)}, tmp_path / "l.safetensors"
    )
    with pytest.raises(InputError, match="LoRA"):
        describe(tmp_path / "l.safetensors")


def test_a_bundle_gives_its_network_and_says_what_it_left_out(tmp_path: Path, bundle: Path) -> None:
    net = random_net(seed=1)
    load_pretrained(net, bundle)
    assert equal(state_of(net), {n: x.bfloat16().float() for n, x in state_of(random_net()).items()})
    done = convert(bundle, tmp_path / "net", layout="diffusers")
    assert done.left_out == ("image encoder", "text encoder", "video autoencoder")
    assert [file.name for file in done.files] == ["diffusion_pytorch_model.safetensors"]
    assert done.num_tensors == len(state_of(net))
    again = convert(bundle, tmp_path / "again", layout="dreamzero", max_shard_bytes=50_000)
    assert again.left_out == ()
    assert equal(stored(again.target), stored(bundle))
    assert again.num_bytes == sum(x.nbytes for x in stored(bundle).values())


def test_types_are_cast_both_ways_and_networks_keep_theirs(tmp_path: Path, bundle: Path) -> None:
    convert(bundle, tmp_path / "wide", layout="dreamzero", dtype=torch.float32)
    assert {x.dtype for x in stored(tmp_path / "wide").values()} == {torch.float32}
    convert(tmp_path / "wide", tmp_path / "narrow", layout="wamlab", dtype=torch.bfloat16)
    net = random_net(seed=1).bfloat16()
    load_pretrained(net, tmp_path / "wide")
    assert equal(state_of(net), stored(tmp_path / "narrow"))


def test_a_fingerprint_names_the_network_and_nothing_else(tmp_path: Path, bundle: Path) -> None:
    name = fingerprint(bundle)
    assert len(name) == 64
    for number, layout in enumerate(LAYOUTS):
        for dtype in (None, torch.float32):
            target = tmp_path / f"{number}{dtype}"
            convert(bundle, target, layout=layout, dtype=dtype, max_shard_bytes=30_000 * (number + 1))
            assert fingerprint(target) == name
    tensors = stored(bundle)
    tensors["action_head.model.blocks.1.ffn.2.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "changed.safetensors")
    assert fingerprint(tmp_path / "changed.safetensors") != name
    del tensors["action_head.model.action_encoder.W1.b"]
    save_file(tensors, tmp_path / "fewer.safetensors")
    assert fingerprint(tmp_path / "fewer.safetensors") not in (name, fingerprint(tmp_path / "changed.safetensors"))


# --- the inventory of the published bundle (spec 8) ---


def text_encoder_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {"token_embedding.weight": (256384, 4096), "norm.weight": (4096,)}
    for index in range(24):
        block = {"norm1.weight": (4096,), "norm2.weight": (4096,), "pos_embedding.embedding.weight": (32, 64)}
        block |= {f"attn.{letter}.weight": (4096, 4096) for letter in "qkvo"}
        block |= {"ffn.gate.0.weight": (10240, 4096), "ffn.fc1.weight": (10240, 4096), "ffn.fc2.weight": (4096, 10240)}
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def with_bias(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def image_encoder_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "log_scale": (), "visual.patch_embedding.weight": (1280, 3, 14, 14), "visual.cls_embedding": (1, 1, 1280),
        "visual.pos_embedding": (1, 257, 1280), "visual.head": (1280, 1024),
    }  # fmt: skip
    shapes |= with_bias("visual.pre_norm", 1280) | with_bias("visual.post_norm", 1280)
    for index in range(32):
        block = f"visual.transformer.{index}"
        shapes |= with_bias(f"{block}.norm1", 1280) | with_bias(f"{block}.norm2", 1280)
        shapes |= with_bias(f"{block}.attn.to_qkv", 3840, 1280) | with_bias(f"{block}.attn.proj", 1280, 1280)
        shapes |= with_bias(f"{block}.mlp.0", 5120, 1280) | with_bias(f"{block}.mlp.2", 1280, 5120)
    return shapes


def residual_shapes(name: str, num_in: int, num_out: int) -> dict[str, tuple[int, ...]]:
    shapes = {f"{name}.residual.0.gamma": (num_in, 1, 1, 1), f"{name}.residual.3.gamma": (num_out, 1, 1, 1)}
    shapes |= with_bias(f"{name}.residual.2", num_out, num_in, 3, 3, 3)
    shapes |= with_bias(f"{name}.residual.6", num_out, num_out, 3, 3, 3)
    return shapes if num_in == num_out else shapes | with_bias(f"{name}.shortcut", num_out, num_in, 1, 1, 1)


def autoencoder_shapes() -> dict[str, tuple[int, ...]]:
    shapes = with_bias("conv1", 32, 32, 1, 1, 1) | with_bias("conv2", 16, 16, 1, 1, 1)
    for half in ("encoder", "decoder"):
        shapes |= residual_shapes(f"{half}.middle.0", 384, 384) | residual_shapes(f"{half}.middle.2", 384, 384)
        shapes |= {f"{half}.middle.1.norm.gamma": (384, 1, 1)}
        shapes |= with_bias(f"{half}.middle.1.to_qkv", 1152, 384, 1, 1)
        shapes |= with_bias(f"{half}.middle.1.proj", 384, 384, 1, 1)
        width = 384 if half == "encoder" else 96
        shapes |= {f"{half}.head.0.gamma": (width, 1, 1, 1)}
    shapes |= with_bias("encoder.conv1", 96, 3, 3, 3, 3) | with_bias("encoder.head.2", 32, 384, 3, 3, 3)
    shapes |= with_bias("decoder.conv1", 384, 16, 3, 3, 3) | with_bias("decoder.head.2", 3, 96, 3, 3, 3)
    down = [(96, 96), (96, 96), 96, (96, 192), (192, 192), 192, (192, 384), (384, 384), 384, (384, 384), (384, 384)]
    up = [(384, 384)] * 3 + [384, (192, 384), (384, 384), (384, 384), 384] + [(192, 192)] * 3 + [192] + [(96, 96)] * 3
    for side, layers, has_time in (("encoder.downsamples", down, (5, 8)), ("decoder.upsamples", up, (3, 7))):
        for index, widths in enumerate(layers):
            name = f"{side}.{index}"
            if isinstance(widths, tuple):
                shapes |= residual_shapes(name, *widths)
                continue
            is_up = side.startswith("decoder")
            shapes |= with_bias(f"{name}.resample.1", widths // 2 if is_up else widths, widths, 3, 3)
            if index in has_time:
                shapes |= with_bias(f"{name}.time_conv", widths * (2 if is_up else 1), widths, 3, 1, 1)
    return shapes


def bundle_shapes() -> dict[str, tuple[int, ...]]:
    parts = {
        "action_head.model.": network_shapes(presets.wan21_14b()),
        "action_head.text_encoder.": text_encoder_shapes(),
        "action_head.image_encoder.model.": image_encoder_shapes(),
        "action_head.vae.model.": autoencoder_shapes(),
    }
    return {prefix + name: shape for prefix, shapes in parts.items() for name, shape in shapes.items()}


def write_sparse(folder: Path, shapes: dict[str, tuple[int, ...]], num_files: int, stem: str = "model") -> None:
    """Write true headers of a bfloat16 checkpoint over files of the true size with nothing in them."""
    folder.mkdir()
    names, weight_map = list(shapes), {}
    for number in range(num_files):
        file = folder / f"{stem}-{number + 1:05d}-of-{num_files:05d}.safetensors"
        header, start = {}, 0
        for name in names[number::num_files]:
            end = start + 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [start, end]}
            weight_map[name], start = file.name, end
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(file, 8 + len(text) + start)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


MEASURE = """
import json, re, resource, sys
from pathlib import Path
import torch
from wamlab.model import presets
from wamlab.model.wam import WorldActionModel
from wamlab.model.weights import convert, describe, fingerprint, load_pretrained
def peak_mb():  # of this process alone: getrusage would count the parent's, too
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
folder = Path(sys.argv[1])
"""


def measured(code: str, folder: Path) -> list[str]:
    """Run code in a new process, which sees its own peak memory; return the words it prints."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    command = [sys.executable, "-c", MEASURE + code, str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_the_published_bundle_is_recognised_from_its_headers(tmp_path: Path) -> None:
    shapes = bundle_shapes()
    assert len(shapes) == 2146
    write_sparse(tmp_path / "full", shapes, num_files=10)
    found = describe(tmp_path / "full")
    assert {part.name: part.num_tensors for part in found.parts} == {
        "network": 1317, "text encoder": 242, "image encoder": 393, "video autoencoder": 194,
    }  # fmt: skip
    sizes = {part.name: part.num_parameters for part in found.parts}
    assert sizes["network"] == 16_484_292_448
    assert sizes["text encoder"] == pytest.approx(5.68e9, rel=1e-3)
    assert sizes["image encoder"] == pytest.approx(0.63e9, rel=5e-3)
    assert sizes["video autoencoder"] == pytest.approx(0.127e9, rel=5e-3)
    assert sum(part.num_bytes for part in found.parts) == pytest.approx(45.8e9, rel=2e-3)
    assert (found.layout, found.preset, found.fit.num_wrong, found.fit.fresh) == ("dreamzero", "wan21_14b", 0, ())
    assert "fits wan21_14b: all fit" in str(found)
    assert "16.484 B" in str(found)


@pytest.mark.parametrize(
    ("preset", "config", "keep", "count"),
    [
        ("wan21_14b", presets.wan21_14b(), is_of_base, 1303),
        ("wan22_5b(has_image=False)", presets.wan22_5b(), is_of_ti2v, 825),
    ],
)
@pytest.mark.parametrize("layout", ["wan", "diffusers"])
def test_the_published_bases_are_recognised_from_their_headers(
    tmp_path: Path, preset: str, config: WAMConfig, keep: Callable[[str], bool], count: int, layout: KeyLayout
) -> None:
    shapes = {from_wamlab(name, layout): shape for name, shape in network_shapes(config).items() if keep(name)}
    assert len(shapes) == count
    folder = tmp_path / "transformer"  # as in a folder of a whole Diffusers pipeline
    write_sparse(folder, shapes, num_files=3, stem="diffusion_pytorch_model")
    found = describe(tmp_path if layout == "diffusers" else folder)
    assert (found.layout, found.preset, found.fit.num_wrong) == (layout, preset, 0)
    assert len(found.fit.fresh) == 14
    assert all(name.startswith(ACTION_MODULES) for name in found.fit.fresh)
    shapes.popitem()
    write_sparse(tmp_path / "less", shapes, num_files=2)
    assert describe(tmp_path / "less").fit.num_wrong == 1
    assert "missing 1 (" in str(describe(tmp_path / "less"))


def test_reading_headers_takes_no_memory_for_weights(tmp_path: Path) -> None:
    write_sparse(tmp_path / "full", bundle_shapes(), num_files=10)
    code = """
start = peak_mb()
describe(folder)
first = peak_mb()
describe(folder)
fingerprint(folder)
print(first - start, peak_mb() - first)
"""
    first, again = map(float, measured(code, tmp_path / "full"))
    assert first < 200  # what torch imports to make a module on the meta device: about 80 MB
    assert again < 8


def test_loading_and_converting_hold_one_tensor_at_a_time(tmp_path: Path) -> None:
    code = """
shard = 32e6
net = WorldActionModel(presets.tiny(dim=768, layers=4, ffn_dim=3072, mlp_dim=512))
for tensor in net.state_dict().values():
    tensor.uniform_(-1, 1)
from safetensors.torch import save_file
if not (folder / "one.safetensors").exists():
    save_file(net.state_dict(), folder / "one.safetensors")
    convert(folder / "one.safetensors", folder / "many", layout="dreamzero", max_shard_bytes=int(shard))
    sys.exit()
before = peak_mb()
load_pretrained(net, folder / "many")
loading = peak_mb() - before
done = convert(folder / "many", folder / "again", layout="diffusers", max_shard_bytes=int(shard))
print(len(done.files), max(f.stat().st_size for f in done.files) / 2**20, loading, peak_mb() - before)
"""
    measured(code, tmp_path)
    num_files, largest, loading, both = map(float, measured(code, tmp_path))
    assert num_files > 6
    assert loading <= both < 1.1 * largest


# --- accidents ---


def test_a_killed_writer_leaves_nothing_that_loads(tmp_path: Path) -> None:
    code = """
import os, signal
net = WorldActionModel(presets.tiny(dim=32, layers=2))
state = net.state_dict()
from wamlab.model.tensor_files import Spec, write_tensors
plan = {name: Spec(tuple(x.shape), x.dtype) for name, x in state.items()}
for count in (0, 5, len(plan) // 2, len(plan) - 1):
    for name in (f"folder{count}", f"file{count}.safetensors"):
        child = os.fork()
        if child == 0:
            asked = iter(range(len(plan)))
            def read(name):
                if next(asked) == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return state[name]
            write_tensors(folder / name, plan, read, max_shard_bytes=60_000)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""
    measured(code, tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 8
    assert all(name.startswith(".") for name in left)
    net = WorldActionModel(presets.tiny(dim=32, layers=2))
    for path in [*tmp_path.iterdir(), *(p for p in tmp_path.iterdir() if (p / "model.safetensors").exists())]:
        with pytest.raises(InputError):
            load_pretrained(net, path)
    save_file(net.state_dict(), tmp_path / "start.safetensors")
    convert(tmp_path / "start.safetensors", tmp_path / "folder5", layout="wamlab")  # a second try clears up
    assert not (tmp_path / ".folder5.partial").exists()
    load_pretrained(net, tmp_path / "folder5")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, bundle: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(InputError, match=r"new cannot be written \(File too large\): it needs .* GB; free space"):
            convert(bundle, tmp_path / "new", layout="wamlab")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.safetensors"]


def test_a_disk_too_small_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    def read(name: str) -> Tensor:
        raise AssertionError(name)

    plan = {"a": Spec((2**50,), torch.float32)}
    with pytest.raises(InputError, match=r"the disk has [\d.]+ GB left\): it needs 4503599.63 GB"):
        write_tensors(tmp_path / "huge", plan, read)
    assert not list(tmp_path.iterdir())


def test_writing_refuses_what_is_there_and_what_was_not_planned(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(InputError, match="exists: choose a new name"):
        convert(bundle, bundle, layout="wamlab")
    with pytest.raises(InputError, match=r"a is \(3,\) torch.float32, not \(2,\)"):
        write_tensors(tmp_path / "new", {"a": Spec((2,), torch.float32)}, lambda _: torch.zeros(3))
    with pytest.raises(InputError, match="max_shard_bytes is 0"):
        convert(bundle, tmp_path / "new", layout="wamlab", max_shard_bytes=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        convert(bundle, tmp_path / "file" / "new", layout="wamlab")
    assert not (tmp_path / "new").exists()


def test_files_of_any_type_and_shape_are_read_by_others(tmp_path: Path) -> None:
    kinds = [torch.uint8, torch.float64, torch.bfloat16, torch.bool, torch.float16, torch.int64, torch.float8_e4m3fn]
    tensors = {str(kind): torch.randint(0, 2, (3, 1)).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "turned": torch.randn(3, 5).T}
    plan = {name: Spec(tuple(x.shape), x.dtype) for name, x in tensors.items()}
    file = tmp_path / "x.safetensors"
    write_tensors(file, plan, tensors.__getitem__, metadata={"note": "1"})
    assert equal({n: x.float() for n, x in load_file(file).items()}, {n: x.float() for n, x in tensors.items()})
    index = read_index(file)
    assert index.metadata["note"] == "1"
    assert all(torch.equal(read_tensor(index.entries[name]).float(), x.float()) for name, x in tensors.items())


def broken(file: Path, how: str) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    changed = {
        "cut": data[:-10],
        "cut in header": data[: length // 2],
        "empty": b"",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        "noise": bytes(range(200)) * 4,
        "no json": data[:8] + b"x" * length + data[8 + length :],
        "type": data.replace(b'"BF16"', b'"BF61"'),
        "shape": data.replace(b'"shape":[4]', b'"shape":[5]'),
    }[how]
    file.write_bytes(changed)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("cut", "is cut short"),
        ("cut in header", "is cut short"),
        ("empty", "no safetensors file"),
        ("pointer", "Git LFS pointer"),
        ("noise", "no safetensors file"),
        ("no json", "no safetensors file"),
        ("type", "BF61 cannot be read"),
        ("shape", "8 bytes are not a BF16 tensor of shape"),
    ],
)
def test_a_broken_file_is_one_sentence(bundle: Path, how: str, sentence: str) -> None:
    broken(bundle, how)
    with pytest.raises(InputError, match=sentence) as error:
        describe(bundle)
    assert "\n" not in str(error.value)
    assert str(bundle) in str(error.value)


def test_shards_must_be_whole_and_as_their_index_says(tmp_path: Path, bundle: Path) -> None:
    folder = tmp_path / "many"
    convert(bundle, folder, layout="wamlab", max_shard_bytes=40_000)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    assert describe(index).parts == describe(folder).parts

    def refused(sentence: str) -> None:
        with pytest.raises(InputError, match=sentence):
            load_pretrained(random_net(), folder)

    changed = {**whole["weight_map"], "more": "model-00001-of-00099.safetensors"}
    index.write_text(json.dumps({"weight_map": changed}))
    refused("No such file")
    changed = {**whole["weight_map"], "more": "../bundle.safetensors"}
    index.write_text(json.dumps({"weight_map": changed}))
    refused("no plain file name")
    changed = {name: file for name, file in whole["weight_map"].items() if name != "head.modulation"}
    index.write_text(json.dumps({"weight_map": changed}))
    refused(r"disagree about 1 \(head.modulation\)")
    index.write_text("{")
    refused("cannot be read as an index")
    index.unlink()
    refused("and 0 indexes: give a folder")
    for file in sorted(folder.glob("*.safetensors"))[1:]:
        file.unlink()
    refused("1 safetensors files and 0 indexes")
    with pytest.raises(InputError, match="cannot be read"):
        describe(tmp_path / "nowhere")


def test_a_network_without_storage_is_refused(bundle: Path) -> None:
    with torch.device("meta"):
        net = WorldActionModel(I2V)
    with pytest.raises(InputError, match="to_empty"):
        load_pretrained(net, bundle)
    net.to_empty(device="cpu")
    load_pretrained(net, bundle)
    assert all(tensor.isfinite().all() for tensor in net.state_dict().values())
