"""What watching a long run costs the training loop in the same kernel: steps with and without, turn by turn.

    wamlab bench monitor [--quick] [--json]

A real Jupyter kernel trains a small network in a cell while ``watch`` shows its run, which begins with 100,000 records.
Every turn is about two seconds of steps; the chart is frozen in every other one. No view answers, which is the dearest
case: all that is drawn is sent again every eight seconds. ``training_speed_with_monitor`` is the median over pairs of
turns of the speed with against the speed without, by wall clock; its twin takes the CPU time of the whole kernel.
``update_ms`` is the median CPU time of an update in the thread that watches. The share that updates may take is of
the kernel's CPU time, but they come twice a second at least: where others use the machine too it shows more.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from wamlab.errors import InputError
from wamlab.lab.table import Table

NUM_RECORDS = 100_000
TURN_S = 2.0
RESULT = "monitor.json"


def run(*, is_quick: bool) -> dict[str, Any]:
    """Start a kernel, let it measure, print the table, return the figures."""
    from jupyter_client.manager import start_new_kernel

    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="wamlab-bench-") as folder:
        manager, client = start_new_kernel(startup_timeout=120)
        try:
            here = str(Path(__file__).parent)
            code = f"import sys; sys.path.insert(0, {here!r}); import monitor; monitor.measure({folder!r}, {is_quick})"
            said = client.execute_interactive(code, timeout=900, output_hook=lambda _: None)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
        if said["content"]["status"] != "ok":
            raise InputError(f"the kernel could not measure: {said['content']['ename']}: {said['content']['evalue']}")
        figures = json.loads((Path(folder) / RESULT).read_text())
    print(Table([{"figure": name, "value": value} for name, value in figures.items()]))
    return figures | {"minutes": (time.perf_counter() - start_s) / 60}


def measure(folder: str, is_quick: bool) -> None:
    """Train under a watch that is frozen in every other turn; write the figures. Runs in a kernel."""
    from wamlab.lab.run import create_run
    from wamlab.lab.watch import watch

    watched = create_run(Path(folder) / "runs", "watched", {"train": {"num_steps": 10**6}})
    with (watched.folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(_record(step)) + "\n" for step in range(1, NUM_RECORDS + 1))
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    watching = watch(watched)
    while watching.num_records < NUM_RECORDS:
        time.sleep(0.05)
    figures: dict[str, Any] = {
        "num_records": NUM_RECORDS,
        "first_reading_s": time.perf_counter() - begun_s,
        "first_reading_cpu_s": time.process_time() - begun_cpu_s,
    }
    watching.feed.update_s.clear()
    before_s = watching.feed.spent_s
    records = _records()
    for _ in range(5):
        next(records)
    turns: list[tuple[float, float]] = []  # wall and CPU seconds a step; frozen, live, live, frozen, ...
    live_s = live_cpu_s = 0.0
    orders = (False, True, True, False)
    end_s = time.perf_counter() + (18 if is_quick else 120)
    while time.perf_counter() < end_s or len(turns) % 4:
        (watching.feed.go_on if orders[len(turns) % 4] else watching.feed.freeze)()
        start_s, start_cpu_s, num_steps = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - start_s < TURN_S:
            record = next(records)
            watched.log(asdict(record) | {"step": NUM_RECORDS + record.step, "samples_per_s": record.samples_per_s})
            num_steps += 1
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        if orders[len(turns) % 4]:
            live_s, live_cpu_s = live_s + wall_s, live_cpu_s + cpu_s
        turns.append((wall_s / num_steps, cpu_s / num_steps))
    frozen = [turn for number, turn in enumerate(turns) if not orders[number % 4]]
    live = [turn for number, turn in enumerate(turns) if orders[number % 4]]
    for place, name in enumerate(("training_speed_with_monitor", "training_speed_with_monitor_cpu")):
        ratios = sorted(a[place] / b[place] for a, b in zip(frozen, live, strict=True))
        figures[name] = statistics.median(ratios)
        figures[f"{name}_quartiles"] = [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]
    updates_s = sorted(watching.feed.update_s)
    figures |= {
        "update_ms": 1000 * statistics.median(updates_s),
        "update_ms_99": 1000 * updates_s[int(0.99 * len(updates_s))],
        "updates_per_s": len(updates_s) / live_s,
        "share_of_kernel": (watching.feed.spent_s - before_s) / live_cpu_s,
        "step_ms": 1000 * statistics.median(wall_s for wall_s, _ in frozen),
        "num_turns": len(turns),
    }
    (Path(folder) / RESULT).write_text(json.dumps(figures))
    watching.feed.go_on()
    watched.finish("stopped")
    watching.wait(60)
    if watching.error is not None:
        raise watching.error


def _record(step: int) -> dict[str, Any]:
    """Return a step's record as the trainer writes it."""
    split_s = {"data": 0.001, "encode": 0.004, "forward": 0.02, "backward": 0.04, "optimizer": 0.005}
    loss = 2 / step**0.3 + 0.01 * (step * 7919 % 100)
    return {
        "step": step, "loss": loss, "video_loss": 0.6 * loss, "action_loss": 0.4 * loss, "gradient_norm": 1 + loss,
        "learning_rate": 1e-4, "num_samples": 4, "step_s": 0.07 + 0.0001 * (step * 104_729 % 100), "split_s": split_s,
        "memory_gib": 1.5, "samples_per_s": 57.0, "mfu": 0.31, "hfu": 0.4, "tokens_per_s": 5700.0,
    }  # fmt: skip


def _records() -> Iterator[Any]:
    """Train a network of 1.4 million parameters on drawn batches, without end."""
    import torch

    from wamlab.flow import flow_loss
    from wamlab.model.presets import tiny
    from wamlab.model.wam import WorldActionModel
    from wamlab.train import TrainConfig, make_optimizer, noised_examples, train
    from wamlab.types import Batch

    torch.set_num_threads(1)  # more of them wait for each other where others use the machine too
    config = tiny()
    net = WorldActionModel(config)
    num_actions = config.max_blocks * config.actions_per_block
    frames = 1 + config.max_blocks * config.latents_per_block
    batch = Batch(
        latents=torch.randn(2, frames, config.latent_channels, 8, 8),
        actions=torch.rand(2, num_actions, config.max_action_dim),
        action_mask=torch.ones(2, num_actions, config.max_action_dim, dtype=torch.bool),
        state=torch.randn(2, config.max_blocks, config.max_state_dim),
        text=torch.randn(2, 8, config.text_dim),
    )

    def batches() -> Iterator[Batch]:
        while True:
            yield batch

    settings = TrainConfig(num_steps=10**6, batch_size=2)
    examples = noised_examples(batches(), seed=0)
    return train(partial(flow_loss, net), examples, make_optimizer(net, settings), settings)


if __name__ == "__main__":
    print(run(is_quick="--quick" in sys.argv))
