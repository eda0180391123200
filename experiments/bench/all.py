"""Every benchmark in its quick form, one after the other, each in a process of its own: one file of all ratios.

    wamlab bench all [--json]
    python experiments/bench/all.py --out figures.json           # again and again, for a baseline
    python experiments/bench/all.py --keep a.json b.json c.json  # writes baseline.json from three or more
    wamlab bench compare figures.json                            # exit status 1 where a ratio is worse than its band

It takes up to 15 minutes on two cores. ``RATIOS`` names what is guarded and which direction is better; all else that a
benchmark gives stands beside it under ``benches``. A benchmark that fails is named, and its ratios are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from wamlab.errors import InputError
from wamlab.lab.environment import describe_environment
from wamlab.lab.table import Table
from wamlab.recipes.bench_guard import keep_ratios, read_figures

HERE = Path(__file__).parent
BASELINE = HERE / "baseline.json"
LIMIT_S = 240  # of wall time a benchmark; alone on two cores each takes less than 50 s
VERSIONS = ("torch", "numpy", "av", "torchcodec", "decord", "pyarrow", "transformers", "diffusers")
RATIOS = {
    "network.speedup_vs_plain": "higher",
    "sampling.speedup_vs_reference": "higher",
    "sampling.speedup_vs_reference, eager": "higher",
    "decode.cpu_vs_torchcodec": "lower",
    "decode.index_speedup_vs_torchcodec": "higher",
    "loader.speedup_vs_lerobot_float32": "higher",
    "loader.speedup_vs_lerobot_uint8": "higher",
    "loader.speedup_vs_dreamzero": "higher",
    "loader.speedup_vs_rlinf": "higher",
    "loader.cpu_vs_bare_torchcodec": "lower",
    "loader.warm_store_speedup": "higher",
    "loader.step_rate_with_helper_process": "higher",
    "end_to_end.speedup_vs_official_cpu_time": "higher",
    "end_to_end.speedup_vs_fsdp2_base_cpu_time": "higher",
    "tuner.fraction_of_exhaustive": "higher",
    "tuner.memory_error_max": "lower",
    "rollouts.throughput_vs_padded": "higher",
    "rollouts.throughput_vs_static": "higher",
    "rollouts.tail_cut_vs_static": "higher",
    "parity.right_when_equal": "higher",
    "parity.right_when_worse": "higher",
    "serve.throughput_vs_one_by_one": "higher",
    "monitor.training_speed_with_monitor_cpu": "higher",
}


def names() -> list[str]:
    """Return the benchmarks there are, but this one."""
    return sorted(path.stem for path in HERE.glob("*.py") if path != Path(__file__))


def measure(name: str) -> dict[str, Any]:
    """Run one benchmark's quick form in a process of its own; return its figures, or ``error``."""
    command = [sys.executable, "-m", "wamlab.cli", "bench", name, "--quick", "--json"]
    start_s = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        lines = done.stdout.strip().splitlines()
        figures = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
    except subprocess.TimeoutExpired:
        figures, said = {}, f"took more than {LIMIT_S} s"
    except ValueError:
        figures, said = {}, "its last line is no JSON"
    if not isinstance(figures, dict) or not figures:
        figures = {"error": said}
    return figures | {"wall_s": time.perf_counter() - start_s}


def run(*, is_quick: bool = True, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure all, or some, print what each gave, return the ratios, every figure, and what it was measured on.

    ``is_quick`` changes nothing: all benchmarks are quick here.
    """
    del is_quick
    wanted = only or names()
    start_s, environment = time.perf_counter(), describe_environment()
    benches: dict[str, dict[str, Any]] = {}
    for name in tqdm(wanted, desc="benchmarks", file=sys.stderr):
        benches[name] = measure(name)
        if error := benches[name].get("error"):
            tqdm.write(f"{name}: {error}", file=sys.stderr)
    guarded = [key for key in RATIOS if key.split(".")[0] in wanted]
    found = {key: benches[key.split(".")[0]].get(key.split(".", 1)[1]) for key in guarded}
    ratios = {key: value for key, value in found.items() if isinstance(value, int | float)}
    print(Table([{"ratio": key, "value": value, "better is": RATIOS[key]} for key, value in ratios.items()]))
    return {
        "ratios": ratios,
        "missing": sorted(found.keys() - ratios.keys()),
        "benches": benches,
        "versions": {"python": environment["python"]} | {name: environment["packages"].get(name) for name in VERSIONS},
        "cpu": environment["cpu"],
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": (time.perf_counter() - start_s) / 60,
    }


def keep(paths: list[Path], target: Path) -> None:
    """Write a baseline from the files of three or more measurements."""
    repeats = [read_figures(path) for path in paths]
    directions = {key: better for key, better in RATIOS.items() if all(key in one["ratios"] for one in repeats)}
    kept = keep_ratios(repeats, directions)
    document = {
        "measured": [one.get("measured") for one in repeats],
        "cpu": repeats[-1].get("cpu"),
        "versions": repeats[-1].get("versions"),
        "commit": repeats[-1].get("commit"),
        "load_average": [one.get("load_average") for one in repeats],
        "band": "twice the distance of the highest from the lowest repeat, at least 5 % of the value",
        "not_measured_every_time": sorted(RATIOS.keys() - kept.keys()),
        "ratios": {name: asdict(ratio) for name, ratio in kept.items()},
    }
    target.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(kept)} ratios of {len(paths)} measurements: {target}")


def main() -> int:
    """Measure, keep or compare, as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the figures go")
    parser.add_argument("--only", nargs="+", default=(), choices=names(), help="benchmarks to measure")
    parser.add_argument("--keep", type=Path, nargs="+", help="files of figures to make a baseline of")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="where --keep writes")
    order = parser.parse_args()
    if order.keep:
        keep(order.keep, order.baseline)
        return 0
    figures = run(only=order.only)
    commit = describe_environment()["git"].get(str(HERE.parents[1]), {}).get("commit")
    text = json.dumps(figures | {"commit": commit})
    if order.out:
        order.out.write_text(text + "\n")
    else:
        print(text)
    return int(bool(figures["missing"]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"{error}")
