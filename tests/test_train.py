"""The training loop: exact resume, accumulation, schedule, averages, checkpoints."""

from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from wamlab.checkpoint import load_checkpoint, load_weights, write_checkpoint
from wamlab.checkpoint_folder import list_checkpoints, newest_checkpoint
from wamlab.errors import InputError
from wamlab.flow import flow_loss
from wamlab.speed.clock import Clock
from wamlab.train import Ema, TrainConfig, cosine_rate, make_optimizer, noised_examples, step_generator, train
from wamlab.types import Batch, Noised, Velocity


class Linear(nn.Module):
    """The smallest network of the right signature: one matrix for the latents, one for the actions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.video = nn.Linear(3, 3)
        self.action = nn.Linear(4, 4)

    def forward(self, batch: Batch, seen: Noised) -> Velocity:
        video = self.video(seen.latents.movedim(2, -1)).movedim(-1, 2)
        return Velocity(video=video, actions=self.action(seen.actions))


def batches(first: int = 0):
    """Yield batches that depend on their index only, like the loader's."""
    index = first
    while True:
        generator = torch.Generator().manual_seed(index)
        yield Batch(
            latents=torch.randn(4, 3, 3, 4, 4, generator=generator),
            actions=torch.rand(4, 4, 4, generator=generator),
            action_mask=torch.ones(4, 4, 4, dtype=torch.bool),
            state=torch.zeros(4, 1, 2),
            text=torch.zeros(4, 1, 2),
        )
        index += 1


CONFIG = TrainConfig(num_steps=12, batch_size=4, learning_rate=1e-2, ema_decay=0.9)


def start(config: TrainConfig = CONFIG):
    net = Linear()
    return net, make_optimizer(net, config), Ema(net, config.ema_decay)


def run(net, optimizer, ema, first_step: int = 0, config: TrainConfig = CONFIG):
    examples = noised_examples(batches(first_step), seed=config.seed, first_step=first_step)
    return train(partial(flow_loss, net), examples, optimizer, config, first_step=first_step, ema=ema)


def test_training_lowers_the_loss() -> None:
    config = TrainConfig(num_steps=150, batch_size=4, learning_rate=3e-2)
    net, optimizer, _ = start(config)
    losses = [record.loss for record in run(net, optimizer, None, config=config)]
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    net, optimizer, ema = start()
    whole = list(run(net, optimizer, ema))
    first_net, first_optimizer, first_ema = start()
    head = list(islice(run(first_net, first_optimizer, first_ema), 5))
    write_checkpoint(tmp_path, 5, first_net, first_optimizer, first_ema)
    second_net, second_optimizer, second_ema = start()
    step = load_checkpoint(newest_checkpoint(tmp_path), second_net, second_optimizer, second_ema)
    tail = list(run(second_net, second_optimizer, second_ema, first_step=step))
    assert step == 5
    assert [r.loss for r in head + tail] == [r.loss for r in whole]
    assert [r.gradient_norm for r in head + tail] == [r.gradient_norm for r in whole]
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, second_net.state_dict()[name])
        assert torch.equal(ema.average[name], second_ema.average[name])


def test_accumulation_changes_no_number() -> None:
    config = replace(CONFIG, has_bf16=False)
    whole = [r.loss for r in run(*start(config), config=config)]
    config = replace(config, num_micro_batches=2)
    parts = [r.loss for r in run(*start(config), config=config)]
    assert parts == pytest.approx(whole, rel=1e-5)  # sums of float32 in another order


def test_the_rate_warms_up_then_falls_along_a_cosine() -> None:
    config = TrainConfig(num_steps=100, learning_rate=1.0, warmup_fraction=0.1, final_rate_fraction=0.1)
    rates = [cosine_rate(step, config) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[54] == pytest.approx(0.55, abs=0.01)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_biases_are_not_decayed() -> None:
    groups = make_optimizer(Linear(), TrainConfig(weight_decay=0.5)).param_groups
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups] == [
        (0.5, {2}),
        (0.0, {1}),
    ]


def test_the_average_is_applied_for_a_while_only() -> None:
    net, optimizer, ema = start()
    list(run(net, optimizer, ema))
    trained = {name: p.clone() for name, p in net.named_parameters()}
    with ema.applied():
        assert all(not torch.equal(p, trained[name]) for name, p in net.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in net.named_parameters())


def test_a_loss_that_is_not_finite_stops_before_the_update() -> None:
    net, optimizer, _ = start()
    before = {name: p.clone() for name, p in net.named_parameters()}

    def loss(example):
        terms = flow_loss(net, example)
        return type(terms)(total=terms.total * float("nan"), video=terms.video, action=terms.action)

    with pytest.raises(FloatingPointError, match="step 1: the loss is nan"):
        next(train(loss, noised_examples(batches(), seed=0), optimizer, CONFIG))
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_examples_that_end_early_are_reported() -> None:
    net, optimizer, _ = start()
    examples = islice(noised_examples(batches(), seed=0), 2)
    with pytest.raises(InputError, match="ended before step 3 of 12"):
        list(train(partial(flow_loss, net), examples, optimizer, CONFIG))


def test_records_split_the_step_time() -> None:
    clock = Clock()
    net, optimizer, _ = start()
    source = clock.waited("data", batches())
    records = train(partial(flow_loss, net), noised_examples(source, seed=0), optimizer, CONFIG, clock=clock)
    record = next(records)
    assert record.split_s.keys() == {"data", "forward", "backward", "optimizer"}
    assert 0 < sum(record.split_s.values()) <= record.step_s
    assert record.samples_per_s == pytest.approx(4 / record.step_s)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    net, optimizer, ema = start()
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, net, optimizer, ema, num_kept=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000002", "step_00000003"]
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000002", "step_00000003"}


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    net, optimizer, _ = start()
    net.register_buffer("odd", torch.zeros(2).to_sparse())  # safetensors cannot store it
    with pytest.raises(InputError, match="checkpoint of step 1 cannot be written"):
        write_checkpoint(tmp_path, 1, net, optimizer, None)
    assert not list(tmp_path.iterdir())


def test_weights_of_another_network_are_refused_by_name(tmp_path: Path) -> None:
    net, optimizer, _ = start()
    checkpoint = write_checkpoint(tmp_path, 1, net, optimizer, None)
    net.action = nn.Linear(5, 4)
    with pytest.raises(InputError, match=r"1 tensors, the first being action.weight"):
        load_weights(checkpoint, net)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    net, optimizer, _ = start()
    checkpoint = write_checkpoint(tmp_path, 1, net, optimizer, None)
    (checkpoint / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(InputError, match="cannot be read"):
        load_checkpoint(checkpoint, net, optimizer, None)
    with pytest.raises(InputError, match="no finished checkpoint"):
        newest_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "wrong",
    [{"num_steps": 0}, {"batch_size": 6, "num_micro_batches": 4}, {"ema_decay": 1.0}, {"learning_rate": 0.0}],
)
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match=r"train\."):
        TrainConfig(**wrong)


def test_generators_differ_by_step_and_seed() -> None:
    draws = {torch.rand(1, generator=step_generator(seed, step)).item() for seed in (0, 1) for step in (1, 2)}
    assert len(draws) == 4
