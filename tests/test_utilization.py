"""What is measured of a step: utilisation, rates, summaries without warm-up, traces that name its parts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from wamlab.errors import InputError
from wamlab.flow import flow_loss
from wamlab.model import presets
from wamlab.model.wam import WorldActionModel
from wamlab.speed.clock import PARTS, Clock
from wamlab.speed.peaks import measure_matmul_peak
from wamlab.speed.trace import traced
from wamlab.speed.trace_split import split_of_trace
from wamlab.speed.utilization import Utilization, summarize_steps
from wamlab.train import TrainConfig, make_optimizer, noised_examples, train
from wamlab.types import Batch, StepRecord


def records(num_steps: int):
    """Train a tiny network, its parts timed by a clock."""
    config = presets.tiny(layers=1)
    net, clock = WorldActionModel(config), Clock()
    actions = torch.randn(2, 2 * config.actions_per_block, config.max_action_dim)
    batch = Batch(
        latents=torch.randn(2, 5, config.latent_channels, 4, 4),
        actions=actions,
        action_mask=torch.ones_like(actions, dtype=torch.bool),
        state=torch.randn(2, 2, config.max_state_dim),
        text=torch.randn(2, 7, config.text_dim),
    )
    settings = TrainConfig(num_steps=num_steps, batch_size=2, has_bf16=False)
    batches = clock.waited("data", [batch] * num_steps)
    encoded = map(clock.timed("encode", lambda batch: batch), batches)
    examples = noised_examples(encoded, seed=0)
    return train(partial(flow_loss, net), examples, make_optimizer(net, settings), settings, clock=clock)


def test_a_trace_of_chosen_steps_opens_and_names_the_parts(tmp_path: Path) -> None:
    losses = [record.loss for record in traced(records(4), [1, 3], tmp_path / "traces")]
    assert len(losses) == 4
    files = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert files == ["trace_step_00000001.json", "trace_step_00000003.json"]
    for name in files:
        trace = json.loads((tmp_path / "traces" / name).read_text())
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in events)
        assert {"data", "encode", "forward", "backward", "optimizer"} <= {event["name"] for event in events}
        split = split_of_trace(tmp_path / "traces" / name)
        assert 0 < split["compute"] < 60
        assert (split["h2d"], split["communication"]) == (0, 0)
    assert {"data", "h2d", "encode", "forward", "backward", "communication", "optimizer"} == set(PARTS)


def test_a_trace_tells_copies_and_collectives_from_what_computes_beside_them(tmp_path: Path) -> None:
    def event(kind: str, name: str, start: int, end: int) -> dict:
        return {"ph": "X", "cat": kind, "name": name, "tid": 7, "ts": start * 1e6, "dur": (end - start) * 1e6}

    events = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 2),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 9),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 2, 8),
        event("kernel", "gemm", 3, 5),
        event("kernel", "gemm", 4, 6),
        event("kernel", "softmax", 7, 12),
        event("cpu_op", "aten::mm", 0, 50),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    wanted = {"compute": 8.0, "h2d": 2.0, "communication": 6.0, "exposed_communication": 2.0}  # 2..3 and 6..7
    assert split_of_trace(path) == pytest.approx(wanted)
    path.write_text("{")
    with pytest.raises(InputError, match="is no trace of a step"):
        split_of_trace(path)


def test_a_traced_run_that_is_left_early_closes_its_source(tmp_path: Path) -> None:
    source = records(5)
    for record in traced(source, [9], tmp_path):
        if record.step == 2:
            break
    assert list(tmp_path.iterdir()) == []


def test_utilization_is_the_share_of_the_peak() -> None:
    used = Utilization(30e12, 40e12, 1000, 1000e12, num_devices=8).figures(num_samples=64, step_s=2.0)
    assert used == {
        "samples_per_s_device": 4.0,
        "tokens_per_s": 32_000.0,
        "mfu": pytest.approx(0.12),
        "hfu": pytest.approx(0.16),
    }


def test_warm_up_is_told_apart() -> None:
    def record(step: int, step_s: float) -> StepRecord:
        return StepRecord(step, 1.0, 1.0, 0.0, 1.0, 1e-3, 8, step_s, {"forward": step_s / 4}, 1.0)

    steps = [record(1, 60.0), record(2, 5.0), *(record(step, 2.0) for step in range(3, 8))]
    found = summarize_steps(steps, num_warm_up=2)
    assert (found["step_s"], found["samples_per_s"], found["warm_up_s"], found["forward_s"]) == (2.0, 4.0, 65.0, 0.5)
    with pytest.raises(InputError, match="take more steps"):
        summarize_steps(steps[:2], num_warm_up=2)


def test_this_machine_reaches_some_operations_a_second() -> None:
    assert 1e8 < measure_matmul_peak("cpu", torch.float32, size=256, seconds=0.05) < 1e14
