"""Run the checks and measurements of a GPU, each section in a process and a time of its own; run.sh says how."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from encoding import encoders  # pyright: ignore[reportMissingImports]
from sizes import SIZES  # pyright: ignore[reportMissingImports]
from training import laws, release, steps  # pyright: ignore[reportMissingImports]

from wamlab.lab.records import write_json
from wamlab.lab.table import Table
from wamlab.speed.compile import compile_cache

BUDGETS_S = {"laws": 110, "5b": 200, "14b": 80, "encoders": 60}
Cases = Iterator[tuple[str, Callable[[], dict[str, Any]]]]


def cases_of(section: str, device: torch.device) -> Cases:
    if section == "encoders":
        return encoders(device)
    if section == "laws":
        return laws(SIZES["laws" if device.type == "cuda" else "tiny"], device)
    return steps(SIZES["tiny" if device.type != "cuda" else section], device)


def run_section(section: str, kind: str, path: Path, budget_s: float) -> None:
    """Measure case by case, keeping each one's figures at once; those that have no time left are named."""
    end_s = time.perf_counter() + budget_s
    found: dict[str, Any] = {}
    torch.set_num_threads(min(torch.get_num_threads(), 8))
    device = torch.device(kind)
    if kind == "cuda":
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        if name is None:
            write_json(path, {"": {"failed": "torch sees no CUDA device here"}})
            return
        write_json(path.with_suffix(".device"), name)
    longest_s = 0.0
    try:
        cases = list(cases_of(section, device))
    except Exception as error:
        write_json(path, {"set-up": {"failed": f"{type(error).__name__}: {error}"[:300]}})
        return
    for name, case in cases:
        start_s = time.perf_counter()
        if start_s + longest_s / 2 > end_s:
            found[name] = {"skipped": f"no time left of {budget_s:.0f} s"}
        else:
            try:
                found[name] = case()
            except Exception as error:  # of any kind: the next case goes on, the status says it
                lines = traceback.format_exc().splitlines()
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                found[name] = {"failed": reason, "trace": lines[-12:]}
        release()
        seconds = time.perf_counter() - start_s
        longest_s = max(longest_s, seconds)
        found[name]["case_s"] = round(seconds, 2)
        write_json(path, found)
        print(f"{section}: {name}: {found[name].get('failed') or found[name].get('skipped') or 'done'}", flush=True)


def run_apart(section: str, kind: str, folder: Path, budget_s: float) -> dict[str, Any]:
    """Run a section in a process of its own: a device error or a hang ends that alone."""
    path = folder / f"{section}.json"
    process = multiprocessing.get_context("fork").Process(target=run_section, args=(section, kind, path, budget_s))
    process.start()
    process.join(budget_s + 15)
    found: dict[str, Any] = {}
    if is_late := process.is_alive():
        process.kill()
        process.join()
    if path.exists():
        found = json.loads(path.read_text())
    if is_late:
        found["the rest"] = {"failed": f"still running after {budget_s + 15:.0f} s"}
    elif process.exitcode:
        found["the rest"] = {"failed": f"the process ended with status {process.exitcode}"}
    return found


def is_broken(case: dict[str, Any]) -> bool:
    return "failed" in case or case.get("is_kept") is False


def table_of(section: str, cases: dict[str, Any]) -> Table:
    rows = []
    for name, case in cases.items():
        row: dict[str, Any] = {section: name}
        if "failed" in case or "skipped" in case:
            row["result"] = f"failed: {case['failed'][:90]}" if "failed" in case else f"skipped: {case['skipped']}"
        elif section == "laws":
            row |= {"loss": f"{case['loss']:.1e}", "gradient": f"{case['gradient']:.1e}"}
            row["result"] = (
                "kept" if case["is_kept"] else "broken, limits " + " ".join(f"{limit:.1e}" for limit in case["limits"])
            )
        elif section == "encoders":
            row |= {"clips/s": round(case["clips_per_s"], 2), "peak GiB": round(case["peak_gib"], 1)}
        else:
            row |= {"samples/s": round(case["samples_per_s"], 2), "MFU": f"{case['mfu']:.1%}"}
            row |= {"step ms": round(1000 * case["step_s"], 1), "peak GiB": round(case["peak_gib"], 1)}
            row |= {"layers": case["layers"], "first steps s": round(case["first_steps_s"], 1)}
        rows.append(row)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return Table([{key: row.get(key, "") for key in columns} for row in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and measure what needs a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--section", choices=tuple(BUDGETS_S), action="append", help="one of them; may be repeated")
    parser.add_argument("--budget", type=float, default=1.0, help="times the usual seconds of every section")
    parser.add_argument("--out", type=Path, help="file of the figures")
    asked = parser.parse_args()
    out = asked.out or Path(f"measured-on-{asked.device}.json")
    start_s = time.perf_counter()
    # No CUDA call here: a process that has made one cannot start others that make more.
    figures: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "device": asked.device}
    sections: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            compile_cache(Path(folder))  # what one section compiles the next one finds
        for section in asked.section or BUDGETS_S:
            sections[section] = run_apart(section, asked.device, Path(folder), asked.budget * BUDGETS_S[section])
            if (named := Path(folder) / f"{section}.device").exists():
                figures["device"] = json.loads(named.read_text())
            figures |= {"sections": sections, "minutes": (time.perf_counter() - start_s) / 60}
            write_json(out, figures)
    for section, cases in sections.items():
        print(table_of(section, cases), flush=True)
    broken = [f"{section}: {name}" for section, cases in sections.items() for name in cases if is_broken(cases[name])]
    print(f"{figures['device']}, torch {torch.__version__}: {figures['minutes']:.1f} minutes, figures in {out}")
    for name in broken:
        print(f"not as it should be: {name}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
