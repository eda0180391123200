"""One action chunk sampled with cached keys and context, against the published procedure at as many evaluations.

    wamlab bench sampling [--quick] [--json]

A network of the 5B's shape (27 M parameters and an image path) in a running session takes in one executed block, then
samples the next with guidance: 8 evaluations over 16 UniPC steps. The published procedure encodes both prompts anew for
every chunk (spec 6.1, step 2): here with a real umT5, random and so small that it has the share of the work that
umT5-xxl has beside the 5B network (9.7 of 45 TFLOP). Video encoding is the same on both sides and left out.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from network import CONFIG  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.nn import functional as F

from wamlab.errors import InputError
from wamlab.lab.table import Table
from wamlab.model.sampler import SamplerConfig, sample_block
from wamlab.model.wam import WorldActionModel
from wamlab.speed.compare import compare
from wamlab.speed.compile import compiled, has_cpp_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from plain_sampling import PlainStream, plain_pass, plain_sample  # pyright: ignore[reportMissingImports]

SAMPLER = SamplerConfig(num_steps=16, num_evaluations=8, solver="unipc", guidance_scale=5.0, has_integer_time=True)
NUM_BLOCKS_SEEN = 2  # before the chunk that is measured
TEXT_DIM, NUM_REAL = 512, (40, 30)  # width of the text encoder; words of the prompt and of the negative one
TEXT_LAYERS = 6


def make_text_encoder() -> Callable[[Tensor], Tensor]:
    """Return a small random umT5: tokens (b, n) to features (b, n, d)."""
    try:
        from transformers import UMT5Config, UMT5EncoderModel
    except ImportError as error:
        raise InputError(f"the text encoder cannot be imported ({error}): run pip install -e '.[wan]'") from error
    config = UMT5Config(
        vocab_size=512, d_model=TEXT_DIM, d_kv=64, num_heads=8, d_ff=1280, num_layers=TEXT_LAYERS, dropout_rate=0.0
    )
    encoder = UMT5EncoderModel(config).eval()

    def encode(tokens: Tensor) -> Tensor:
        return encoder(input_ids=tokens, attention_mask=tokens.ne(0).long()).last_hidden_state * tokens.ne(0)[..., None]

    return encode


@torch.no_grad()
def run(*, is_quick: bool) -> dict[str, Any]:
    """Measure; return the figures and print a table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start_s = time.perf_counter()
    config = replace(CONFIG, text_len=512, text_dim=TEXT_DIM, has_image=True)
    net = WorldActionModel(config).eval()
    for p in net.parameters():  # heads start at zero
        if not p.any():
            torch.nn.init.normal_(p, std=0.02)
    encode = make_text_encoder()
    size = config.latents_per_block
    frames = torch.randn(1, 1 + (NUM_BLOCKS_SEEN + 1) * size, config.latent_channels, 10, 20)
    prompts = [F.pad(torch.randint(1, 512, (1, count)), (0, 512 - count)) for count in NUM_REAL]
    texts = [encode(prompt)[:, : NUM_REAL[0]] for prompt in prompts]
    image = torch.randn(1, 257, config.image_dim)
    state = torch.randn(1, 1, config.max_state_dim)
    noise = (torch.randn_like(frames[:, :size]), torch.randn(1, config.actions_per_block, config.max_action_dim))
    spans = [slice(0, 1)] + [slice(1 + b * size, 1 + (b + 1) * size) for b in range(NUM_BLOCKS_SEEN)]
    newest = frames[:, -size:]

    streams = (PlainStream(texts[0], image), PlainStream(texts[1], image))
    for stream in streams:
        for span in spans:
            plain_pass(net, stream, frames[:, span], None, 0.0)
    held = [(stream.cache, stream.num_frames) for stream in streams]

    def encode_prompts() -> None:
        for stream, prompt in zip(streams, prompts, strict=True):
            stream.text = encode(prompt)

    def network_alone() -> tuple[Tensor, Tensor]:
        for stream, (cache, num_frames) in zip(streams, held, strict=True):
            stream.cache, stream.num_frames = cache, num_frames
            plain_pass(net, stream, newest, None, 0.0)
        return plain_sample(net, streams, state, noise)

    def reference() -> tuple[Tensor, Tensor]:
        encode_prompts()
        return network_alone()

    def cached_by(net: WorldActionModel) -> Callable[[], tuple[Tensor, Tensor]]:
        history = net.start(torch.cat(texts), torch.cat([image, image]))
        for span in spans:
            history = net.observe(history, frames[:, span])

        def cached() -> tuple[Tensor, Tensor]:
            seen = net.observe(history, newest)
            return sample_block(net, seen, state, noise, SAMPLER)

        return cached

    variants = {"reference": reference, "its network alone": network_alone, "wamlab": cached_by(net)}
    if has_cpp_compiler():
        variants["wamlab, compiled"] = cached_by(compiled(copy.deepcopy(net)))  # pyright: ignore[reportArgumentType]
    wanted = reference()
    difference = max(
        ((a - b).abs().max() / b.abs().max()).item()
        for name, call in list(variants.items())[2:]
        for a, b in zip(call(), wanted, strict=True)
    )
    timings = compare(variants, num_rounds=3 if is_quick else 15, budget_s=15 if is_quick else 90)
    print(f"largest difference of the sampled chunk, relative: {difference:.1e}")
    print(Table([timing.row() for timing in timings.values()]))
    alone = timings["its network alone"].seconds
    best = timings[list(variants)[-1]]
    return {
        "speedup_vs_reference": best.row()["speed-up, median"],
        "speedup_vs_reference, eager": timings["wamlab"].row()["speed-up, median"],
        "speedup_vs_reference, network alone": statistics.median(
            base / own for base, own in zip(alone, best.seconds, strict=True)
        ),
        "chunk difference": difference,
        "minutes": (time.perf_counter() - start_s) / 60,
    }


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
