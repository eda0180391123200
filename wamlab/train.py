"""The one training loop: an iterator of ``StepRecord``s.

What other frameworks put into callbacks, a user puts into the body of their ``for``::

    for record in train(partial(flow_loss, net), examples, optimizer, TrainConfig(num_steps=1000)):
        run.log(asdict(record))

A step depends on nothing but the weights, the optimiser's state, the step number and its examples, so a run
that starts again from a checkpoint with the examples of the next step continues bit for bit.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from wamlab.errors import InputError, check_range
from wamlab.flow import NoiseConfig, with_noise
from wamlab.model.lora import LoraConfig
from wamlab.speed.clock import Clock, measure_memory_gib
from wamlab.speed.muon import Muon
from wamlab.speed.random_states import random_states, restore_random
from wamlab.speed.ranks import Ranks
from wamlab.speed.step_rule import StepRule
from wamlab.speed.update import clip_gradients, set_rate
from wamlab.types import Batch, FlowExample, Loss, LossTerms, StepRecord

TakeStep = Callable[[int], Sequence[float]]  # does a step in so many micro-batches

OPTIMIZERS = ("adamw", "muon", "adamw8bit")


@dataclass(frozen=True)
class TrainConfig:
    """Optimiser, schedule and length of a run (defaults: DreamZero's recipe, spec 5)."""

    num_steps: int = 1000
    batch_size: int = 8  # samples per optimiser step on each process
    num_micro_batches: int = 1  # gradient accumulation: the batch is cut into so many parts
    learning_rate: float = 1e-5
    warmup_fraction: float = 0.05  # of num_steps, linear from 0
    final_rate_fraction: float = 0.0  # of learning_rate, at the end of the cosine
    beta1: float = 0.95
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 1e-5  # matrices only, never biases, norms or modulation
    max_gradient_norm: float = 1.0
    on_nan: str = "stop"  # a loss or gradient that is no number ends the run; "skip" leaves such steps out, counted
    max_norm_ratio: float = 0.0  # leave steps out whose gradient norm is so many times the latest median; 0: none
    max_skipped: int = 10  # of the latest 100 steps; more end the run
    ema_decay: float = 0.0  # 0 keeps no average of the trained weights
    optimizer: str = "adamw"  # "muon" for hidden matrices, or "adamw8bit": a byte a weight for each average
    lora: LoraConfig | None = None  # train adapters beside frozen weights; None: train the weights
    frozen: tuple[str, ...] = ()  # patterns of names of parameters not to train, e.g. "blocks.*.ffn.*"
    has_bf16: bool = True  # bf16 autocast where the device computes bf16 natively
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("train", self, 1, math.inf, "num_steps", "batch_size", "num_micro_batches")
        check_range("train", self, 0, math.inf, "seed", "weight_decay")
        check_range("train", self, 1e-12, 1, "learning_rate", "epsilon")
        check_range("train", self, 1e-6, math.inf, "max_gradient_norm")
        check_range("train", self, 0, math.inf, "max_norm_ratio", "max_skipped")
        check_range("train", self, 0, 1, "warmup_fraction", "final_rate_fraction")
        check_range("train", self, 0, 0.999999, "beta1", "beta2", "ema_decay")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f'train.optimizer is "{self.optimizer}": give one of {", ".join(OPTIMIZERS)}')
        if self.on_nan not in ("stop", "skip"):
            raise InputError(f'train.on_nan is "{self.on_nan}": give stop or skip')
        if 0 < self.max_norm_ratio <= 1:
            raise InputError(f"train.max_norm_ratio is {self.max_norm_ratio}: give more than 1, or 0 for none")
        if self.batch_size % self.num_micro_batches:
            raise InputError(
                f"train.batch_size {self.batch_size} does not divide into {self.num_micro_batches} "
                "micro-batches: give a divisor as train.num_micro_batches"
            )


def make_optimizer(net: nn.Module, config: TrainConfig, *, is_fused: bool = True) -> Optimizer:
    """Return the optimiser over what is trained, with weight decay on matrices only, those of adapters among them.

    Muon takes the two-axis weights of the blocks and leaves all others to AdamW. The 8-bit kind is bitsandbytes'
    (arXiv 2110.02861); it keeps tensors of fewer than 4096 values in float32.
    """
    trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
    matrices = [p for name, p in trainable.items() if p.ndim >= 2 and not name.endswith(("modulation", ".b"))]
    kept = {id(p) for p in matrices}
    others = [p for p in trainable.values() if id(p) not in kept]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise InputError("every parameter is frozen: take a pattern out of train.frozen")
    settings: dict[str, Any] = {
        "lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon,
    }  # fmt: skip
    if config.optimizer == "adamw":
        return AdamW(groups, **settings, fused=is_fused)
    if config.optimizer == "muon":
        hidden = {id(p) for name, p in trainable.items() if name.startswith("blocks.") and p.ndim == 2}
        others = [{**group, "params": [p for p in group["params"] if id(p) not in hidden]} for group in groups]
        return Muon(
            [p for p in matrices if id(p) in hidden],
            others,
            **settings,
            weight_decay=config.weight_decay,
            fused=is_fused,
        )
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError as error:
        raise InputError(f"bitsandbytes cannot be imported ({error}): run pip install -e '.[adamw8bit]'") from error
    return AdamW8bit(groups, **settings)


def cosine_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of the update that makes ``step`` (1-based): linear warm-up, then a cosine."""
    num_warmup = max(1, round(config.warmup_fraction * config.num_steps))
    if step <= num_warmup:
        return config.learning_rate * step / num_warmup
    progress = min(1.0, (step - num_warmup) / max(1, config.num_steps - num_warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_rate_fraction + (1 - config.final_rate_fraction) * cosine)


def step_generator(seed: int, step: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the random generator of one step: the same for a run that was interrupted before it."""
    return torch.Generator(device).manual_seed((seed * 1_000_003 + step) % 2**63)


def noised_examples(
    batches: Iterable[Batch],
    *,
    seed: int,
    first_step: int = 0,
    config: NoiseConfig | None = None,
    ranks: Ranks | None = None,
) -> Iterator[FlowExample]:
    """Draw the noise of each batch from its own step's generator; ``first_step`` counts finished steps.

    Several processes draw that of their joint batch, and each takes its part: what a sample gets depends on its place
    in the joint batch, not on how many processes there are.
    """
    ranks = ranks or Ranks()
    for step, batch in enumerate(batches, first_step + 1):
        generator = step_generator(seed, step, batch.latents.device)
        yield with_noise(batch, generator, config, part=ranks.rank, num_parts=ranks.world_size)


def has_native_bf16(device: torch.device | str) -> bool:
    """Say whether bf16 is computed in hardware; on a CPU without it autocast costs time."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if kind == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
    return False


def autocast(device: torch.device | str, *, has_bf16: bool) -> AbstractContextManager:
    """Return the precision context of forward passes: bf16 where asked for and native, else float32."""
    if has_bf16 and has_native_bf16(device):
        return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
    return nullcontext()


class Ema:
    """An exponential moving average of a network's trainable weights."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {n: p.detach().clone() for n, p in net.named_parameters() if p.requires_grad}
        self._net = net

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights; early steps move faster, so that the start is forgotten."""
        decay = min(self.decay, (1 + step) / (10 + step))
        parameters = dict(self._net.named_parameters())
        weights: list[Tensor] = [parameters[name] for name in self.average]
        get_ema_multi_avg_fn(decay)(list(self.average.values()), weights, step)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the network for the body of a ``with`` statement."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        parameters = dict(self._net.named_parameters())
        for name, average in self.average.items():
            held = parameters[name].detach().clone()
            parameters[name].copy_(average)
            average.copy_(held)


def train(
    loss: Loss,
    examples: Iterable,
    optimizer: Optimizer,
    config: TrainConfig,
    *,
    first_step: int = 0,
    ema: Ema | None = None,
    clock: Clock | None = None,
    ranks: Ranks | None = None,
    set_sync: Callable[[bool], None] | None = None,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    guard: Callable[[int, Any, TakeStep], Sequence[float]] | None = None,
    rule: StepRule | None = None,
    scale: Callable[[Any], float] | None = None,
) -> Iterator[StepRecord]:
    """Take steps ``first_step + 1 .. config.num_steps``, yielding what each one did.

    ``loss`` is a mean over the samples of an example; ``examples`` yields things that can be sliced along
    their samples (``types.Samples``). A loss that is not finite raises ``FloatingPointError`` before the update, or
    leaves the step out, as the config says; ``rule`` may know the steps before these. Of several processes with a
    sharded network each gives its part of the batch; ``set_sync`` is told before each micro-batch whether gradients
    are to be summed over processes after it (after the last one only).
    ``wrap`` takes forward and backward of a micro-batch as one function of trees of tensors, e.g. to capture it.
    ``guard`` is given a step's number, its example and what takes the step in so many micro-batches, and returns what
    that returns; where memory fails before the update it may take the step again in another way.
    ``scale`` is asked after a step's last micro-batch by what its gradients and losses are multiplied, for sums whose
    divisor is known at the end only.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clock, ranks = clock or Clock(parameters[0].device), ranks or Ranks()
    rule = rule or StepRule(config.on_nan, config.max_skipped, config.max_norm_ratio)
    device = clock.device
    if wrap is None:
        both = partial(_forward_backward, loss, config, device, clock.measured)
    else:  # nothing of the host, clocks included, may be in what is captured
        both = clock.timed("forward and backward", wrap(partial(_forward_backward, loss, config, device, None)))
    source = iter(islice(examples, config.num_steps - first_step))

    def take_step(step: int, example: Any, num_micro_batches: int) -> Sequence[float]:
        """Do all of a step; return the total, video and action loss and the gradient norm."""
        terms = _accumulate(both, example, num_micro_batches, set_sync)
        if scale is not None:
            factor = scale(example)
            terms = [term * factor for term in terms]
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        with clock.measured("optimizer"):
            gradient_norm = clip_gradients(parameters, config.max_gradient_norm)
            means = ranks.mean(torch.stack(terms))
            done = torch.stack([*means, gradient_norm.to(means)]).tolist()  # waits once
            if reason := rule.judge(step, done[0], done[-1]):
                warnings.warn(f"step {step} is left out: {reason}", stacklevel=2)
                optimizer.zero_grad(set_to_none=True)
                return done
            set_rate(optimizer, cosine_rate(step, config))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if ema is not None:
                ema.update(step)
        return done

    for step in range(first_step + 1, config.num_steps + 1):
        start_s = time.perf_counter()
        example = next(source, None)
        if example is None:
            raise InputError(f"the examples ended before step {step} of {config.num_steps}: give an endless iterator")
        take, states = partial(take_step, step, example), random_states() if rule.may_skip else ()
        num_skipped = rule.num_skipped
        total, video, action, norm = take(config.num_micro_batches) if guard is None else guard(step, example, take)
        if rule.num_skipped > num_skipped:
            restore_random(states)
        split_s = clock.take()
        yield StepRecord(
            step=step,
            loss=total,
            video_loss=video,
            action_loss=action,
            gradient_norm=norm,
            learning_rate=cosine_rate(step, config),
            num_samples=len(example) * ranks.world_size,
            step_s=time.perf_counter() - start_s,
            split_s=split_s,
            memory_gib=measure_memory_gib(device),
            num_skipped=rule.num_skipped,
        )


def _accumulate(
    both: Callable[..., Sequence[Tensor]], example: Any, num_micro_batches: int, set_sync: Callable[[bool], None] | None
) -> list[Tensor]:
    """Run forward and backward over the micro-batches; return the mean total, video and action loss."""
    size = math.ceil(len(example) / num_micro_batches)
    weighted: list[Sequence[Tensor]] = []
    for start in range(0, len(example), size):
        part = example[start : start + size] if size < len(example) else example
        if set_sync is not None:
            set_sync(start + size >= len(example))
        weighted.append(both(part, len(part) / len(example)))
    return [torch.stack(values).sum() for values in zip(*weighted, strict=True)]


def _forward_backward(
    loss: Loss,
    config: TrainConfig,
    device: torch.device,
    measured: Callable[[str], AbstractContextManager] | None,
    part: Any,
    share: int | float,
) -> Sequence[Tensor]:
    """Add a micro-batch's gradients, weighted by its share of the batch; return its losses, weighted alike."""
    measured = measured or (lambda _: nullcontext())
    with measured("forward"), autocast(device, has_bf16=config.has_bf16):
        terms: LossTerms = loss(part)
    with measured("backward"):
        (terms.total * share).backward()
    return [term.detach() * share for term in (terms.total, terms.video, terms.action)]
