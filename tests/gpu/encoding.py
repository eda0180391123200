"""Frozen encoders: clips a second of the Wan 2.2 autoencoder at its published size, with random weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from training import backend_of, finish, release  # pyright: ignore[reportMissingImports]

from wamlab.codec.wan_vae import VERSIONS, WanVideoCodec
from wamlab.speed.compile import compiled_encoder

TINY = {"base_dim": 4, "z_dim": 2, "latents_mean": [0.3, -0.2], "latents_std": [1.5, 0.7], "decoder_base_dim": 8}


def encoders(device: torch.device) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield measurements of encoding clips as DreamZero's 5 B sees them: 33 frames of 160 x 320 px."""
    import diffusers  # an extra: it may be missing

    is_tiny = device.type != "cuda"
    shape = (5, 32, 32, 3) if is_tiny else (33, 160, 320, 3)
    config = VERSIONS["2.2"] | (TINY if is_tiny else {})

    def measure(size: int, is_compiled: bool) -> dict[str, Any]:
        release()
        torch.manual_seed(0)
        with torch.device(device):
            vae: Any = diffusers.AutoencoderKLWan(**config)  # pyright: ignore[reportPrivateImportUsage]
        codec = WanVideoCodec(vae, device=device, memory_gib=40)
        if is_compiled:
            compiled_encoder(codec.vae.encoder, is_strict=True, backend=backend_of(device))
        clips = torch.randint(0, 256, (size, *shape), dtype=torch.uint8, device=device)
        start_s = time.perf_counter()
        codec.encode(clips)
        finish(device)
        first_s, seconds = time.perf_counter() - start_s, []
        for _ in range(3):
            start_s = time.perf_counter()
            codec.encode(clips)
            finish(device)
            seconds.append(time.perf_counter() - start_s)
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        return {"clips_per_s": size / statistics.median(seconds), "first_call_s": first_s, "peak_gib": peak}

    cases = [(1, False)] if is_tiny else [(1, False), (8, False), (32, False), (8, True)]
    for size, is_compiled in cases:
        name = f"Wan 2.2 VAE, {size} at once" + (", compiled" if is_compiled else "")
        yield name, lambda size=size, is_compiled=is_compiled: measure(size, is_compiled)
