"""The frozen encoders of Wan, with the real libraries at tiny random size, against native layouts computed by hand."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from wamlab.codec import clip_image, umt5, wan_vae
from wamlab.codec.clip_image import (
    CLIP_VIT_H,
    ClipImageEncoder,
    clip_sources,
    empty_clip,
    load_native_clip,
    read_clip,
)
from wamlab.codec.clips import TextEncoder, VideoCodec
from wamlab.codec.native_weights import import_library, load_native, read_tensors, to_native
from wamlab.codec.umt5 import UMT5_XXL, Umt5TextEncoder, clean_text, empty_umt5, load_native_umt5, umt5_sources
from wamlab.codec.umt5 import read_umt5 as read_text_encoder
from wamlab.codec.wan_vae import (
    VERSIONS,
    WanVideoCodec,
    empty_wan_vae,
    load_native_wan_vae,
    read_wan_vae,
    wan_vae_sources,
)
from wamlab.errors import InputError

diffusers = pytest.importorskip("diffusers", reason="the extra wan is not installed")
transformers = pytest.importorskip("transformers", reason="the extra wan is not installed")
pytest.importorskip("ftfy", reason="the extra wan is not installed")

TINY_VAE = {"base_dim": 4, "z_dim": 2, "latents_mean": [0.3, -0.2], "latents_std": [1.5, 0.7]}
TINY_UMT5 = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 3}
TINY_CLIP = CLIP_VIT_H | {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
}  # fmt: skip
WORDS = ["pick", "up", "the", "red", "cube", "and", "put", "it", "in", "a", "box"]
both_versions = pytest.mark.parametrize("version", ["2.1", "2.2"])


def randomised(module: Any) -> Any:
    """Return the module with every tensor random, so that none can be mistaken for another."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / max(1, parameter[0].numel()) ** 0.5)
    return module


def tiny_vae(version: str) -> Any:
    later = {"decoder_base_dim": 8} if version == "2.2" else {}
    return randomised(diffusers.AutoencoderKLWan(**(VERSIONS[version] | TINY_VAE | later)))


def tiny_umt5() -> Any:
    return randomised(transformers.UMT5EncoderModel(transformers.UMT5Config(**TINY_UMT5)))


def tiny_clip() -> Any:
    return randomised(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TINY_CLIP)))


def tiny_tokenizer() -> Any:
    tokenizers = import_library("tokenizers")
    places = {token: place for place, token in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(places, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", places["</s>"])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def random_frames(*shape: int) -> Tensor:
    return torch.randint(0, 256, (*shape, 3), dtype=torch.uint8)


# ---- video


def native_encoding(vae: Any, tensors: dict[str, Tensor], video: Tensor) -> Tensor:
    """Encode video [b c t h w] at once, not group by group, from native tensors (spec 3, 8.2)."""

    def conv(name: str, x: Tensor, padding: int = 1) -> Tensor:
        x = F.pad(x, (padding,) * 4 + (2 * padding, 0))
        return F.conv3d(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * x.shape[1] ** 0.5 * tensors[f"{name}.gamma"].flatten()[:, None, None, None]

    def residual(name: str, x: Tensor) -> Tensor:
        skip = conv(f"{name}.shortcut", x, 0) if f"{name}.shortcut.weight" in tensors else x
        x = conv(f"{name}.residual.2", F.silu(norm(f"{name}.residual.0", x)))
        return skip + conv(f"{name}.residual.6", F.silu(norm(f"{name}.residual.3", x)))

    def resample(name: str, x: Tensor) -> Tensor:
        weight = tensors[f"{name}.resample.1.weight"]
        x = F.pad(x, (0, 1, 0, 1))
        x = F.conv3d(x, weight[:, :, None], tensors[f"{name}.resample.1.bias"], stride=(1, 2, 2))
        if f"{name}.time_conv.weight" in tensors:  # the first frame stays as it is
            pairs = F.conv3d(
                x, tensors[f"{name}.time_conv.weight"], tensors[f"{name}.time_conv.bias"], stride=(2, 1, 1)
            )
            x = torch.cat([x[:, :, :1], pairs], dim=2)
        return x

    def attend(name: str, x: Tensor) -> Tensor:
        cells = norm(f"{name}.norm", x).movedim(1, -1).flatten(2, 3)  # b t (h w) c
        weight, bias = tensors[f"{name}.to_qkv.weight"][..., 0, 0], tensors[f"{name}.to_qkv.bias"]
        query, key, value = (cells @ weight.T + bias).chunk(3, dim=-1)
        mixed = (query @ key.transpose(-1, -2) / x.shape[1] ** 0.5).softmax(dim=-1) @ value
        mixed = mixed @ tensors[f"{name}.proj.weight"][..., 0, 0].T + tensors[f"{name}.proj.bias"]
        return x + mixed.unflatten(2, x.shape[-2:]).movedim(-1, 1)

    def block(name: str, x: Tensor) -> Tensor:
        return residual(name, x) if f"{name}.residual.2.weight" in tensors else resample(name, x)

    if vae.config.patch_size:  # (c r q): channel, place along the width, place along the height
        video = torch.stack([video[..., q::2, r::2] for r in range(2) for q in range(2)], dim=2).flatten(1, 2)
    x = conv("encoder.conv1", video)
    for stage in range(4 if vae.config.is_residual else 11):
        name = f"encoder.downsamples.{stage}"
        if vae.config.is_residual:
            skip = vae.encoder.down_blocks[stage].avg_shortcut(x)  # has no weights
            for place in range(3 if stage < 3 else 2):
                x = block(f"{name}.downsamples.{place}", x)
            x = x + skip
        else:
            x = block(name, x)
    x = residual("encoder.middle.2", attend("encoder.middle.1", residual("encoder.middle.0", x)))
    x = conv("encoder.head.2", F.silu(norm("encoder.head.0", x)))
    means = conv("conv1", x, 0)[:, : vae.config.z_dim]
    mean, std = (torch.tensor(vae.config[f"latents_{kind}"])[:, None, None, None] for kind in ("mean", "std"))
    return ((means - mean) / std).movedim(1, 2)


@both_versions
def test_chunked_encoding_equals_the_native_layout_computed_at_once(version: str) -> None:
    vae = tiny_vae(version)
    codec = WanVideoCodec(vae)
    frames = random_frames(2, 13, 32, 48)
    video = frames.float().movedim(-1, 1) / 127.5 - 1
    with torch.no_grad():
        expected = native_encoding(vae, to_native(vae, wan_vae_sources(vae)), video)
    torch.testing.assert_close(codec.encode(frames), expected, rtol=1e-4, atol=1e-5)


@both_versions
def test_video_shapes_and_batching(version: str) -> None:
    codec = WanVideoCodec(tiny_vae(version))
    assert isinstance(codec, VideoCodec)
    frames = random_frames(3, 9, 32, 64)
    latents = codec.encode(frames)
    assert latents.shape[1:] == codec.latent_shape(9, 32, 64) == (3, 2, 32 // codec.stride, 64 // codec.stride)
    assert codec.stride == {"2.1": 8, "2.2": 16}[version]
    video = codec.decode_video(latents)
    assert video.shape == (3, 9, 32, 64, 3)
    assert latents.dtype == video.dtype == torch.float32
    assert video.abs().max() <= 1 and video.std() > 0
    small = WanVideoCodec(codec.vae, memory_gib=0.0)
    assert small.num_clips_at_once(32, 64) == 1 < codec.num_clips_at_once(32, 64)
    torch.testing.assert_close(small.encode(frames), latents, rtol=0, atol=1e-5)
    torch.testing.assert_close(small.decode_video(latents), video, rtol=0, atol=1e-5)
    torch.testing.assert_close(codec.encode_video(frames / 127.5 - 1), latents, rtol=0, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in codec.vae.parameters())


def test_no_latent_looks_ahead() -> None:
    codec = WanVideoCodec(tiny_vae("2.2"))
    frames = random_frames(1, 13, 32, 32)
    torch.testing.assert_close(codec.encode(frames[:, :5]), codec.encode(frames)[:, :2], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("shape", "reason"), [((1, 8, 32, 32), "multiple of 4"), ((1, 5, 32, 24), "divide by 16")])
def test_clips_that_do_not_divide_are_refused(shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        WanVideoCodec(tiny_vae("2.2")).encode(random_frames(*shape))


def test_memory_estimate_splits_batches_of_the_published_autoencoders() -> None:
    sizes = {}
    for version in VERSIONS:
        codec = WanVideoCodec(empty_wan_vae(version), device="meta", dtype=torch.bfloat16, memory_gib=40)
        sizes[version] = [codec.num_clips_at_once(352, 640, is_decoding=value) for value in (False, True)]
    assert sizes == {"2.1": [18, 11], "2.2": [43, 16]}


@both_versions
def test_bfloat16_stays_near_float32_and_changes_the_fingerprint(version: str) -> None:
    vae, frames = tiny_vae(version), random_frames(1, 5, 32, 32)
    exact = WanVideoCodec(vae)
    latents, fingerprint = exact.encode(frames), exact.fingerprint
    rough = WanVideoCodec(vae, dtype=torch.bfloat16)
    assert (rough.encode(frames) - latents).abs().mean() < 0.05 * latents.std()
    assert rough.fingerprint != fingerprint != WanVideoCodec(randomised(vae.float())).fingerprint


def test_compiled_equals_eager() -> None:
    frames, vae = random_frames(2, 13, 16, 16), tiny_vae("2.1")
    latents = WanVideoCodec(vae).encode(frames)
    compiled = WanVideoCodec(vae, compile_backend="eager")
    torch.testing.assert_close(compiled.encode(frames), latents, rtol=0, atol=1e-5)


def test_keys_of_2_1_agree_with_the_conversion_of_the_library() -> None:
    convert = import_library("diffusers.loaders.single_file_utils").convert_wan_vae_to_diffusers
    vae = empty_wan_vae("2.1")
    native = {source.key: key for key, source in wan_vae_sources(vae).items()}
    assert len(native) == len(vae.state_dict()) == 194
    assert convert({key: key for key in native}) == {library: key for key, library in native.items()}


def test_keys_of_2_2_are_nested() -> None:
    vae = empty_wan_vae("2.2")
    native = {source.key: (key, source.shape) for key, source in wan_vae_sources(vae).items()}
    assert len(native) == len(vae.state_dict()) == 196
    assert native["encoder.conv1.weight"] == ("encoder.conv_in.weight", (160, 12, 3, 3, 3))
    for key, library in {
        "encoder.downsamples.1.downsamples.0.shortcut.weight": "encoder.down_blocks.1.resnets.0.conv_shortcut.weight",
        "encoder.downsamples.2.downsamples.2.time_conv.bias": "encoder.down_blocks.2.downsampler.time_conv.bias",
        "encoder.downsamples.3.downsamples.1.residual.6.bias": "encoder.down_blocks.3.resnets.1.conv2.bias",
        "decoder.upsamples.0.upsamples.3.resample.1.weight": "decoder.up_blocks.0.upsampler.resample.1.weight",
        "decoder.upsamples.3.upsamples.2.residual.3.gamma": "decoder.up_blocks.3.resnets.2.norm2.gamma",
        "decoder.head.2.weight": "decoder.conv_out.weight",
    }.items():
        assert native[key][0] == library


# ---- text


def test_text_batched_equals_one_by_one_and_each_instruction_is_encoded_once() -> None:
    model, tokenizer = tiny_umt5(), tiny_tokenizer()
    encoder = Umt5TextEncoder(model, tokenizer)
    assert isinstance(encoder, TextEncoder)
    texts = ["pick up the red cube", "box", "pick up the red cube", "put  it in a\n box"]
    features = encoder.encode(texts)
    assert features.shape == (4, 6, 16)
    assert encoder.num_encoded == 3
    assert torch.equal(encoder.encode(texts[:1]), features[:1])
    assert encoder.num_encoded == 3
    for text, row, length in zip(texts, features, [6, 2, 6, 6], strict=True):
        alone = Umt5TextEncoder(model, tokenizer).encode([text])
        torch.testing.assert_close(row[None, :length], alone, rtol=0, atol=1e-5)
        assert not row[length:].any()
    with pytest.warns(UserWarning, match="only 4 tokens"):
        assert Umt5TextEncoder(model, tokenizer, max_tokens=4).encode(texts).shape[1] == 4


def test_text_is_cleaned_as_wan_does() -> None:
    assert clean_text("  put&amp;lt;1&amp;gt;\tcup \n schÃ¶n ") == "put<1> cup schön"


def test_umt5_equals_the_native_layout_computed_by_hand() -> None:
    model = tiny_umt5()
    tensors = to_native(model, umt5_sources(model))
    tokens = torch.tensor([[3, 4, 5, 6, 1]])

    def norm(name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * tensors[f"{name}.weight"]

    def heads(name: str, x: Tensor) -> Tensor:
        return (x @ tensors[f"{name}.weight"].T).unflatten(-1, (3, 4)).transpose(1, 2)

    x = tensors["token_embedding.weight"][tokens]
    distance = torch.arange(5)[None] - torch.arange(5)[:, None]  # key minus query; exact buckets below 8
    bucket = distance.abs() + 16 * (distance > 0)
    for block in ("blocks.0", "blocks.1"):
        y = norm(f"{block}.norm1", x)
        query, key, value = (heads(f"{block}.attn.{kind}", y) for kind in "qkv")
        bias = tensors[f"{block}.pos_embedding.embedding.weight"][bucket].movedim(-1, 0)
        mixed = ((query @ key.transpose(-1, -2) + bias).softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + mixed @ tensors[f"{block}.attn.o.weight"].T
        y = norm(f"{block}.norm2", x)
        gate = F.gelu(y @ tensors[f"{block}.ffn.gate.0.weight"].T, approximate="tanh")
        x = x + (gate * (y @ tensors[f"{block}.ffn.fc1.weight"].T)) @ tensors[f"{block}.ffn.fc2.weight"].T
    with torch.no_grad():
        features = model.eval()(input_ids=tokens).last_hidden_state
        torch.testing.assert_close(features, norm("norm", x), rtol=1e-4, atol=1e-5)


def test_umt5_xxl_has_242_tensors() -> None:
    model = empty_umt5()
    native = {source.key: source.shape for source in umt5_sources(model).values()}
    assert len(native) == 242
    assert native["token_embedding.weight"] == (256384, 4096)
    assert native["blocks.23.ffn.fc1.weight"] == (10240, 4096)
    assert native["blocks.0.pos_embedding.embedding.weight"] == (32, UMT5_XXL["num_heads"])


# ---- image


def native_clip(model: Any) -> dict[str, Tensor]:
    """Return a whole native checkpoint, with what the image tower has no place for."""
    return to_native(model, clip_sources(model)) | {
        "visual.head": torch.randn(16, 8), "log_scale": torch.tensor(4.6), "textual.norm.weight": torch.ones(3),
    }  # fmt: skip


def test_image_tokens_equal_the_native_layout_computed_by_hand() -> None:
    model = tiny_clip()
    tensors = {key.removeprefix("visual."): tensor for key, tensor in native_clip(model).items()}
    frames = random_frames(3, 20, 50)
    encoder = ClipImageEncoder(model)
    features = encoder.encode(frames)
    assert features.shape == (3, 5, 16)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps=1e-5)

    x = F.conv2d(encoder.pixels_of(frames), tensors["patch_embedding.weight"], stride=14).flatten(2).transpose(1, 2)
    x = torch.cat([tensors["cls_embedding"].expand(3, -1, -1), x], dim=1) + tensors["pos_embedding"]
    x = norm("pre_norm", x)
    for block in ("transformer.0", "transformer.1"):  # two of three
        fused = linear(f"{block}.attn.to_qkv", norm(f"{block}.norm1", x))
        query, key, value = fused.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)  # of 2 heads of width 8
        mixed = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1) @ value
        x = x + linear(f"{block}.attn.proj", mixed.transpose(1, 2).flatten(2))
        x = x + linear(f"{block}.mlp.2", F.gelu(linear(f"{block}.mlp.0", norm(f"{block}.norm2", x))))
    torch.testing.assert_close(features, x.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features[1:2], encoder.encode(frames[1:2]), rtol=0, atol=1e-5)
    assert torch.equal(ClipImageEncoder(model).encode(frames), features)  # the last block is dropped once


def test_pixels_are_normalised_as_clip_was_trained() -> None:
    pixels = ClipImageEncoder(tiny_clip()).pixels_of(torch.full((1, 30, 90, 3), 255, dtype=torch.uint8))
    assert pixels.shape == (1, 3, 28, 28)
    torch.testing.assert_close(pixels[0, :, 0, 0], torch.tensor([1.93033625, 2.07488384, 2.14589699]))


def test_clip_vit_h_has_393_tensors() -> None:
    model = empty_clip()
    native = {source.key: source.shape for source in clip_sources(model).values()}
    assert len(native) + len(["visual.head", "log_scale"]) == 393
    assert native["visual.transformer.31.attn.to_qkv.weight"] == (3840, 1280)
    assert native["visual.pos_embedding"] == (1, 257, 1280)


# ---- native checkpoints


def cases() -> list[Any]:
    """Return (whole tiny module, its sources, loader) of each encoder."""
    return [
        pytest.param(lambda: tiny_vae("2.1"), wan_vae_sources, load_native_wan_vae, id="vae 2.1"),
        pytest.param(lambda: tiny_vae("2.2"), wan_vae_sources, load_native_wan_vae, id="vae 2.2"),
        pytest.param(tiny_umt5, umt5_sources, load_native_umt5, id="umt5"),
        pytest.param(tiny_clip, clip_sources, load_native_clip, id="clip"),
    ]


@pytest.mark.parametrize(("build", "sources", "load"), cases())
def test_native_tensors_make_the_round_trip(
    build: Callable[[], Any], sources: Callable[[Any], Any], load: Callable[[Any, dict[str, Tensor]], None]
) -> None:
    first, second = build(), build()
    native = to_native(first, sources(first))
    load(second, native)
    assert all(torch.equal(tensor, second.state_dict()[key]) for key, tensor in first.state_dict().items())
    again = to_native(second, sources(second))
    assert again.keys() == native.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in native.items())


@pytest.mark.parametrize(("build", "sources", "load"), cases())
def test_keys_that_do_not_fit_are_named(
    build: Callable[[], Any], sources: Callable[[Any], Any], load: Callable[[Any, dict[str, Tensor]], None]
) -> None:
    module = build()
    native = to_native(module, sources(module))
    first, second = list(native)[:2]
    native["blocks.99.norm1.gamma"] = native.pop(first)
    native[second] = native[second][..., None]
    with pytest.raises(InputError) as raised:
        load(module, native)
    for part in (f"missing: {first};", "extra: blocks.99.norm1.gamma;", f"misshapen: {second} ["):
        assert part in str(raised.value)


def test_encoders_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vae, text, image = tiny_vae("2.2"), tiny_umt5(), tiny_clip()
    monkeypatch.setitem(VERSIONS, "2.2", VERSIONS["2.2"] | TINY_VAE | {"decoder_base_dim": 8})
    parts = {
        "action_head.vae.model.": to_native(vae, wan_vae_sources(vae)),
        "action_head.text_encoder.": to_native(text, umt5_sources(text)),
        "action_head.image_encoder.model.": native_clip(image),
    }
    tiny_tokenizer().save_pretrained(str(tmp_path / "words"))
    for i, (prefix, tensors) in enumerate(parts.items()):  # one shard each
        save_file({prefix + key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / f"{i}.safetensors")
    video, words, pixels = random_frames(1, 5, 32, 32), ["red cube"], random_frames(1, 9, 9)
    codec = read_wan_vae(tmp_path, "2.2", prefix=wan_vae.DREAMZERO_PREFIX)
    assert torch.equal(codec.encode(video), WanVideoCodec(vae).encode(video))
    encoder = read_text_encoder(tmp_path, tmp_path / "words", prefix=umt5.DREAMZERO_PREFIX, config=TINY_UMT5)
    assert torch.equal(encoder.encode(words), Umt5TextEncoder(text, tiny_tokenizer()).encode(words))
    assert encoder.model.encoder.embed_tokens.weight is encoder.model.shared.weight
    images = read_clip(tmp_path, prefix=clip_image.DREAMZERO_PREFIX, config=TINY_CLIP)
    assert torch.equal(images.encode(pixels), ClipImageEncoder(image).encode(pixels))
    torch.save(parts["action_head.vae.model."], tmp_path / "vae.pth")
    assert read_wan_vae(tmp_path / "vae.pth").fingerprint == codec.fingerprint


def test_checkpoints_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint at"):
        read_tensors(tmp_path / "absent.pth")
    for name in ("bad.pth", "bad.safetensors"):
        (tmp_path / name).write_bytes(b"not a checkpoint")
        with pytest.raises(InputError, match="cannot be read"):
            read_tensors(tmp_path / name)
    torch.save({"epoch": 3}, tmp_path / "more.pth")
    with pytest.raises(InputError, match="more than named tensors"):
        read_tensors(tmp_path / "more.pth")
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(InputError, match="no tensor whose key begins"):
        read_tensors(tmp_path / "other.pth", "action_head.")
    with pytest.raises(InputError, match='no Wan autoencoder "3"'):
        empty_wan_vae("3")
    with pytest.raises(InputError, match="no tokenizer folder"):
        read_text_encoder(tmp_path / "other.pth", tmp_path / "absent", config=TINY_UMT5)
    with pytest.raises(InputError, match="20 more"):
        load_native(torch.nn.Linear(1, 1), {f"key{i}": torch.ones(1) for i in range(30)}, {})


def test_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[wan\]'"):
        empty_wan_vae("2.1")


def test_importing_the_encoders_imports_none_of_the_libraries() -> None:
    code = (
        "import sys, wamlab.codec.wan_vae, wamlab.codec.umt5, wamlab.codec.clip_image; "
        "sys.exit(bool({'diffusers', 'transformers', 'ftfy'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_test_extra_holds_the_whole_wan_extra() -> None:
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(extras["wan"]) <= set(extras["test"])
