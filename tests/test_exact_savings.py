"""Every saving of the network changes no number: against the plain forms in model/plain.py and plain_sampling.py."""

import warnings
from dataclasses import replace

import pytest
import torch
from plain_sampling import PlainStream, plain_pass, plain_sample  # pyright: ignore[reportMissingImports]
from torch import Tensor

from wamlab.errors import InputError
from wamlab.flow import NoiseConfig, flow_loss, velocity_loss, with_noise
from wamlab.model.attention import Layout, block_mask, flex_attention_of, teacher_forced_attention
from wamlab.model.plain import plain_forward
from wamlab.model.sampler import SamplerConfig, StepSkips, sample_block
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.types import Batch, FlowExample

CONFIG = WAMConfig(
    dim=48, layers=3, heads=3, ffn_dim=64, freq_dim=32, text_dim=24, text_len=12, latent_channels=4,
    latents_per_block=2, actions_per_block=4, max_action_dim=7, max_state_dim=9, mlp_dim=20, max_blocks=3,
    has_image=True, image_dim=32,
)  # fmt: skip
VARIANTS = {
    "ti2v": CONFIG,
    "i2v": replace(CONFIG, has_condition=True),
    "text not padded": replace(CONFIG, text_len=5),
    "no image": replace(CONFIG, has_image=False),
}
NUM_BLOCKS = 3


def open_net(config: WAMConfig) -> WorldActionModel:
    """Return a network none of whose parameters is zero, so that nothing hides behind a closed head."""
    torch.manual_seed(0)
    net = WorldActionModel(config)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def example_of(config: WAMConfig, num_samples: int = 2) -> FlowExample:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(num_samples, *shape, generator=generator)

    num_frames, num_actions = 1 + NUM_BLOCKS * config.latents_per_block, NUM_BLOCKS * config.actions_per_block
    condition = drawn(num_frames, 4 + config.latent_channels, 4, 6) if config.has_condition else None
    batch = Batch(
        latents=drawn(num_frames, config.latent_channels, 4, 6),
        actions=drawn(num_actions, config.max_action_dim),
        action_mask=torch.ones(num_samples, num_actions, config.max_action_dim, dtype=torch.bool),
        state=drawn(NUM_BLOCKS, config.max_state_dim),
        text=drawn(5, config.text_dim),
        condition=condition,
        image=drawn(7, config.image_dim),
    )
    return with_noise(batch, generator)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_equal_the_plain_form(variant: str) -> None:
    """Frame-level modulation, float32 rotations, folded pads, grouped attention, pruned tokens: all at once."""
    config = VARIANTS[variant]
    net, example = open_net(config), example_of(config)
    found: list[dict[str, Tensor]] = []
    outputs = []
    for forward in (lambda b, s: plain_forward(net, b, s), net):
        net.zero_grad()
        seen = example.seen
        velocity = forward(example.batch, seen)
        outputs.append(velocity)
        loss = velocity_loss(
            velocity, example.target, seen.video_noise_level, seen.action_noise_level, example.batch.action_mask
        )
        loss.total.backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
    plain, own = outputs
    assert (plain.video - own.video).abs().max() <= 2e-5
    assert (plain.actions - own.actions).abs().max() <= 2e-5
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[0].items():
        assert (found[1][name] - wanted).norm() <= 2e-5 * (1 + wanted.norm()), name


def test_dropping_noisy_frame_0_leaves_all_other_predictions() -> None:
    example = example_of(CONFIG)
    net = open_net(CONFIG)
    lean = WorldActionModel(replace(CONFIG, drops_noisy_first=True))
    lean.load_state_dict(net.state_dict())
    with torch.no_grad():
        whole, part = (n(example.batch, example.seen) for n in (net, lean))
    assert part.video.shape[1] == whole.video.shape[1] - 1
    assert (part.video - whole.video[:, 1:]).abs().max() <= 1e-5
    assert (part.actions - whole.actions).abs().max() <= 1e-5
    level, target = example.seen.video_noise_level, example.target
    video = velocity_loss(part, target, level, example.seen.action_noise_level, example.batch.action_mask).video
    without_first = replace(target, video=target.video[:, 1:])
    wanted = velocity_loss(
        part, without_first, level[:, 1:], example.seen.action_noise_level, example.batch.action_mask
    ).video
    assert torch.equal(video, wanted)


@pytest.mark.parametrize("has_last_clean", [False, True])
@pytest.mark.parametrize("has_first_noisy", [False, True])
@pytest.mark.parametrize("num_actions", [0, 3])
def test_every_attention_path_follows_the_one_mask(
    has_last_clean: bool, has_first_noisy: bool, num_actions: int
) -> None:
    layout = Layout(3, 4, 2, num_actions, 1, has_last_clean=has_last_clean, has_first_noisy=has_first_noisy)
    query, key, value = torch.randn(3, 2, 2, sum(layout.sizes), 16).unbind(0)
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=block_mask(layout))
    assert torch.allclose(teacher_forced_attention(query, key, value, layout), dense, atol=1e-6)
    num_clean, num_noisy, num_acting, _ = layout.sizes
    live = slice(num_clean, num_clean + num_noisy + num_acting)
    assert torch.allclose(teacher_forced_attention(query[:, :, live], key, value, layout), dense[:, :, live], atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention asks to be compiled; here its meaning is tested, not its speed
        assert torch.allclose(flex_attention_of(layout, "cpu")(query, key, value), dense, atol=1e-6)


def test_the_pruned_mask_is_the_whole_one_without_the_pruned_rows_and_columns() -> None:
    whole, lean = Layout(2, 3, 2, 2, 1), Layout(2, 3, 2, 2, 1, has_last_clean=False, has_first_noisy=False)
    frames = torch.arange(5).repeat_interleave(3)
    kept = torch.cat([frames < 3, frames > 0, torch.ones(6, dtype=torch.bool)])
    assert torch.equal(block_mask(whole)[kept][:, kept], block_mask(lean))


def test_preconditioning_is_exact_for_gaussian_latents() -> None:
    """With a silent network the velocity is the best linear guess: its error is uncorrelated with what is seen."""
    spread = 0.5
    net = WorldActionModel(replace(CONFIG, video_spread=spread))
    generator = torch.Generator().manual_seed(0)
    clean = spread * torch.randn(1, 1, 4, 100, 100, generator=generator)
    noise = torch.randn(clean.shape, generator=generator)
    for level in (0.1, 0.5, 0.9):
        seen = (1 - level) * clean + level * noise
        guess = net._preconditioned(torch.zeros_like(clean), seen, torch.full((1, 1), level))
        error = noise - clean - guess
        assert abs((error * seen).mean().item()) < 0.01
        unit = net._preconditioned(torch.ones_like(clean), seen, torch.full((1, 1), level)) - guess
        assert unit.mean().item() == pytest.approx(error.std().item(), rel=0.02)


def test_preconditioned_inference_equals_training() -> None:
    config = replace(CONFIG, video_spread=0.7, drops_noisy_first=True)
    net, example = open_net(config).eval(), example_of(config)
    batch, seen = example.batch, example.seen
    with torch.no_grad():
        trained = net(batch, seen)
        history = net.observe(net.start(batch.text, batch.image), batch.latents[:, :1])
        found = net.denoise(
            history, seen.latents[:, 1:3], seen.actions[:, :4], batch.state[:, :1],
            seen.video_noise_level[:, 1], seen.action_noise_level[:, 0],
        )  # fmt: skip
    assert (found.video - trained.video[:, :2]).abs().max() <= 1e-5
    assert (found.actions - trained.actions[:, :4]).abs().max() <= 1e-5


@pytest.mark.parametrize("variant", ["ti2v", "i2v"])
@torch.no_grad()
def test_guided_cached_sampling_equals_the_plain_procedure(variant: str) -> None:
    config = VARIANTS[variant]
    net, batch = open_net(config).eval(), example_of(config).batch
    negative = torch.randn(2, 3, config.text_dim)
    spans = (slice(0, 1), slice(1, 3), slice(3, 5))

    def condition(span: slice) -> Tensor | None:
        return None if batch.condition is None else batch.condition[:, span]

    def twice(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.cat([tensor, tensor])

    streams = (PlainStream(batch.text, batch.image), PlainStream(negative, batch.image))
    history = net.start(torch.cat([batch.text, torch.nn.functional.pad(negative, (0, 0, 0, 2))]), twice(batch.image))
    for span in spans:
        for stream in streams:
            plain_pass(net, stream, batch.latents[:, span], condition(span), 0.0)
        history = net.observe(history, batch.latents[:, span], condition(span))
    noise = (torch.randn(2, 2, 4, 4, 6), torch.randn(2, 4, 7))
    state, last = batch.state[:, 2:], condition(slice(5, 7))
    wanted = plain_sample(net, streams, state, noise, condition=last, guidance_scale=3.0)
    sampler = SamplerConfig(num_steps=16, num_evaluations=8, solver="unipc", guidance_scale=3.0, has_integer_time=True)
    found = sample_block(net, history, state, noise, sampler, condition=last)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@torch.no_grad()
def test_a_slid_history_is_the_one_of_frames_moved_up() -> None:
    """Dropping the block after frame 0 leaves keys that equal those rotated at the moved positions."""
    net, batch = open_net(replace(CONFIG, layers=1)).eval(), example_of(replace(CONFIG, layers=1)).batch
    start = net.start(batch.text, batch.image)
    first = net.observe(start, batch.latents[:, :1])
    whole = net.observe(net.observe(first, batch.latents[:, 1:3]), batch.latents[:, 3:5]).slid(2)
    direct = net.observe(first, batch.latents[:, 3:5])  # in the first layer keys do not depend on other frames
    assert whole.num_frames == direct.num_frames == 3
    assert whole.past is not None and direct.past is not None
    for a, b in zip(whole.past[0], direct.past[0], strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert whole.num_bytes == direct.num_bytes
    with pytest.raises(ValueError, match="cannot drop 7 of 3 frames"):
        whole.slid(7)


def test_schedules_skip_as_published() -> None:
    for count, wanted in ((8, [0, 1, 2, 6, 10, 13, 14, 15]), (5, [0, 1, 2, 7, 12])):
        skips = StepSkips(SamplerConfig(num_steps=16, num_evaluations=count))
        assert [index for index in range(16) if skips.is_evaluated(index)] == wanted
    skips = StepSkips(SamplerConfig(num_steps=16, has_dynamic_skips=True))
    evaluated = []
    for index in range(16):
        if skips.is_evaluated(index):
            evaluated.append(index)
            skips.evaluated(torch.tensor([[[1.0, 0.0]], [[1.0, 0.38 if index % 2 else 0.0]]]))
    assert evaluated == [0, 1, 4, 7, 10, 13]  # the session that turns most decides: its cosine, 0.935, skips two
    with pytest.raises(InputError, match="no known schedule"):
        SamplerConfig(num_steps=8, num_evaluations=8)


def test_a_video_that_ends_noisy_leaves_the_actions_clean() -> None:
    net, batch = open_net(CONFIG).eval(), example_of(CONFIG).batch
    noise = (torch.randn(2, 2, 4, 4, 6), torch.randn(2, 4, 7))
    asked: list[tuple[float, float]] = []
    plain = net.denoise

    def denoise(*args: Tensor) -> object:
        asked.append((args[4][0].item(), args[5][0].item()))
        return plain(*args)  # pyright: ignore[reportArgumentType]

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(net, "denoise", denoise)
        history = net.observe(net.start(batch.text, batch.image), batch.latents[:, :1])
        sample_block(net, history, batch.state[:, :1], noise, SamplerConfig(num_steps=4, video_end_level=0.8))
    video, actions = zip(*asked, strict=True)
    assert min(video) > 0.8
    assert actions[-1] == pytest.approx(0.62469, abs=1e-5)
    assert video[-1] == pytest.approx(0.8 + 0.2 * actions[-1])


def test_weighting_and_action_weight_change_the_loss_as_named() -> None:
    net, example = open_net(CONFIG), example_of(CONFIG)
    with torch.no_grad():
        plain = flow_loss(net, example)
        heavy = flow_loss(net, example, NoiseConfig(action_weight=4.0))
        flat = flow_loss(net, example, NoiseConfig(weighting="flat"))
    assert heavy.total.item() == pytest.approx((plain.video + 4 * plain.action).item(), rel=1e-5)
    assert flat.video != plain.video
    with pytest.raises(InputError, match=r"weighting is .steep"):
        NoiseConfig(weighting="steep")
