"""Decode, encode, train: DreamZero's way against all tricks, each in processes of its own, turn by turn.

    wamlab bench end_to_end [--quick] [--json]

The recipe is ``small_5b``: 44 M parameters, about 940 tokens a sample, real encoders with operations in proportion to
the published ones, bf16 on both sides where the machine computes in it. On a CPU there are no launches, no PCIe and no
second memory to win back.

Then the same in two processes with half the batch each: ZeRO-2 with Adam offloaded against FSDP2 and all tricks. Where
``WAMLAB_DEEPSPEED_PYTHON`` names a Python that has wamlab and DeepSpeed, DeepSpeed itself trains the baseline, too:

    python -m venv V && V/bin/pip install -e '.[wan]' deepspeed    # its Adam needs g++
    export WAMLAB_DEEPSPEED_PYTHON=V/bin/python

Where the machine has no bf16, a turn is one step of a batch of 2, and no trick is left out: half an hour.
Quick: the baselines and all tricks in one process, one step each after one of warm-up, a quarter of the frames,
nothing compiled or stored.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from wamlab.errors import InputError
from wamlab.lab.ablation import (
    FSDP2,
    FULL,
    OFFICIAL,
    Result,
    ablation_table,
    factor_table,
    factors,
    loss_difference,
    ratios,
    read_ablation,
)
from wamlab.lab.table import Table
from wamlab.recipes.ablate import AblationConfig, ablate, list_variants, prepare_features, run_turn
from wamlab.recipes.config import Recipe
from wamlab.recipes.small import make_small_5b, small_5b
from wamlab.recipes.tricks import Trick, choose_tricks
from wamlab.train import has_native_bf16

HOME = Path(tempfile.gettempdir()) / "wamlab-bench" / "small_5b"
PARTS = Path(__file__).parent / "end_to_end_parts"
DEEPSPEED = "DeepSpeed ZeRO-2, Adam offloaded"
TOGETHER = "2 processes"
LEFT_OUT_OF_QUICK = ("stored features", "compiled blocks")


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
    if not has_native_bf16(device):  # operations take three times as long
        config = AblationConfig(num_steps=1, num_rounds=1, has_leave_one_out=False)
        recipe = replace(recipe, train=replace(recipe.train, batch_size=2))
    if is_quick:
        config = AblationConfig(num_steps=1, num_warmup=1, num_rounds=1, has_leave_one_out=False)
        window, sizes = replace(recipe.window, max_blocks=1), replace(recipe.model, max_blocks=1)
        recipe = replace(recipe, window=window, model=sizes, train=replace(recipe.train, batch_size=1))
        tricks = tuple(trick for trick in tricks if trick.name not in LEFT_OUT_OF_QUICK)
    variants = list_variants(recipe, tricks, config)
    if is_quick:
        variants = {name: variants[name] for name in (OFFICIAL, FSDP2, FULL)}
    encode_s = prepare_features(variants[FULL], tricks)
    temporary = partial(tempfile.TemporaryDirectory, prefix="ablation-", dir=HOME.parent)  # beside what is compiled
    with temporary() as folder, temporary() as headline:
        result = _measured(variants, Path(folder), config, tricks, left_out)
        if not is_quick:  # the headline's own again: what they are compared by is a median
            compared = {name: variants[name] for name in (OFFICIAL, FSDP2, FULL)}
            more = _measured(compared, Path(headline), config, tricks, left_out)
            for name in compared:
                result["turns"][name] += more["turns"][name]
        print(ablation_table(result))
        together = {} if is_quick else train_together(recipe, device, Path(folder), config)
    speedups = ratios(result, OFFICIAL, FULL)
    if missing := [name for name in (OFFICIAL, FSDP2, FULL) if not ratios(result, name, name)]:
        raise InputError(f"nothing was measured of {', '.join(missing)}: {result['failures']}")
    figures: dict[str, Any] = {
        "speedup_vs_official": statistics.median(speedups),
        "speedups_vs_official": speedups,
        "speedup_vs_fsdp2_base": statistics.median(ratios(result, FSDP2, FULL)),
        "speedup_vs_official_cpu_time": statistics.median(ratios(result, OFFICIAL, FULL, "cpu_s")),
        "speedup_vs_fsdp2_base_cpu_time": statistics.median(ratios(result, FSDP2, FULL, "cpu_s")),
        "loss_difference": loss_difference(result, FULL),
        "is_whole": not is_quick,
        "failures": result["failures"],
    }
    if not is_quick:
        print(f"\n{factor_table(result)}\n\nin CPU time\n{factor_table(result, 'cpu_s')}")
        before = f"+ {tricks[-2].name}"
        figures["speedup_vs_official_without_stored_features"] = statistics.median(ratios(result, OFFICIAL, before))
        figures["factors"] = factors(result)
        figures["encode_s_a_window_once"] = encode_s
        figures[TOGETHER] = together
    figures["minutes"] = (time.perf_counter() - start_s) / 60
    return figures


def _measured(
    variants: Mapping[str, Recipe],
    folder: Path,
    config: AblationConfig,
    tricks: Sequence[Trick],
    left_out: Mapping[str, str],
) -> Result:
    """Take all turns under a bar."""
    with tqdm(total=len(variants) * config.num_rounds, desc="turns", file=sys.stderr) as bar:
        for name, _ in ablate(variants, folder, config, tricks=tricks, left_out=left_out):
            bar.set_postfix_str(name)
            bar.update()
    return read_ablation(folder)


def train_together(recipe: Recipe, device: torch.device, folder: Path, config: AblationConfig) -> dict[str, Any]:
    """Take the baselines' turns, DeepSpeed's where there is one, and all tricks' in two processes; print the table."""
    recipe = replace(recipe, train=replace(recipe.train, batch_size=recipe.train.batch_size // 2))
    tricks, _ = choose_tricks(recipe, device, 2)
    config = replace(config, num_processes=2)
    variants = list_variants(recipe, tricks, config)
    python = os.environ.get("WAMLAB_DEEPSPEED_PYTHON", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PARTS), os.environ.get("PYTHONPATH"))))
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in (OFFICIAL, *[DEEPSPEED] * bool(python), FSDP2, FULL)}
    for _ in tqdm(range(config.num_rounds), desc="rounds of 2 processes", file=sys.stderr):
        for name, own in turns.items():
            try:
                if name == DEEPSPEED:
                    own.append(run_turn(variants[OFFICIAL], folder, config, module="deepspeed_turn", python=python))
                else:
                    own.append(run_turn(variants[name], folder, config))
            except RuntimeError as error:
                print(f"{TOGETHER}, {name}: {error}")
    turns = {name: own for name, own in turns.items() if len(own) == config.num_rounds}
    if FULL not in turns:
        return {}
    result = {"turns": turns}
    names = [name for name in turns if name != FULL]
    print(f"\n{TOGETHER}, a batch of {recipe.train.batch_size} each")
    print(
        Table(
            [
                {
                    "variant": name,
                    "step ms": 1000 * statistics.median(turn["step_s"] for turn in own),
                    "all tricks' speed-up": statistics.median(ratios(result, name, FULL)),
                    "in CPU time": statistics.median(ratios(result, name, FULL, "cpu_s")),
                    "loss differs by": loss_difference(result, name),
                }
                for name, own in turns.items()
            ]
        )
    )
    found: dict[str, Any] = {f"speedup_vs_{name}": statistics.median(ratios(result, name, FULL)) for name in names}
    return found | {"loss_difference": loss_difference(result, FULL)}


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
