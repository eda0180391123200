"""What a block forgets changes no number."""

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from small_network import batch_of, open_net  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.nn import functional as F

from wamlab.errors import InputError
from wamlab.flow import flow_loss, with_noise
from wamlab.model.wam import WorldActionModel
from wamlab.speed.recompute import plan_of, with_recompute
from wamlab.speed.recompute_plan import POLICIES, RecomputePlan
from wamlab.types import FlowExample


def example_of(num_samples: int = 2) -> FlowExample:
    generator = torch.Generator().manual_seed(1)
    return with_noise(batch_of(generator, num_samples), generator)


def results(net: WorldActionModel, example: FlowExample) -> list[Tensor]:
    net.zero_grad()
    loss = flow_loss(net, example).total
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def are_equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_any_plan_gives_the_same_loss_and_gradients_bit_for_bit_also_after_another_plan() -> None:
    net, example, draw = open_net(5), example_of(), random.Random(0)
    wanted = results(net, example)
    plans = [RecomputePlan.uniform(policy, 5) for policy in POLICIES]
    plans += [RecomputePlan(tuple(draw.choice(POLICIES) for _ in range(5))) for _ in range(15)]
    for plan in plans:
        assert are_equal(results(with_recompute(net, plan), example), wanted), plan
        assert plan_of(net) == plan
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert are_equal(results(twin, example), wanted)


class Noisy(nn.Module):
    """A block that draws random numbers inside its attention and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.maps(x).chunk(3, dim=-1)
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=0.2)
        return x + F.dropout(self.out(F.dropout(seen, 0.3).square()), 0.4)


@pytest.mark.parametrize("policy", POLICIES)
def test_random_numbers_are_the_same_when_computed_again(policy: str) -> None:
    net = nn.Module()
    net.blocks = nn.ModuleList(Noisy() for _ in range(3))
    x = torch.randn(2, 2, 6, 8)

    def gradients() -> list[Tensor]:
        net.zero_grad()
        torch.manual_seed(3)
        hidden = x
        for block in net.get_submodule("blocks").children():
            hidden = block(hidden)
        loss = hidden.square().mean()
        loss.backward()
        return [loss.detach(), torch.rand(1), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]

    wanted = gradients()
    with_recompute(net, RecomputePlan.uniform(policy, 3))
    assert are_equal(gradients(), wanted)


def test_compiled_blocks_follow_a_plan_and_change_it() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("recompute_law.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] < 1e-5
    assert found["num_compilations"] == 4  # offloading happens outside of what is compiled


def test_without_a_plan_every_block_forgets_and_numbers_name_those_that_do() -> None:
    assert plan_of(open_net(3)) == RecomputePlan.read("3 keep")
    assert plan_of(with_recompute(open_net(3))) == RecomputePlan.read("3 full")
    assert plan_of(with_recompute(open_net(3), [1])) == RecomputePlan.read("1 keep, 1 full, 1 keep")


def test_plans_are_written_read_and_drawn() -> None:
    plan = RecomputePlan.read("2 full, 3 keep, 1 offload")
    assert RecomputePlan.read(str(plan)) == plan == RecomputePlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert "|..###^|" in plan.draw() and "3 x keep" in plan.draw()
    picture = ElementTree.fromstring(plan.draw_svg())
    assert len(picture.findall("{http://www.w3.org/2000/svg}rect")) == 6 + 3
    assert RecomputePlan.read("4 keep").complexity < plan.complexity


def test_a_plan_that_does_not_fit_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="for 2 blocks, but the network has 3"):
        with_recompute(open_net(3), RecomputePlan.read("2 full"))
    with pytest.raises(InputError, match="no block 7"):
        with_recompute(open_net(3), [7])
    with pytest.raises(InputError, match='block 0 has the policy "fast"'):
        RecomputePlan.read("1 fast")
    with pytest.raises(InputError, match="no part of a recompute plan"):
        RecomputePlan.read("full")
