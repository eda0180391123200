"""The network: golden numbers of the reference, its mask, no leaks, cached inference equal to training."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from wamlab.errors import InputError
from wamlab.model import presets
from wamlab.model.attention import Layout, block_mask, teacher_forced_attention
from wamlab.model.positions import axis_angles, rotate, rotation_of, video_angles
from wamlab.model.tokens import action_sinusoid, patches, time_sinusoid, unpatch
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.types import Batch, Noised

GOLDEN = json.loads((Path(__file__).parent / "golden" / "wam_tiny.json").read_text())["cases"]
GOLDEN_CONFIG = WAMConfig(
    dim=48, layers=2, heads=3, ffn_dim=64, freq_dim=32, text_dim=24, text_len=5, latent_channels=4,
    latents_per_block=2, actions_per_block=4, max_action_dim=7, max_state_dim=9, mlp_dim=20, max_blocks=2,
    has_image=True,
)  # fmt: skip
VARIANTS = {"ti2v": GOLDEN_CONFIG, "i2v": replace(GOLDEN_CONFIG, has_condition=True)}
MASK = """
1000000000000000 1110000000000000 1110000000000000 1111100000000000 1111100000000000
0000010000000000 1000001100110010 1000001100110010 1110000011001101 1110000011001101
1000001100110010 1000001100110010 1110000011001101 1110000011001101 0000000000000010 0000000000000001
"""  # rows c0..c4, n0..n4, a00 a01 a10 a11, s0 s1 (spec 11.5)


def uniform(count: int, seed: int) -> np.ndarray:
    """Return the spec's deterministic numbers in -1..1 (section 11.1)."""
    h = np.arange(1, count + 1, dtype=np.uint64) * 2654435761 + seed * 97531
    h &= 0xFFFFFFFF
    h ^= h >> 16
    h = h * 2246822519 & 0xFFFFFFFF
    h ^= h >> 13
    return h / 2**32 * 2 - 1


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.tensor(1.5 * uniform(math.prod(shape), seed).reshape(shape), dtype=torch.float32)


def golden_net(config: WAMConfig) -> WorldActionModel:
    net = WorldActionModel(config)
    for name, p in net.state_dict().items():
        u = uniform(p.numel(), sum(name.encode())).reshape(p.shape)
        if name.endswith(".W"):
            u = u * math.sqrt(3 / p.shape[1])
        elif name.endswith("modulation"):
            u = 0.3 * u
        elif p.ndim == 1 and name.endswith("weight"):
            u = 1 + 0.2 * u
        elif p.ndim == 1 or name.endswith(".b"):
            u = 0.1 * u
        else:
            u = u * math.sqrt(3 / (p.numel() / p.shape[0]))
        p.copy_(torch.tensor(u, dtype=torch.float32))
    return net.eval()


def golden_inputs(config: WAMConfig) -> tuple[Batch, Noised]:
    """Return the spec's inputs (section 11.2); they are stored channels first."""
    level = torch.tensor([[900, 700, 700, 300, 300], [50, 999, 999, 10.5, 10.5]], dtype=torch.float64) / 1000
    condition = drawn((2, 8, 5, 4, 6), 3).transpose(1, 2) if config.has_condition else None
    batch = Batch(
        latents=drawn((2, 4, 5, 4, 6), 2).transpose(1, 2),
        actions=torch.zeros(2, 8, 7),
        action_mask=torch.ones(2, 8, 7, dtype=torch.bool),
        state=drawn((2, 2, 9), 7),
        text=drawn((2, 5, 24), 4),
        condition=condition,
        image=drawn((2, 257, 1280), 5),
    )
    noised = Noised(
        latents=drawn((2, 4, 5, 4, 6), 1).transpose(1, 2),
        actions=drawn((2, 8, 7), 6),
        video_noise_level=level,
        action_noise_level=level[:, [1, 3]].repeat_interleave(4, dim=1),
    )
    return batch, noised


def test_the_generator_gives_the_published_numbers() -> None:
    assert uniform(5, 0) == pytest.approx([0.61450746, 0.64755651, 0.72356653, -0.65849565, -0.74764255], abs=1e-8)
    assert uniform(3, 1) == pytest.approx([0.89547539, -0.97955346, -0.93555529], abs=1e-8)
    weights = golden_net(GOLDEN_CONFIG).state_dict()
    assert weights["blocks.0.self_attn.norm_q.weight"][:2].tolist() == pytest.approx([0.911997, 1.106972], abs=1e-6)
    assert weights["action_encoder.W2.W"].flatten()[0].item() == pytest.approx(-0.078861, abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_training_forward_equals_the_reference(variant: str) -> None:
    config, golden = VARIANTS[variant], GOLDEN[variant]
    found = golden_net(config)(*golden_inputs(config))
    video = torch.tensor(golden["video_pred"]).reshape(golden["video_pred_shape"])
    actions = torch.tensor(golden["action_pred"]).reshape(golden["action_pred_shape"])
    assert (found.video.transpose(1, 2) - video).abs().max() <= 2e-5
    assert (found.actions - actions).abs().max() <= 2e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_have_the_names_and_shapes_of_the_checkpoints(variant: str) -> None:
    shapes = {name: list(p.shape) for name, p in WorldActionModel(VARIANTS[variant]).state_dict().items()}
    assert shapes == GOLDEN[variant]["state_dict_shapes"]


@torch.no_grad()
def test_stages_equal_the_reference() -> None:
    """Spec 11.2, the first five values of each stage of the ti2v case."""
    net = golden_net(GOLDEN_CONFIG)
    batch, noised = golden_inputs(GOLDEN_CONFIG)
    time, slots = net._time(noised.video_noise_level)
    context = net._context(batch.text, batch.image)
    assert context.image is not None
    stages = {
        "patch": (net._video_tokens(noised.latents, None), [0.06675, -0.41127, -0.25601, -0.36172, -0.55089]),
        "action": (
            net.action_encoder(noised.actions, noised.action_noise_level),
            [-0.16003, -0.51729, -0.03789, 0.33407, -0.5396],
        ),
        "state": (net.state_encoder(batch.state), [-0.26137, 0.62942, -0.74615, -0.25345, 0.52042]),
        "time": (time, [0.21083, 0.45729, -0.27884, -0.05677, 0.3555]),
        "slots": (slots, [0.13016, 0.43978, 0.06329, -0.17667, 0.01421]),
        "image": (context.image, [-0.17681, -0.33957, 0.7222, 1.77504, 0.91133]),
        "text": (context.text, [-0.13028, 1.00907, 0.47541, 0.02449, 0.90917]),
    }
    for name, (found, wanted) in stages.items():
        assert found.flatten()[:5].tolist() == pytest.approx(wanted, abs=2e-5), name


def test_sinusoids_equal_the_reference() -> None:
    level = torch.tensor([0.8333333], dtype=torch.float64)
    time = time_sinusoid(level, 256)[0]
    assert time[:4].tolist() == pytest.approx([-0.688585, -0.879158, 0.598321, 0.720906], abs=1e-4)
    exact = time_sinusoid(torch.tensor([2500 / 3 / 1000], dtype=torch.float64), 256)[0]
    assert exact[:4].tolist() == pytest.approx([-0.688585, -0.879158, 0.598321, 0.720906], abs=4e-5)
    assert exact[128:132].tolist() == pytest.approx([-0.725155, 0.476530, -0.801256, -0.693033], abs=4e-5)
    action = action_sinusoid(torch.tensor([0.8333333], dtype=torch.float64), 8)[0]
    wanted = [-0.725155, 0.996711, 0.887294, 0.740177, -0.688585, -0.081034, -0.461204, 0.672412]
    assert action.tolist() == pytest.approx(wanted, abs=4e-5)


def test_rotary_angles_equal_the_reference() -> None:
    angles = video_angles(3, 1, 6, 8, 128).reshape(6, 8, 64)[5, 7]
    assert angles[:3].tolist() == pytest.approx([3, 1.973800, 1.298628], abs=1e-5)
    assert angles[21].item() == pytest.approx(4.5597e-4, rel=1e-4)
    assert angles[22:25].tolist() == pytest.approx([5, 3.224733, 2.079781], abs=1e-5)
    assert angles[43:46].tolist() == pytest.approx([7, 4.514627, 2.911694], abs=1e-5)
    action = axis_angles(torch.tensor([24]), 128)[0]
    assert action[:4].tolist() == pytest.approx([24, 20.783144, 17.997461, 15.585159], abs=1e-5)
    assert action[-1].item() == pytest.approx(2.77148e-3, rel=1e-4)
    turned = rotate(torch.ones(1, 1, 1, 16), rotation_of(video_angles(3, 1, 2, 3, 16)[5:], torch.device("cpu")))
    wanted = [-1.131112, -0.848872, 0.659816, 1.250857, 0.969555, 1.029546, 0.996996, 1.002995, -0.301169,
              1.381773, 0.98995, 1.00995, -1.325444, 0.493151, 0.979801, 1.019799]  # fmt: skip
    assert turned.flatten().tolist() == pytest.approx(wanted, abs=1e-6)


def test_the_mask_is_the_published_one() -> None:
    wanted = torch.tensor([[int(bit) for bit in row] for row in MASK.split()], dtype=torch.bool)
    assert torch.equal(block_mask(Layout(2, 1, 2, 2, 1)), wanted)


@pytest.mark.parametrize("num_actions", [0, 3])
@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_grouped_attention_equals_the_dense_mask(num_blocks: int, num_actions: int) -> None:
    layout = Layout(num_blocks, 6, 2, num_actions, 1)
    query, key, value = torch.randn(3, 2, 4, sum(layout.sizes), 8).unbind(0)
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=block_mask(layout))
    assert torch.allclose(teacher_forced_attention(query, key, value, layout), dense, atol=1e-6)


@pytest.mark.parametrize(
    ("preset", "num_parameters", "num_tensors"),
    [(presets.wan22_5b, 5_606_692_832, 997), (presets.wan21_14b, 16_484_292_448, 1317)],
)
def test_presets_have_the_published_sizes(preset, num_parameters: int, num_tensors: int) -> None:
    with torch.device("meta"):
        net = WorldActionModel(preset())
    assert sum(p.numel() for p in net.parameters()) == num_parameters
    assert len(net.state_dict()) == num_tensors


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_cached_inference_equals_the_training_forward(variant: str) -> None:
    config = VARIANTS[variant]
    net = golden_net(config)
    batch, noised = golden_inputs(config)
    trained = net(batch, noised)

    def condition(span: slice) -> Tensor | None:
        return None if batch.condition is None else batch.condition[:, span]

    history = net.observe(net.start(batch.text, batch.image), batch.latents[:, :1], condition(slice(0, 1)))
    for block, span in enumerate((slice(1, 3), slice(3, 5))):
        ticks = slice(4 * block, 4 * block + 4)
        found = net.denoise(
            history,
            noised.latents[:, span],
            noised.actions[:, ticks],
            batch.state[:, block : block + 1],
            noised.video_noise_level[:, span.start],
            noised.action_noise_level[:, ticks.start],
            condition(span),
        )
        assert (found.video - trained.video[:, span]).abs().max() <= 1e-5
        assert (found.actions - trained.actions[:, ticks]).abs().max() <= 1e-5
        history = net.observe(history, batch.latents[:, span], condition(span))
    assert history.num_frames == 5
    assert history.num_bytes == 2 * 2 * 2 * 30 * 48 * 4  # layers, K and V, sessions, tokens, width, float32


def changed(tensor: Tensor, span: slice) -> Tensor:
    tensor = tensor.clone()
    tensor[:, span] += 1
    return tensor


@torch.no_grad()
def test_nothing_leaks_from_what_a_block_must_predict() -> None:
    """Clean frames of a block, later blocks and other blocks' actions do not move a block's prediction."""
    net = golden_net(GOLDEN_CONFIG)
    batch, noised = golden_inputs(GOLDEN_CONFIG)
    first = net(batch, noised)

    own_clean = net(replace(batch, latents=changed(batch.latents, slice(3, 5))), noised)
    assert torch.equal(own_clean.video, first.video)
    assert torch.equal(own_clean.actions, first.actions)

    other_actions = net(batch, replace(noised, actions=changed(noised.actions, slice(0, 4))))
    assert torch.equal(other_actions.video[:, 3:], first.video[:, 3:])
    assert torch.equal(other_actions.actions[:, 4:], first.actions[:, 4:])
    assert not torch.allclose(other_actions.video[:, 1:3], first.video[:, 1:3])

    past_clean = net(replace(batch, latents=changed(batch.latents, slice(1, 3))), noised)
    assert torch.equal(past_clean.video[:, :3], first.video[:, :3])
    assert not torch.allclose(past_clean.video[:, 3:], first.video[:, 3:])


@torch.no_grad()
def test_a_window_without_actions_keeps_the_block_mask() -> None:
    """The reference lets video-only windows see the very frames they must predict (spec 1.7)."""
    net = golden_net(GOLDEN_CONFIG)
    batch, noised = golden_inputs(GOLDEN_CONFIG)
    bare = replace(batch, actions=batch.actions[:, :0], action_mask=batch.action_mask[:, :0])
    seen = replace(noised, actions=noised.actions[:, :0], action_noise_level=noised.action_noise_level[:, :0])
    first = net(bare, seen)
    assert first.actions.shape == (2, 0, 7)
    leak = net(replace(bare, latents=changed(bare.latents, slice(3, 5))), seen)
    assert torch.equal(leak.video, first.video)


@torch.no_grad()
def test_missing_text_tokens_count_as_zero_pads() -> None:
    net = golden_net(GOLDEN_CONFIG)
    batch, noised = golden_inputs(GOLDEN_CONFIG)
    padded = batch.text.clone()
    padded[:, 3:] = 0
    whole = net(replace(batch, text=padded), noised)
    short = net(replace(batch, text=batch.text[:, :3]), noised)
    assert torch.allclose(whole.video, short.video, atol=1e-6)


def test_gradients_reach_every_parameter() -> None:
    net = golden_net(VARIANTS["i2v"])
    found = net(*golden_inputs(VARIANTS["i2v"]))
    (found.video.square().mean() + found.actions.square().mean()).backward()
    assert not [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()]


def test_a_network_trains_after_it_was_used_in_inference_mode() -> None:
    config = replace(GOLDEN_CONFIG, actions_per_block=5)  # no other test has cached these rotations
    net = WorldActionModel(config)
    batch, noised = golden_inputs(config)
    batch = replace(batch, actions=torch.zeros(2, 10, 7), action_mask=torch.ones(2, 10, 7, dtype=torch.bool))
    noised = replace(
        noised, actions=torch.zeros(2, 10, 7), action_noise_level=noised.action_noise_level[:, [0] * 5 + [4] * 5]
    )
    with torch.inference_mode():
        net(batch, noised)
    net(batch, noised).actions.sum().backward()


def test_a_fresh_network_predicts_no_velocity() -> None:
    net = WorldActionModel(GOLDEN_CONFIG)
    assert not net(*golden_inputs(GOLDEN_CONFIG)).video.any()


def test_patches_follow_the_convolution_and_unpatch_reverses_the_heads_order() -> None:
    latents = torch.randn(2, 3, 4, 5, 6)  # an odd height loses its last row
    weight = torch.randn(8, 4, 1, 2, 2)
    convolved = torch.nn.functional.conv3d(latents.transpose(1, 2), weight, stride=(1, 2, 2))
    tokens = patches(latents) @ weight.flatten(1).T
    assert torch.allclose(tokens.transpose(1, 2).transpose(1, 3).flatten(2), convolved.flatten(2), atol=1e-5)
    channel_last = patches(latents).unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2)
    assert torch.equal(unpatch(channel_last, 2, 3), latents[..., :4, :])


@torch.no_grad()
def test_a_place_code_tells_equal_patches_apart() -> None:
    latents = torch.ones(1, 1, 4, 4, 6)
    plain = WorldActionModel(GOLDEN_CONFIG)._video_tokens(latents, None)
    coded = WorldActionModel(replace(GOLDEN_CONFIG, position_scale=1.0))._video_tokens(latents, None)
    assert torch.allclose(plain, plain[:, :, :1].expand_as(plain))
    assert torch.pdist(coded[0, 0]).min() > 1


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="whole, even heads"):
        presets.tiny(dim=100, heads=3)
    batch, noised = golden_inputs(GOLDEN_CONFIG)
    with pytest.raises(InputError, match="this batch has 5"):
        WorldActionModel(replace(GOLDEN_CONFIG, latents_per_block=1))(batch, noised)
    with pytest.raises(InputError, match="must not have condition"):
        WorldActionModel(GOLDEN_CONFIG)(*golden_inputs(VARIANTS["i2v"]))
    with pytest.raises(InputError, match="text_len"):
        WorldActionModel(replace(GOLDEN_CONFIG, text_len=4))(batch, noised)
    with pytest.raises(InputError, match="observe its first frame"):
        net = WorldActionModel(GOLDEN_CONFIG)
        net.denoise(
            net.start(batch.text, batch.image), batch.latents[:, :2], batch.actions[:, :4], batch.state[:, :1],
            torch.ones(2), torch.ones(2),
        )  # fmt: skip
