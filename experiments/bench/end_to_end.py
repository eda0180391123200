"""Decode, encode, train: DreamZero's way against all tricks, each in processes of its own, turn by turn.

    wamlab bench end_to_end [--quick] [--json]

The recipe is ``small_5b``: 44 M parameters, about 940 tokens a sample, real encoders with operations in proportion to
the published ones, bf16 on both sides. Quick: the baselines and all tricks, one turn each, blocks compiled only where
an earlier run left what it compiled. On a CPU there are no launches, no PCIe and no second memory to win back.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from wamlab.errors import InputError
from wamlab.lab.ablation import (
    FSDP2,
    FULL,
    OFFICIAL,
    ablation_table,
    factor_table,
    factors,
    loss_difference,
    ratios,
    read_ablation,
)
from wamlab.recipes.ablate import AblationConfig, ablate, list_variants, prepare_features
from wamlab.recipes.small import make_small_5b, small_5b
from wamlab.recipes.tricks import choose_tricks

HOME = Path(tempfile.gettempdir()) / "wamlab-bench" / "small_5b"
STORED = "stored features"


def run(*, is_quick: bool) -> dict[str, Any]:
    """Take all turns, print the tables, return the figures; wall time a sample unless a key says CPU time."""
    start_s = time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the other core reads
    make_small_5b(HOME)
    recipe = small_5b(HOME)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tricks, left_out = choose_tricks(recipe, device)
    for name, why in left_out.items():
        print(f"without {name}: {why}")
    config = AblationConfig(num_steps=2, num_rounds=2)
    is_compiled = not is_quick or _has_compiled(HOME.parent)
    if is_quick:
        config = AblationConfig(num_steps=2, num_rounds=1, has_leave_one_out=False)
        recipe = replace(recipe, train=replace(recipe.train, batch_size=1))
        tricks = tuple(t for t in tricks if t.name != STORED and (is_compiled or t.name != "compiled blocks"))
    variants = list_variants(recipe, tricks, config)
    if is_quick:
        variants = {name: variants[name] for name in (OFFICIAL, FSDP2, FULL)}
    encode_s = prepare_features(variants[FULL], tricks)
    with tempfile.TemporaryDirectory(prefix="ablation-", dir=HOME.parent) as folder:
        with tqdm(total=len(variants) * config.num_rounds, desc="turns", file=sys.stderr) as bar:
            for name, _ in ablate(variants, Path(folder), config, tricks=tricks, left_out=left_out):
                bar.set_postfix_str(name)
                bar.update()
        result = read_ablation(folder)
    print(ablation_table(result))
    if missing := [name for name in (OFFICIAL, FSDP2, FULL) if not ratios(result, name, name)]:
        raise InputError(f"nothing was measured of {', '.join(missing)}: {result['failures']}")
    figures: dict[str, Any] = {
        "speedup_vs_official": statistics.median(ratios(result, OFFICIAL, FULL)),
        "speedup_vs_fsdp2_base": statistics.median(ratios(result, FSDP2, FULL)),
        "speedup_vs_official_cpu_time": statistics.median(ratios(result, OFFICIAL, FULL, "cpu_s")),
        "speedup_vs_fsdp2_base_cpu_time": statistics.median(ratios(result, FSDP2, FULL, "cpu_s")),
        "loss_difference": loss_difference(result, FULL),
        "has_stored_features": not is_quick,
        "is_compiled": is_compiled,
        "failures": result["failures"],
    }
    if not is_quick:
        print(f"\n{factor_table(result)}\n\nin CPU time\n{factor_table(result, 'cpu_s')}")
        before = f"+ {tricks[-2].name}"
        figures["speedup_vs_official_without_stored_features"] = statistics.median(ratios(result, OFFICIAL, before))
        figures["factors"] = factors(result)
        figures["encode_s_a_window_once"] = encode_s
    figures["minutes"] = (time.perf_counter() - start_s) / 60
    return figures


def _has_compiled(folder: Path) -> bool:
    return (folder / "compiled").is_dir() and any((folder / "compiled").iterdir())


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
