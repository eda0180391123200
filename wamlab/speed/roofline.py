"""How long a training step takes, from operations, bytes and kernels: pure functions of counts and of limits.

A phase lasts as long as its products at the share of the peak that calls of their size reach, plus the traffic of
everything between them at the memory's bandwidth, and not less than the host needs to launch its kernels. What each
constant means and where it is from stands beside it; two were fitted to published steps (``recipes/backtest.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from wamlab.speed.peaks import DevicePeak


@dataclass(frozen=True)
class Achieved:
    """What software reaches of what hardware can do; shares of a peak unless a unit is named."""

    # cuBLAS bf16 at 700 W, 600 to 650 of 989 TFLOP/s on random data (Hopper boosts lower than its data sheet says)
    matmul: int | float = 0.62
    matmul_half_gflop: int | float = (
        10.0  # a product of this size reaches half of it: some 20 us of all 132 multiprocessors
    )
    attention: int | float = 0.35  # FlashAttention-2 on Hopper (FlashAttention-3 paper, arXiv 2407.08608: 35 %)
    convolution: int | float = 0.30  # large bf16 3-D convolutions, channels first, as implicit products
    convolution_half_gflop: int | float = 322.0  # FITTED: a convolution of this size reaches half of that
    memory: int | float = 0.80  # elementwise kernels over large tensors
    link: int | float = 0.80  # NCCL rings over NVLink; half of it over PCIe, which needs the host
    host_us: int | float = 44.0  # FITTED: host time of an eager kernel with its Python, autograd and hooks
    graph_us: int | float = 3.0  # a kernel inside a compiled block or graph
    host_link_gb_s: int | float = 25.0  # pinned copies over PCIe 4 or half-used PCIe 5
    host_optimizer_gb_s: int | float = 12.0  # one core's memory bandwidth: torchrun gives each process one thread
    host_optimizer_bytes: int | float = 48.0  # a parameter: Adam 28, norm 4, unscaling 8, widening and narrowing 8

    def with_fit(self, **values: int | float) -> Achieved:
        """Return the constants with some replaced."""
        return replace(self, **values)


@dataclass(frozen=True)
class Limits:
    """What the devices of one machine can do, in units without prefixes."""

    flops: int | float  # a second
    memory: int | float  # bytes a second
    link: int | float  # bytes a second each way
    num_devices: int
    has_nvlink: bool = True

    @classmethod
    def of(cls, num_devices: int, peak: DevicePeak) -> Limits:
        return cls(peak.bf16_tflops * 1e12, peak.memory_tb_s * 1e12, peak.link_gb_s * 1e9, num_devices, peak.has_nvlink)


@dataclass(frozen=True)
class Phase:
    """One stretch of a step on one device."""

    name: str
    matmul_flops: int | float = 0.0
    num_matmuls: int | float = 1.0
    attention_flops: int | float = 0.0
    convolution_flops: int | float = 0.0
    num_convolutions: int | float = 1.0
    bytes_moved: int | float = 0.0
    launches: int | float = 0.0  # eager kernels
    graph_launches: int | float = 0.0  # kernels of compiled code
    repeats: int = 1  # times the whole phase is run, one after the other
    is_serial: bool = False  # host and device take turns, as something in each layer waits for the device


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase by what takes them; ``seconds`` is what the phase lasts."""

    name: str
    matmul_s: int | float
    attention_s: int | float
    convolution_s: int | float
    memory_s: int | float
    host_s: int | float
    seconds: int | float

    @property
    def device_s(self) -> float:
        return self.matmul_s + self.attention_s + self.convolution_s + self.memory_s


def saturating(share: int | float, flops: int | float, calls: int | float, half_gflop: int | float) -> float:
    """Return the share of the peak that calls of a mean size reach: half of ``share`` at ``half_gflop``."""
    size = flops / max(calls, 1.0)
    return share * size / (size + half_gflop * 1e9) if size else share


def time_phase(phase: Phase, limits: Limits, achieved: Achieved) -> PhaseTime:
    """Predict how long a phase lasts."""
    a, n = achieved, phase.repeats
    matmul = saturating(a.matmul, phase.matmul_flops, phase.num_matmuls, a.matmul_half_gflop)
    convolution = saturating(a.convolution, phase.convolution_flops, phase.num_convolutions, a.convolution_half_gflop)
    parts = (
        n * phase.matmul_flops / (matmul * limits.flops),
        n * phase.attention_flops / (a.attention * limits.flops),
        n * phase.convolution_flops / (convolution * limits.flops),
        n * phase.bytes_moved / (a.memory * limits.memory),
    )
    host_s = n * (phase.launches * a.host_us + phase.graph_launches * a.graph_us) * 1e-6
    device_s = sum(parts)
    seconds = device_s + host_s if phase.is_serial else max(device_s, host_s)
    return PhaseTime(phase.name, *parts, host_s, seconds)


def time_collective(num_bytes: int | float, limits: Limits, achieved: Achieved) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter of so many whole, unsharded bytes."""
    share = (limits.num_devices - 1) / limits.num_devices
    reached = achieved.link * (1.0 if limits.has_nvlink else 0.5)
    return num_bytes * share / (reached * limits.link)


def time_host_optimizer(num_parameters: int | float, achieved: Achieved) -> float:
    """Return the seconds of Adam on the host over one rank's parameters: gradients down, update, weights up."""
    copies = num_parameters * (4 + 2) / (achieved.host_link_gb_s * 1e9)
    return copies + num_parameters * achieved.host_optimizer_bytes / (achieved.host_optimizer_gb_s * 1e9)


def time_device_optimizer(num_parameters: int | float, limits: Limits, achieved: Achieved, *, is_fused: bool) -> float:
    """Return the seconds of AdamW and clipping: 28 bytes a parameter in one pass, some three times that unfused."""
    return num_parameters * (32.0 if is_fused else 90.0) / (achieved.memory * limits.memory)


@dataclass(frozen=True)
class StepTime:
    """A predicted step: its phases, and what is not hidden behind them."""

    phases: tuple[PhaseTime, ...]
    communication_s: int | float  # all of it
    exposed_s: int | float  # what no computation hides
    optimizer_s: int | float
    data_s: int | float  # decoding, beside everything else
    notes: tuple[str, ...] = field(default=())

    @property
    def busy_s(self) -> float:
        return sum(phase.seconds for phase in self.phases) + self.exposed_s + self.optimizer_s

    @property
    def step_s(self) -> float:
        return max(self.busy_s, self.data_s)

    @property
    def stack(self) -> dict[str, float]:
        """Return seconds by cause; they add up to the step."""
        found = {"matrix products": 0.0, "attention": 0.0, "convolutions": 0.0, "memory traffic": 0.0, "host": 0.0}
        for phase in self.phases:
            found["matrix products"] += phase.matmul_s
            found["attention"] += phase.attention_s
            found["convolutions"] += phase.convolution_s
            found["memory traffic"] += phase.memory_s
            found["host"] += phase.seconds - phase.device_s
        return found | {
            "communication": self.exposed_s,
            "optimizer": self.optimizer_s,
            "data": self.step_s - self.busy_s,
        }

    @property
    def bottleneck(self) -> str:
        """Return the cause that takes most of the step."""
        return max(self.stack, key=lambda cause: self.stack[cause])


def time_step(
    phases: tuple[Phase, ...],
    limits: Limits,
    achieved: Achieved,
    *,
    gathered_bytes: int | float,
    num_units: int,
    is_overlapped: bool,
    optimizer_s: int | float,
    data_s: int | float,
) -> StepTime:
    """Predict a step; an overlapped exchange shows what the device's work cannot hide, and its first unit."""
    times = tuple(time_phase(phase, limits, achieved) for phase in phases)
    communication_s = time_collective(gathered_bytes, limits, achieved) if limits.num_devices > 1 else 0.0
    exposed_s = communication_s
    if is_overlapped:
        hidden_s = sum(phase.seconds for phase in times)
        exposed_s = max(communication_s - hidden_s, communication_s / max(num_units, 1))
    return StepTime(times, communication_s, exposed_s, optimizer_s, data_s)
