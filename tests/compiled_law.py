"""Run by test_bench.py in a process of its own: compilers cannot read functions whose annotations are checked.

Prints the largest relative difference between gradients with and without compiled blocks.
"""

import copy
from dataclasses import replace

from test_exact_savings import CONFIG, example_of, open_net

from wamlab.flow import flow_loss
from wamlab.speed.compile import compiled

if __name__ == "__main__":
    config = replace(CONFIG, layers=2)
    net, example = open_net(config), example_of(config)
    fast = copy.deepcopy(net)
    compiled(fast)
    flow_loss(net, example).total.backward()
    flow_loss(fast, example).total.backward()
    pairs = [(p.grad, q.grad) for p, q in zip(net.parameters(), fast.parameters(), strict=True)]
    print(max(((a - b).norm() / (1 + a.norm())).item() for a, b in pairs if a is not None and b is not None))
