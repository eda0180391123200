"""A small network whose activations outweigh its weights, and runs of it on a device whose memory others take."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from wamlab.speed.choice import StepChoice
from wamlab.speed.guard import Guard
from wamlab.speed.ladder import Ladder, Move, plain_rungs
from wamlab.speed.live_memory import LiveMemory, tensors_of
from wamlab.train import TrainConfig, make_optimizer, train
from wamlab.types import LossTerms, Samples

WIDTH, NUM_BLOCKS, BATCH = 16, 2, 4
CONFIG = TrainConfig(num_steps=6, batch_size=BATCH, learning_rate=1e-2, warmup_fraction=0.1, has_bf16=False)


@dataclass(frozen=True)
class Pair(Samples):
    seen: Tensor
    wanted: Tensor


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.qkv(tokens).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        tokens = tokens + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return tokens + F.dropout(self.fall(F.gelu(self.rise(tokens))), self.dropout, training=self.dropout > 0)


class Small(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(NUM_BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


def examples(lengths: tuple[int, ...]) -> Iterator[Pair]:
    """Yield pairs that depend on their index only; lengths take turns."""
    index = 0
    while True:
        generator = torch.Generator().manual_seed(index)
        shape = (BATCH, lengths[index % len(lengths)], WIDTH)
        yield Pair(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        index += 1


class NotedMemory(LiveMemory):
    """Remembers the peaks of every attempt: up to the update, and from there."""

    def __init__(self, held: list[Tensor], *, budget_bytes: int | None) -> None:
        super().__init__(held, budget_bytes=budget_bytes)
        self.peaks: list[int] = []

    def take_peak(self) -> int:
        self.peaks.append(super().take_peak())
        return self.peaks[-1]


class Scripted:
    """A device that says what it is told to: for code whose operations cannot be followed, and several processes."""

    def __init__(self, peak: Callable[[], int] = lambda: 0) -> None:
        self.peak, self.live_bytes = peak, 0

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...

    def hold(self, tensors: Iterable[Tensor]) -> None: ...

    def take_peak(self) -> int:
        return self.peak()


def undisturbed(step: int, place: str, memory: LiveMemory) -> None:
    """Leave the device as it is."""


@dataclass
class Trial:
    """A run: what its steps did, where its weights ended, and what was decided."""

    budget_bytes: int | None = None
    rungs: Sequence[StepChoice] = plain_rungs(BATCH, NUM_BLOCKS)
    config: TrainConfig = CONFIG
    lengths: tuple[int, ...] = (32,)
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)  # of the ladder
    disturb: Callable[[int, str, LiveMemory], object] = undisturbed  # before each attempt's forward, backward, update
    make: Callable[[nn.Module, TrainConfig], Optimizer] = make_optimizer
    is_guarded: bool = True
    moves: list[Move] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def run(self) -> Trial:
        torch.manual_seed(5)
        self.net = Small(self.dropout)
        self.optimizer = self.make(self.net, self.config)
        self.memory = NotedMemory(tensors_of(self.net), budget_bytes=self.budget_bytes)
        self.step = 1

        def loss(pair: Pair) -> LossTerms:
            self.disturb(self.step, "forward", self.memory)
            total = F.mse_loss(self.net(pair.seen), pair.wanted)
            self.disturb(self.step, "backward", self.memory)
            return LossTerms(total, total.detach(), total.detach())

        def before_update(*_: Any) -> None:
            self.disturb(self.step, "update", self.memory)

        self.optimizer.register_step_pre_hook(before_update)
        ladder = Ladder(self.rungs, **self.options)
        guard = Guard(self.net, self.optimizer, ladder, self.memory, tell=self.moves.append)
        for record in train(
            loss, examples(self.lengths), self.optimizer, self.config, guard=guard if self.is_guarded else None
        ):
            self.losses.append(record.loss)
            self.norms.append(record.gradient_norm)
            self.step = record.step + 1
        return self

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes alive in the last step."""
        return max(self.memory.peaks[-2:])

    @property
    def num_failures(self) -> int:
        return sum(move.reason.startswith("out of memory") for move in self.moves)

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.net.parameters()]


def peaks_of_rungs(**options: Any) -> list[int]:
    """Return the most bytes that a step takes on each rung once the optimiser has its averages."""
    config = replace(CONFIG, num_steps=2)
    rungs = plain_rungs(BATCH, NUM_BLOCKS)
    return [Trial(rungs=(rung,), config=config, **options).run().peak_bytes for rung in rungs]


def squeezed(seed: int, peaks: list[int]) -> Trial:
    """Run on a device whose free memory changes at random moments, never below what is taken nor the leanest rung."""
    draw = random.Random(seed)
    moments = {(draw.randint(1, CONFIG.num_steps), draw.choice(("forward", "backward"))) for _ in range(4)}

    def drawn_bytes() -> int:
        return round(draw.uniform(1.01 * min(peaks), 1.05 * max(peaks)))

    def disturb(step: int, place: str, memory: LiveMemory) -> None:
        if (step, place) in moments:
            moments.discard((step, place))
            memory.budget_bytes = max(memory.live_bytes, drawn_bytes())

    options = {"patience": draw.randint(1, 3), "max_failures": draw.randint(1, 3)}
    return Trial(drawn_bytes(), options=options, disturb=disturb).run()
