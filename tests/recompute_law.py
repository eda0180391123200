"""Run by test_recompute.py in a process of its own: compilers cannot read functions whose annotations are checked."""

import copy
import json
import time

import torch
from compiled_law import HALF, difference, example_of  # pyright: ignore[reportMissingImports]
from small_network import open_net  # pyright: ignore[reportMissingImports]

from wamlab.speed.compile import compile_report, compiled, expect_no_recompiles
from wamlab.speed.recompute import with_recompute
from wamlab.speed.recompute_plan import RecomputePlan

PLANS = ("1 matmuls, 1 offload, 1 full", "1 offload, 1 attention, 1 full")


def compiled_law() -> dict:
    """Compiled blocks follow a plan, and another one given to them later, and compile nothing in between."""
    start_s = time.time()
    net = open_net(3)
    fast = compiled(with_recompute(copy.deepcopy(net), RecomputePlan.read(PLANS[0])), backend=HALF, is_strict=True)
    worst = difference(net, fast, example_of(1))
    with expect_no_recompiles():
        worst = max(worst, difference(net, fast, example_of(2)))
    with_recompute(fast, RecomputePlan.read(PLANS[1]))
    worst = max(worst, difference(net, fast, example_of(1)))
    return {"difference": worst, "num_compilations": compile_report(start_s).num_compilations}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(compiled_law()))
