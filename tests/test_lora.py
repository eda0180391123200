"""Adapters: counts, names, merging, what trains, and that a file only goes where it belongs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wamlab.errors import InputError
from wamlab.model import presets
from wamlab.model.key_maps import ACTION_MODULES
from wamlab.model.lora import LoraConfig, LoraLinear, freeze, merge_lora, read_lora, split_lora, with_lora, write_lora
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.model.weights import fingerprint, load_pretrained
from wamlab.types import Batch, Noised

CONFIG = presets.tiny(dim=48, layers=2, heads=2, ffn_dim=64, mlp_dim=16, latent_channels=4, text_dim=8, text_len=4)
LORA = LoraConfig()


def random_net(seed: int = 0) -> WorldActionModel:
    net, generator = WorldActionModel(CONFIG), torch.Generator().manual_seed(seed)
    for tensor in net.state_dict().values():
        tensor.normal_(std=0.15, generator=generator)
    return net


def adapted_net(seed: int = 0, config: LoraConfig = LORA) -> WorldActionModel:
    """Return a network whose adapters do something."""
    net, generator = random_net(seed), torch.Generator().manual_seed(seed)
    with_lora(net, config, generator)
    for name, tensor in net.state_dict().items():
        if name.endswith(".lora_B"):
            tensor.normal_(std=0.3, generator=generator)
    return net


def predict(net: WorldActionModel) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    latents, actions = torch.randn(1, 5, 4, 4, 4, generator=generator), torch.randn(1, 16, 8, generator=generator)
    batch = Batch(
        latents=latents,
        actions=actions,
        action_mask=torch.ones(1, 16, 8, dtype=torch.bool),
        state=torch.randn(1, 2, 8, generator=generator),
        text=torch.randn(1, 4, 8, generator=generator),
    )
    noised = Noised(latents, actions, torch.full((1, 5), 0.5), torch.full((1, 16), 0.5))
    velocity = net(batch, noised)
    return torch.cat([velocity.video.flatten(), velocity.actions.flatten()])


@pytest.mark.parametrize(
    ("config", "count", "total"),
    [(presets.wan21_14b(), 19_169_280, 108.6e6), (presets.wan22_5b(), 10_076_160, 44.9e6)],
    ids=["14B", "5B"],
)
def test_full_size_networks_get_the_published_counts(config: WAMConfig, count: int, total: float) -> None:
    with torch.device("meta"):
        net = with_lora(WorldActionModel(config), LORA)
    trained = {name: p.numel() for name, p in net.named_parameters() if p.requires_grad}
    assert sum(n for name, n in trained.items() if ".lora_" in name) == count
    assert sum(trained.values()) == pytest.approx(total, rel=1e-3)
    assert all(".lora_" in name or name.startswith(ACTION_MODULES) for name in trained)


def test_an_image_path_drawn_afresh_can_be_trained_and_stored() -> None:
    net = WorldActionModel(replace(CONFIG, has_image=True))
    with_lora(net, replace(LORA, trained=(*LORA.trained, "img_emb.*", "*_img.*")))
    stored = split_lora(net)[1]
    assert {"img_emb.proj.1.weight", "blocks.0.cross_attn.norm_k_img.weight", "blocks.1.cross_attn.v_img.bias"} <= set(
        stored
    )
    assert len([name for name in stored if "img" in name]) == 8 + 2 * 5


@torch.no_grad()
def test_new_adapters_change_nothing_and_keep_every_published_name() -> None:
    net = random_net()
    before, state = predict(net), {name: x.clone() for name, x in net.state_dict().items()}
    parameters = dict(net.named_parameters())
    assert with_lora(net, LORA, torch.Generator().manual_seed(1)) is net
    assert torch.equal(predict(net), before)
    base, adapters = split_lora(net)
    assert {name: x for name, x in (base | adapters).items() if ".lora_" not in name}.keys() == state.keys()
    assert all(torch.equal(net.state_dict()[name], x) for name, x in state.items())
    assert all(dict(net.named_parameters())[name] is p for name, p in parameters.items())
    again = with_lora(random_net(), LORA, torch.Generator().manual_seed(1))
    assert all(torch.equal(again.state_dict()[name], x) for name, x in adapters.items())
    lora_A = net.get_parameter("blocks.0.ffn.2.lora_A")
    assert lora_A.shape == (4, 64)
    assert 0.9 * 64**-0.5 < lora_A.abs().max().item() <= 64**-0.5


@pytest.mark.parametrize("config", [LORA, LoraConfig(rank=3, alpha=6.0)])
@torch.no_grad()
def test_merged_equals_unmerged(config: LoraConfig) -> None:
    net = adapted_net(config=config)
    apart, plain = predict(net), predict(random_net())
    assert (apart - plain).abs().max() > 0.01
    assert merge_lora(net) is net
    assert not any(isinstance(module, LoraLinear) for module in net.modules())
    assert net.state_dict().keys() == random_net().state_dict().keys()
    torch.testing.assert_close(predict(net), apart, atol=1e-5, rtol=1e-5)  # float32 sums in another order


def test_only_adapters_and_action_modules_learn() -> None:
    net = adapted_net()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(8):
        loss = predict(net).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    changed = {name for name, x in net.state_dict().items() if not torch.equal(x, before[name])}
    assert all(".lora_" in name or name.startswith(ACTION_MODULES) for name in changed)
    assert {"blocks.0.self_attn.q.lora_A", "blocks.1.ffn.2.lora_B", "action_decoder.layer2.W"} <= changed


@torch.no_grad()
def test_a_base_in_bfloat16_has_adapters_in_float32() -> None:
    net = with_lora(random_net().bfloat16(), LORA)
    assert net.get_parameter("blocks.0.ffn.0.lora_A").dtype == torch.float32
    linear = net.get_submodule("blocks.0.ffn.0")
    assert linear(torch.ones(1, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert merge_lora(net).get_parameter("blocks.0.ffn.0.weight").dtype == torch.bfloat16


@torch.no_grad()
def test_a_file_has_dreamzero_names_and_comes_back(tmp_path: Path) -> None:
    net = adapted_net()
    file = write_lora(net, tmp_path / "lora.safetensors", "f" * 64)
    names = set(load_file(file))
    prefix = "action_head.model.base_model.model."
    assert f"{prefix}blocks.1.cross_attn.o.lora_A.default.weight" in names
    assert f"{prefix}blocks.0.ffn.2.lora_B.default.weight" in names
    assert f"{prefix}action_encoder.W3.b" in names
    assert len(names) == 2 * 10 * 2 + 14
    other = random_net()
    with_lora(other, LORA)
    read_lora(other, file, "f" * 64)
    assert torch.equal(predict(other), predict(net))
    save_file(load_file(file), tmp_path / "nameless.safetensors")  # DreamZero's own name no base
    read_lora(other, tmp_path / "nameless.safetensors", None)
    with pytest.raises(InputError, match="base None"):
        read_lora(other, tmp_path / "nameless.safetensors", "f" * 64)


@torch.no_grad()
def test_a_file_goes_nowhere_else(tmp_path: Path) -> None:
    """DreamZero issue 82: adapters on another base load without an error and play worse."""
    bases = {}
    for seed in (1, 2):
        save_file(random_net(seed).state_dict(), tmp_path / f"{seed}.safetensors")
        bases[seed] = fingerprint(tmp_path / f"{seed}.safetensors")
    file = write_lora(adapted_net(1), tmp_path / "lora.safetensors", bases[1])
    net = with_lora(random_net(2), LORA)
    with pytest.raises(InputError, match="load the base it belongs to"):
        read_lora(net, file, bases[2])
    load_pretrained(adapted_net(1), tmp_path / "1.safetensors")  # a base goes under adapters too
    for config, sentence in (
        (LoraConfig(rank=2, alpha=2.0), r"there, \(2, 48\) here: set rank"),
        (LoraConfig(alpha=8.0), "set alpha"),
        (replace(LORA, targets=("blocks.*.ffn.0",)), "does not fit in 36 "),
        (replace(LORA, trained=("*",)), "does not fit"),
    ):
        net = with_lora(random_net(1), config)
        before = {name: x.clone() for name, x in net.state_dict().items()}
        with pytest.raises(InputError, match=sentence):
            read_lora(net, file, bases[1])
        assert all(torch.equal(net.state_dict()[name], x) for name, x in before.items())
    tensors = load_file(file)
    tensors.popitem()
    save_file(tensors, tmp_path / "less.safetensors")
    with pytest.raises(InputError, match=r"does not fit in 1 \("):
        read_lora(with_lora(random_net(1), LORA), tmp_path / "less.safetensors", None)
    with pytest.raises(InputError, match="call with_lora first"):
        write_lora(random_net(), tmp_path / "none.safetensors", bases[1])


def test_freeze_takes_patterns_and_refuses_those_that_match_nothing() -> None:
    net = random_net()
    assert freeze(net, ["blocks.*", "head.*"]) is net
    assert not net.get_parameter("blocks.1.modulation").requires_grad
    assert net.get_parameter("patch_embedding.weight").requires_grad
    with pytest.raises(InputError, match=r'named like "block\.\*"'):
        freeze(net, ["block.*"])
    with pytest.raises(InputError, match="named like"):
        with_lora(net, LoraConfig(targets=("blocks.*.mlp",)))
    with pytest.raises(InputError, match="rank"):
        LoraConfig(rank=0)
