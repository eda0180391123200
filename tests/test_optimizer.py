"""What is trained and how: groups of weight decay, frozen names, adapters, 8-bit optimiser states."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from wamlab.errors import InputError
from wamlab.model import presets
from wamlab.model.lora import LoraConfig, freeze, narrowed, with_lora
from wamlab.model.wam import WorldActionModel
from wamlab.speed.muon import Muon, orthogonalized
from wamlab.train import Ema, TrainConfig, make_optimizer
from wamlab.types import Batch, Noised

CONFIG = TrainConfig(learning_rate=1e-3, weight_decay=0.1)


def network() -> WorldActionModel:
    return WorldActionModel(presets.tiny(dim=32, layers=1, heads=2, ffn_dim=48, mlp_dim=16))


def decays(net: nn.Module, config: TrainConfig = CONFIG) -> dict[str, float]:
    """Return the weight decay of every parameter that is trained."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = make_optimizer(net, config).param_groups
    return {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}


def test_only_matrices_decay() -> None:
    found = decays(network())
    assert found["blocks.0.ffn.0.weight"] == found["action_encoder.W1.W"] == 0.1
    for name in ("blocks.0.ffn.0.bias", "blocks.0.norm3.weight", "blocks.0.modulation", "action_encoder.W1.b"):
        assert found[name] == 0


def test_adapters_decay_and_their_frozen_base_is_not_optimised() -> None:
    net = with_lora(network(), LoraConfig())
    found = decays(net)
    assert found["blocks.0.ffn.0.lora_A"] == found["blocks.0.ffn.0.lora_B"] == 0.1
    assert found["state_encoder.layer1.b"] == 0
    assert not [name for name in found if name.startswith("blocks.") and "lora" not in name]
    assert Ema(net, 0.9).average.keys() == found.keys()


def test_a_base_in_bfloat16_changes_no_number_under_autocast() -> None:
    config = LoraConfig(trained=("action_encoder.*", "action_decoder.*", "*.norm3.*"))

    def gradients(*, is_narrow: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = network()
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.1)
        net = with_lora(narrowed(net, config) if is_narrow else net, config, torch.Generator().manual_seed(0))
        assert (net.get_parameter("blocks.0.ffn.0.weight").dtype == torch.bfloat16) == is_narrow
        actions, levels = torch.randn(2, 16, 8), torch.rand(2, 16, dtype=torch.float64)
        noised = Noised(torch.randn(2, 5, 48, 4, 4), actions, torch.rand(2, 5, dtype=torch.float64), levels)
        mask, text = torch.ones(2, 16, 8, dtype=torch.bool), torch.randn(2, 4, 64)
        batch = Batch(torch.randn(2, 5, 48, 4, 4), actions, mask, torch.randn(2, 2, 8), text)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            velocity = net(batch, noised)
        (velocity.video.square().mean() + velocity.actions.square().mean()).backward()
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}

    wide, narrow = gradients(is_narrow=False), gradients(is_narrow=True)
    assert wide.keys() == narrow.keys()
    assert "blocks.0.ffn.0.lora_A" in wide
    assert all(torch.equal(wide[name], narrow[name]) for name in wide)


def test_frozen_names_are_not_optimised_and_not_averaged() -> None:
    net = freeze(network(), ("blocks.*.ffn.*", "head.*"))
    found = decays(net)
    assert "blocks.0.self_attn.q.weight" in found
    assert not [name for name in found if ".ffn." in name or name.startswith("head.")]
    assert Ema(net, 0.9).average.keys() == found.keys()
    with pytest.raises(InputError, match="every parameter is frozen"):
        make_optimizer(freeze(net, ["*"]), CONFIG)
    with pytest.raises(InputError, match='named like "bloks'):
        freeze(net, ("bloks.*",))


def test_an_unknown_optimiser_is_refused() -> None:
    with pytest.raises(InputError, match=r'train\.optimizer is "adam9": give one of adamw'):
        replace(CONFIG, optimizer="adam9")


def fitted(config: TrainConfig, num_steps: int = 60) -> tuple[nn.Module, list[float], torch.optim.Optimizer]:
    """Fit a random linear map; return the losses on the way."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    inputs, target = torch.randn(256, 64), torch.randn(64, 64) / 8
    optimizer = make_optimizer(net, config)
    return net, [step(net, optimizer, inputs, inputs @ target) for _ in range(num_steps)], optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, wanted: Tensor) -> float:
    loss = (net(inputs) - wanted).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_8_bit_states_track_adamw_and_take_a_quarter() -> None:
    pytest.importorskip("bitsandbytes", reason="the extra adamw8bit is not installed")
    config = replace(CONFIG, weight_decay=1e-5)
    start = [p.detach().clone() for p in fitted(config, num_steps=0)[0].parameters()]
    (whole, losses, usual), (small, losses8, packed) = fitted(config), fitted(replace(config, optimizer="adamw8bit"))
    assert losses8[-1] < 0.5 * losses8[0]
    assert losses8[-1] == pytest.approx(losses[-1], rel=0.05)  # measured: 2.5 % after 60 steps, 3.6 % after 200
    moves = [
        torch.cat([(p - s).flatten() for p, s in zip(net.parameters(), start, strict=True)]).detach()
        for net in (whole, small)
    ]
    assert nn.functional.cosine_similarity(*moves, dim=0) > 0.99  # measured: 0.9938

    def num_bytes(optimizer: torch.optim.Optimizer, net: nn.Module) -> int:
        states = optimizer.state[net.get_parameter("0.weight")]
        kept = {name: x for name, x in states.items() if isinstance(x, Tensor) and not name.startswith("qmap")}
        return sum(x.nbytes for name, x in kept.items() if name != "step")  # the two code tables are shared

    assert num_bytes(packed, small) < 0.27 * num_bytes(usual, whole)


def test_8_bit_states_are_restored_exactly(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra adamw8bit is not installed")
    config = replace(CONFIG, optimizer="adamw8bit")
    net, _, optimizer = fitted(config, num_steps=5)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    other.load_state_dict(net.state_dict())
    again = make_optimizer(other, config)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", map_location="cpu", weights_only=True))
    torch.manual_seed(1)
    inputs, wanted = torch.randn(256, 64), torch.randn(256, 64)
    for _ in range(3):
        assert step(net, optimizer, inputs, wanted) == step(other, again, inputs, wanted)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_muon_follows_torchs_own_up_to_its_bfloat16() -> None:
    torch.manual_seed(0)
    shapes = [(24, 24)] * 3 + [(48, 24), (24, 48)]
    ours, theirs = ([nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2))
    bias = nn.Parameter(torch.ones(5))
    for a, b in zip(ours, theirs, strict=True):
        b.data.copy_(a.data)
    own = Muon(ours, [{"params": [bias], "weight_decay": 0.0}], lr=0.01, weight_decay=0.1)
    wanted = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = [p.detach().clone() for p in ours]
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        bias.grad = torch.ones(5)
        own.step()
        wanted.step()
    for a, b, start in zip(ours, theirs, before, strict=True):
        assert (a - b).norm() <= 0.03 * (b - start).norm()
    assert torch.allclose(bias, torch.full((5,), 0.97), atol=1e-4)  # AdamW moves each by its learning rate


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    for shape in ((2, 16, 40), (2, 40, 16)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_muon_takes_hidden_matrices_and_resumes_exactly() -> None:
    config = replace(CONFIG, optimizer="muon")
    net = network()
    optimizer = make_optimizer(net, config)
    names = {id(p): name for name, p in net.named_parameters()}
    matrices = {names[id(p)] for group in optimizer.param_groups if group["momentum"] for p in group["params"]}
    assert "blocks.0.ffn.0.weight" in matrices
    assert not [name for name in matrices if not name.startswith("blocks.")]
    assert decays(net, config).keys() == dict(net.named_parameters()).keys()

    def stepped(optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(1)
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()

    stepped(optimizer)
    saved, weights = deepcopy(optimizer.state_dict()), {name: p.detach().clone() for name, p in net.named_parameters()}
    stepped(optimizer)
    wanted = [p.detach().clone() for p in net.parameters()]
    net.load_state_dict(weights)
    resumed = make_optimizer(net, config)
    resumed.load_state_dict(saved)
    stepped(resumed)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), wanted, strict=True))
