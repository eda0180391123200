"""Compiling changes no number, is shared by equal blocks, kept for the next process, and never ends a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from wamlab.errors import InputError
from wamlab.speed.compile import compile_report, compiled, compiled_step
from wamlab.speed.config import SpeedConfig
from wamlab.speed.update import set_rate, with_tensor_rates

SCRIPT = Path(__file__).with_name("compiled_law.py")


def run_law(*args: str) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_laws_of_compiling() -> None:
    found = run_law("laws")
    for name, case in found["blocks"].items():
        assert case["difference"] <= 1e-5, name
        assert case["num_compilations"] == 2, f"{name}: four blocks of two forms"
    budgets = found["budget"]
    assert max(case["difference"] for case in budgets.values()) <= 1e-5
    all_kept, half, least = (budgets[name]["saved_bytes"] for name in ("1.0", "0.5", "0.0"))
    assert least < half < all_kept and least < 0.5 * all_kept
    recompiles = found["recompiles"]
    assert (recompiles["compilations"], recompiles["recompiles"]) == (4, 3)
    assert "Recompiling function _run_forward" in recompiles["refused"]
    fallback = found["fallback"]
    assert fallback["difference"] == 0
    assert len(fallback["said"]) == 1
    assert "the network runs eagerly, as compiling failed" in fallback["said"][0]
    assert "there is no such instruction" in fallback["said"][0]
    assert len(fallback["fallbacks"]) == 1
    assert (fallback["raised"], fallback["own"]) == ("BackendCompilerFailed", "RuntimeError")
    assert found["encoder"]["difference"] <= 1e-6
    assert found["encoder"]["breaks"] == 1
    assert found["optimizer"]["difference"] <= 1e-6


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    first, second = (run_law("inductor", str(tmp_path)) for _ in range(2))
    assert first["difference"] <= 1e-5
    assert second["difference"] == first["difference"]
    assert first["num_compilations"] == second["num_compilations"] == 1
    assert first["warm_s"] == 0 < first["cold_s"]
    assert second["cold_s"] == 0 < second["warm_s"] < first["cold_s"] / 2


def test_without_a_compiler_it_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    net = nn.Linear(2, 2)
    with pytest.warns(RuntimeWarning, match=r"runs eagerly, as compiling failed: .* needs a C\+\+ compiler"):
        assert compiled(net) is net
    assert "install g++" in compile_report().fallbacks[-1]
    with pytest.raises(InputError, match="needs a C\\+\\+ compiler"):
        compiled(net, is_strict=True)


def test_rates_stay_where_they_are() -> None:
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    set_rate(optimizer, 0.2)
    assert optimizer.param_groups[0]["lr"] == 0.2
    rate = with_tensor_rates(optimizer).param_groups[0]["lr"]
    set_rate(optimizer, 0.3)
    assert rate is optimizer.param_groups[0]["lr"]
    assert rate.item() == pytest.approx(0.3)
    assert isinstance(rate, torch.Tensor)
    with pytest.raises(InputError, match="step of SGD cannot be compiled"):
        compiled_step(optimizer)


def test_an_activation_budget_needs_compiled_blocks_that_nothing_else_recomputes() -> None:
    assert SpeedConfig(compile="blocks", activation_budget=0.5).activation_budget == 0.5
    with pytest.raises(InputError, match=r"give speed\.compile"):
        SpeedConfig(activation_budget=0.5)
    with pytest.raises(InputError, match=r"give speed\.compile"):
        SpeedConfig(compile="blocks", recompute="all", activation_budget=0.5)
    with pytest.raises(InputError, match="activation_budget"):
        SpeedConfig(compile="blocks", activation_budget=1.5)


def test_modes_are_named() -> None:
    net = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 2))})
    with pytest.raises(InputError, match="give one of default, max-autotune-no-cudagraphs, reduce-overhead"):
        compiled(net, mode="fast", backend="eager")
