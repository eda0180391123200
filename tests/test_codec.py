"""The embedded encoders: identity, causality, batching, quality floors, determinism."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch

from wamlab.codec.clips import ClipEncoder, TextEncoder, VideoCodec
from wamlab.codec.text import HashTextConfig, HashTextEncoder, split_words, word_vector
from wamlab.codec.video import DctCodec, DctConfig
from wamlab.errors import InputError
from wamlab.sim.experts import play_episodes
from wamlab.types import Clip, Encode


def psnr_db(first: torch.Tensor, second: torch.Tensor) -> float:
    return -10 * (((first.double() - second.double()) / 255) ** 2).mean().log10().item()


def tabletop(size: int) -> torch.Tensor:
    """Return clips [b 17 size size 3] of both cameras of some expert episodes."""
    episodes = play_episodes(("reach", "push", "pick_place", "stack"), 8, seed=5, size=size)
    clips = [video[:17] for episode in episodes for video in episode.frames.values() if len(video) >= 17]
    return torch.from_numpy(np.stack(clips))


def noise_clips(num_frames: int = 9) -> torch.Tensor:
    return torch.randint(0, 256, (3, num_frames, 16, 24, 3), dtype=torch.uint8)


@pytest.mark.parametrize(("size", "channels"), [(96, 48), (64, 64)])
def test_decoding_an_encoded_clip_returns_tabletop_video(size: int, channels: int) -> None:
    codec, clips = DctCodec(DctConfig(channels=channels)), tabletop(size)
    latents = codec.encode(clips)
    assert latents.shape == (len(clips), *codec.latent_shape(17, size, size))
    assert psnr_db(codec.decode(latents), clips) >= 27


@pytest.mark.parametrize("spacing", [1, 3])
def test_decoding_an_encoded_clip_returns_robot_video(shared: Path, spacing: int) -> None:
    for path in sorted((shared / "data" / "droid_clip").glob("*.mp4")):
        with av.open(str(path)) as container:
            frames = [frame.to_ndarray(format="rgb24")[:176] for frame in container.decode(video=0)]
        clip = torch.from_numpy(np.stack(frames[::spacing][:129]))[None]
        codec = DctCodec()
        assert psnr_db(codec.decode(codec.encode(clip)), clip) >= 25, path.name


def test_latents_have_about_unit_variance() -> None:
    latents = DctCodec().encode(tabletop(64)).movedim(2, -1).flatten(0, -2)
    assert 0.7 < latents.var(0).mean() < 1.5
    assert latents.mean(0).abs().max() < 1


def test_later_frames_never_change_earlier_latents() -> None:
    codec, clips = DctCodec(), noise_clips()
    changed = clips.clone()
    changed[:, 5:] = 255 - changed[:, 5:]
    first, second = codec.encode(clips), codec.encode(changed)
    assert torch.equal(first[:, :2], second[:, :2])
    assert not torch.equal(first[:, 2], second[:, 2])


def test_a_batch_is_encoded_like_its_clips_one_by_one() -> None:
    codec, clips = DctCodec(), noise_clips()
    single = torch.cat([codec.encode(clip[None]) for clip in clips])
    assert torch.allclose(codec.encode(clips), single, atol=1e-5)


def test_a_still_scene_looks_the_same_in_both_kinds_of_latent() -> None:
    """Channels that are constant in time mean the same in the first latent; the moving ones are silent."""
    config = DctConfig()
    codec = DctCodec(config)
    still = noise_clips(1).expand(-1, 5, -1, -1, -1)
    latents = codec.encode(still)
    shared_channels = [i for i, (time, *_) in enumerate(_kept(config)) if time == 0]
    moving = [i for i, (time, *_) in enumerate(_kept(config)) if time > 0]
    assert torch.allclose(latents[:, 0, shared_channels], latents[:, 1, shared_channels], atol=1e-4)
    grey = codec.encode(torch.full((1, 5, 16, 24, 3), 127, dtype=torch.uint8))
    assert torch.allclose(latents[:, 1, moving], grey[:, 1, moving].expand(3, -1, -1, -1), atol=1e-4)


def _kept(config: DctConfig) -> list[list[int]]:
    from wamlab.codec.video import read_constants

    return read_constants()[str(config.spatial_stride)]["kept"][: config.channels]


@pytest.mark.parametrize("config", [DctConfig(8, 1), DctConfig(8, 128), DctConfig(16, 48)])
def test_encoding_a_decoded_latent_returns_it(config: DctConfig) -> None:
    """The kept coefficients are orthonormal: small latents survive the round trip but for rounding to bytes.

    Rounding moves each of a patch's values by half a level at most, so a coefficient by sqrt(values) times that.
    """
    codec = DctCodec(config)
    latents = 0.1 * torch.randn(2, *codec.latent_shape(5, 32, 32))
    again = codec.encode(codec.decode(latents))
    scale = torch.minimum(codec._first.synthesis.norm(dim=1), codec._later.synthesis.norm(dim=1))
    bound = (4 * config.spatial_stride**2 * 3) ** 0.5 * 0.5 / 127.5
    assert ((again - latents).abs().amax(dim=(0, 1, 3, 4)) * scale).max() < bound + 1e-4


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 6, 16, 16), "6 frames cannot be encoded: give 1"), ((1, 5, 20, 16), "20 x 16 px do not divide")],
)
def test_clips_of_the_wrong_size_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DctCodec().encode(torch.zeros(*shape, 3, dtype=torch.uint8))


@pytest.mark.parametrize(("stride", "channels"), [(4, 16), (8, 0), (8, 129)])
def test_unknown_codecs_are_refused(stride: int, channels: int) -> None:
    with pytest.raises(InputError, match="is not a codec: use 8 with up to 128"):
        DctConfig(stride, channels)


def test_words_have_the_same_vectors_on_every_machine() -> None:
    assert word_vector("red", 4).tolist() == pytest.approx([-0.6862923, -0.4029691, -0.1721347, -1.5617926], abs=1e-6)
    vectors = np.stack([word_vector(f"word{i}", 64) for i in range(200)])
    assert abs(vectors.mean()) < 0.02
    assert 0.97 < vectors.var() < 1.03
    assert abs(np.corrcoef(vectors)[np.triu_indices(200, 1)]).mean() < 0.15


def test_words_are_split_from_punctuation_and_case() -> None:
    assert split_words("  Push the RED disc, now! ") == ["push", "the", "red", "disc", ",", "now", "!"]


def test_word_order_matters() -> None:
    first, second = HashTextEncoder().encode(["red on blue", "blue on red"])
    assert not torch.allclose(first, second)
    assert torch.allclose(first[1], second[1])


def test_an_instruction_is_encoded_once() -> None:
    encoder = HashTextEncoder(HashTextConfig(dim=8, max_tokens=4))
    for _ in range(3):
        features = encoder.encode(["go left", "go right", "go left"])
    assert encoder.num_encoded == 2
    assert features.shape == (3, 2, 8)  # places that no instruction reaches are left to the network
    assert not features[:, 2:].any()


def test_a_long_instruction_is_cut_with_one_warning() -> None:
    encoder = HashTextEncoder(HashTextConfig(dim=8, max_tokens=2))
    with pytest.warns(UserWarning, match="has 3 words; only 2"):
        features = encoder.encode(["one two three"])
    assert torch.equal(encoder.encode(["one two three"]), features)


def clip(frames: np.ndarray, instruction: str = "go") -> Clip:
    return Clip(
        frames=frames, actions=np.ones((4, 3), np.float32), action_mask=np.ones((4, 3), bool),
        state=np.zeros((1, 2), np.float32), instruction=instruction, episode=0, first_row=0,
    )  # fmt: skip


def test_clips_become_a_batch_with_the_first_frame_as_condition() -> None:
    encoder = ClipEncoder(DctCodec(), HashTextEncoder(), condition="grey")
    frames = noise_clips(5)
    batch = encoder([clip(f.numpy()) for f in frames])
    assert batch.latents.shape == (3, 2, 48, 2, 3)
    assert batch.condition is not None
    assert batch.condition.shape == (3, 2, 52, 2, 3)
    assert batch.condition[:, 0, :4].eq(1).all()
    assert batch.condition[:, 1, :4].eq(0).all()
    assert torch.allclose(batch.condition[:, :1, 4:], batch.latents[:, :1], atol=1e-5)
    assert torch.equal(batch.condition[0, 1, 4:], batch.condition[1, 1, 4:])  # grey has no content
    first, condition = encoder.encode_first(frames[:, 0], 5)
    assert torch.allclose(first, batch.latents[:, :1], atol=1e-5)
    assert condition is not None
    assert torch.equal(condition, batch.condition)


def test_a_repeated_condition_shows_the_first_frame_everywhere() -> None:
    encoder = ClipEncoder(DctCodec(), HashTextEncoder(), condition="repeat")
    frames = noise_clips(5)
    _, condition = encoder.encode_first(frames[:, 0], 5)
    still = encoder.video.encode(frames[:, :1].expand(-1, 5, -1, -1, -1))
    assert condition is not None
    assert torch.allclose(condition[:, :, 4:], still, atol=1e-5)
    with pytest.raises(InputError, match="give one of none, grey, repeat"):
        ClipEncoder(DctCodec(), HashTextEncoder(), condition="gray")


def test_clips_of_different_shapes_do_not_mix() -> None:
    encoder = ClipEncoder(DctCodec(), HashTextEncoder())
    with pytest.raises(InputError, match="differ in"):
        encoder([clip(noise_clips(5)[0].numpy()), clip(noise_clips(9)[0].numpy())])


def test_the_embedded_encoders_fit_their_seams() -> None:
    assert isinstance(DctCodec(), VideoCodec)
    assert isinstance(HashTextEncoder(), TextEncoder)
    assert isinstance(ClipEncoder(DctCodec(), HashTextEncoder()), Encode)


def test_every_tabletop_instruction_fits() -> None:
    for episode in play_episodes(("reach", "push", "pick_place", "stack"), 24, seed=1, size=32):
        assert len(split_words(episode.instruction)) <= HashTextConfig().max_tokens


def test_encoders_compute_on_the_device_they_are_given() -> None:
    encoder = ClipEncoder(DctCodec(DctConfig(), "meta"), HashTextEncoder(), device="meta")
    latents, _ = encoder.encode_first(noise_clips(1)[:, 0], 1)
    assert latents.device.type == "meta"


def test_fingerprints_tell_codecs_apart() -> None:
    assert DctCodec().fingerprint == DctCodec().fingerprint
    assert DctCodec().fingerprint != DctCodec(DctConfig(channels=32)).fingerprint
