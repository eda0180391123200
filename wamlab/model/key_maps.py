"""The names of one network's tensors in each published layout, as explicit two-way maps (spec 8).

``wamlab`` and ``wan`` use the same names; a ``wan`` checkpoint is one without action modules. ``dreamzero`` is a bundle
that holds the frozen encoders beside the network. ``diffusers`` renames the modules of Wan; action modules, which it
does not have, keep their names there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from wamlab.errors import InputError

KeyLayout = Literal["wamlab", "wan", "diffusers", "dreamzero"]
NETWORK = "network"
PARTS = {
    NETWORK: "action_head.model.",
    "text encoder": "action_head.text_encoder.",
    "image encoder": "action_head.image_encoder.model.",
    "video autoencoder": "action_head.vae.model.",
}  # of a DreamZero bundle (spec 8.2)
LORA_PREFIX = "action_head.model.base_model.model."  # of DreamZero's LoRA files (spec 8.3)
LORA_LEAVES = (".lora_A", ".lora_B")  # of adapters in a network here
ACTION_MODULES = ("action_encoder.", "state_encoder.", "action_decoder.")

OUTSIDE_BLOCKS = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
    "action_encoder.W1": "action_encoder.W1",
    "action_encoder.W2": "action_encoder.W2",
    "action_encoder.W3": "action_encoder.W3",
    "state_encoder.layer1": "state_encoder.layer1",
    "state_encoder.layer2": "state_encoder.layer2",
    "action_decoder.layer1": "action_decoder.layer1",
    "action_decoder.layer2": "action_decoder.layer2",
}  # wamlab: Diffusers (spec 8.4)
INSIDE_BLOCK = {
    "modulation": "scale_shift_table",
    "norm3": "norm2",  # Diffusers numbers the norms in the order they run; its own norm3 has no weights
    "self_attn.q": "attn1.to_q",
    "self_attn.k": "attn1.to_k",
    "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0",
    "self_attn.norm_q": "attn1.norm_q",
    "self_attn.norm_k": "attn1.norm_k",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v",
    "cross_attn.o": "attn2.to_out.0",
    "cross_attn.norm_q": "attn2.norm_q",
    "cross_attn.norm_k": "attn2.norm_k",
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}  # wamlab: Diffusers, below ``blocks.{i}.`` in both
TO_DIFFUSERS = (OUTSIDE_BLOCKS, INSIDE_BLOCK)
FROM_DIFFUSERS = tuple({theirs: ours for ours, theirs in table.items()} for table in TO_DIFFUSERS)
SAME_NAMES = tuple({ours: ours for ours in table} for table in TO_DIFFUSERS)
NAME = re.compile(r"(blocks\.\d+\.)?(.+?)(\.(?:weight|bias|W|b))?")


def find_layout(names: Iterable[str]) -> KeyLayout:
    """Tell a checkpoint's layout from its names; InputError if they are of no network known here."""
    found = sorted(names)
    if any(".lora_A." in name for name in found):
        raise InputError("this is a LoRA checkpoint: load the base it was trained on, then read it with read_lora")
    if any(name.startswith(PARTS[NETWORK]) for name in found):
        return "dreamzero"
    if any(name.startswith("condition_embedder.") for name in found):
        return "diffusers"
    if "time_projection.1.weight" in found:
        return "wamlab" if any(name.startswith(ACTION_MODULES) for name in found) else "wan"
    shown = ", ".join(found[:3]) or "none"
    raise InputError(f"its {len(found)} tensors ({shown}, ...) are of no known layout: give a Wan or DreamZero network")


def part_of(name: str, layout: KeyLayout) -> str:
    """Return which part of a checkpoint a tensor belongs to: one of ``PARTS``, or "unknown"."""
    if layout != "dreamzero":
        return NETWORK
    return next((part for part, prefix in PARTS.items() if name.startswith(prefix)), "unknown")


def to_wamlab(name: str, layout: KeyLayout) -> str | None:
    """Return what a tensor of a layout is called here; None if it belongs to no network."""
    if layout == "diffusers":
        return _renamed(name, FROM_DIFFUSERS)
    if layout == "dreamzero":
        prefix = PARTS[NETWORK]
        return _renamed(name.removeprefix(prefix), SAME_NAMES) if name.startswith(prefix) else None
    return _renamed(name, SAME_NAMES)


def from_wamlab(name: str, layout: KeyLayout) -> str:
    """Return what one of this network's tensors is called in a layout; InputError if the map has no such tensor."""
    renamed = _renamed(name, TO_DIFFUSERS if layout == "diffusers" else SAME_NAMES)
    if renamed is None:
        raise InputError(f"{name} is no tensor of a world action model: it has no name in the layout {layout}")
    return PARTS[NETWORK] + renamed if layout == "dreamzero" else renamed


def _renamed(name: str, tables: tuple[dict[str, str], ...]) -> str | None:
    match = NAME.fullmatch(name)
    if match is None:
        return None
    block, stem, leaf = match[1] or "", match[2], match[3] or ""
    module = tables[1 if block else 0].get(stem)
    return None if module is None else f"{block}{module}{leaf}"
