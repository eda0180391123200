"""One action chunk sampled with cached keys and context, against the published procedure at as many evaluations.

    wamlab bench sampling [--quick] [--json]

A network of the 5B's shape (27.8 M parameters and an image path) in a running session: it takes in one executed block,
then samples the next with guidance, 8 evaluations over 16 UniPC steps. Text (512 positions, 40 and 30 of them real) and
image features are given; encoding them anew for every chunk, as the reference does, is not counted against it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from network import CONFIG  # pyright: ignore[reportMissingImports]
from torch import Tensor

from wamlab.lab.table import Table
from wamlab.model.kv_cache import History
from wamlab.model.sampler import SamplerConfig, sample_block
from wamlab.model.wam import WorldActionModel
from wamlab.speed.compare import compare

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from plain_sampling import PlainStream, plain_pass, plain_sample  # pyright: ignore[reportMissingImports]

NUM_BLOCKS_SEEN = 2  # before the chunk that is measured


@torch.no_grad()
def run(*, is_quick: bool) -> dict[str, Any]:
    """Measure; return the figures and print a table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start_s = time.perf_counter()
    config = replace(CONFIG, text_len=512, has_image=True)
    net = WorldActionModel(config).eval()
    for p in net.parameters():  # heads start at zero
        if not p.any():
            torch.nn.init.normal_(p, std=0.02)
    size = config.latents_per_block
    frames = torch.randn(1, 1 + (NUM_BLOCKS_SEEN + 1) * size, config.latent_channels, 10, 20)
    texts = [torch.randn(1, count, config.text_dim) for count in (40, 30)]
    image = torch.randn(1, 257, config.image_dim)
    state = torch.randn(1, 1, config.max_state_dim)
    noise = (torch.randn_like(frames[:, :size]), torch.randn(1, config.actions_per_block, config.max_action_dim))
    spans = [slice(0, 1)] + [slice(1 + b * size, 1 + (b + 1) * size) for b in range(NUM_BLOCKS_SEEN)]
    newest = frames[:, -size:]

    streams = tuple(PlainStream(text, image) for text in texts)
    for stream in streams:
        for span in spans:
            plain_pass(net, stream, frames[:, span], None, 0.0)
    held = [(stream.cache, stream.num_frames) for stream in streams]

    def reference() -> tuple[Tensor, Tensor]:
        for stream, (cache, num_frames) in zip(streams, held, strict=True):
            stream.cache, stream.num_frames = cache, num_frames
            plain_pass(net, stream, newest, None, 0.0)
        return plain_sample(net, streams, state, noise)  # pyright: ignore[reportArgumentType]

    padded = torch.cat([torch.nn.functional.pad(t, (0, 0, 0, 40 - t.shape[1])) for t in texts])
    history: History = net.start(padded, torch.cat([image, image]))
    for span in spans:
        history = net.observe(history, torch.cat([frames[:, span]] * 2))
    sampler = SamplerConfig(num_steps=16, num_evaluations=8, solver="unipc", guidance_scale=5.0, has_integer_time=True)

    def cached() -> tuple[Tensor, Tensor]:
        seen = net.observe(history, torch.cat([newest, newest]))
        return sample_block(net, seen, state, noise, sampler)

    difference = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(cached(), reference(), strict=True))
    timings = compare(
        {"reference": reference, "wamlab": cached}, num_rounds=5 if is_quick else 15, budget_s=20 if is_quick else 90
    )
    print(f"largest difference of the sampled chunk, relative: {difference:.1e}")
    print(Table([timing.row() for timing in timings.values()]))
    return {
        "speedup_vs_reference": timings["wamlab"].row()["speed-up, median"],
        "chunk difference": difference,
        "minutes": (time.perf_counter() - start_s) / 60,
    }


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
