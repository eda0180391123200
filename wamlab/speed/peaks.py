"""What devices can do at most, as published and as measured here."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from wamlab.errors import InputError


@dataclass(frozen=True)
class DevicePeak:
    """Published limits of one accelerator; dense, without sparsity."""

    name: str
    bf16_tflops: int | float  # 1e12 operations a second with float32 accumulation
    memory_tb_s: int | float  # 1e12 bytes a second
    memory_gb: int | float  # 1e9 bytes
    link_gb_s: int | float  # 1e9 bytes a second each way between the devices of one machine
    has_nvlink: bool
    source: str


PEAKS = {
    peak.name: peak
    for peak in (
        DevicePeak("H100", 989.4, 3.35, 80, 450, True, "NVIDIA H100 data sheet, SXM5"),
        DevicePeak("H100-PCIe", 756, 2.0, 80, 64, False, "NVIDIA H100 data sheet, PCIe"),
        DevicePeak("H100-NVL", 835, 3.9, 94, 300, True, "NVIDIA H100 data sheet, NVL"),
        DevicePeak("H200", 989.4, 4.8, 141, 450, True, "NVIDIA H200 data sheet, SXM"),
        DevicePeak("H800", 989.4, 3.35, 80, 200, True, "NVIDIA H800 data sheet; NVLink halved"),
        DevicePeak("H20", 148, 4.0, 96, 450, True, "NVIDIA H20 data sheet"),
        DevicePeak("A100", 312, 2.039, 80, 300, True, "NVIDIA A100 data sheet, 80 GB SXM"),
        DevicePeak("A800", 312, 2.039, 80, 200, True, "NVIDIA A800 data sheet, 80 GB; NVLink reduced"),
        DevicePeak("A6000", 154.8, 0.768, 48, 32, False, "NVIDIA RTX A6000 data sheet, half of the sparse figure"),
        DevicePeak("L40S", 362, 0.864, 48, 32, False, "NVIDIA L40S data sheet, half of the sparse figure"),
        DevicePeak("RTX4090", 165.2, 1.008, 24, 32, False, "NVIDIA Ada architecture paper, appendix A"),
        DevicePeak("RTX5090", 209.5, 1.792, 32, 64, False, "NVIDIA RTX Blackwell architecture paper, appendix A"),
        DevicePeak("B200", 2250, 8.0, 180, 900, True, "NVIDIA DGX B200 data sheet, half of the sparse figure"),
        DevicePeak("GB200", 2500, 8.0, 186, 900, True, "NVIDIA GB200 data sheet, half of the sparse figure"),
    )
}


def find_peak(name: str) -> DevicePeak:
    """Return a device by name; an unknown one raises with the nearest names."""
    plain = {_plain(known): known for known in PEAKS}
    if (found := plain.get(_plain(name))) is not None:
        return PEAKS[found]
    near = [plain[key] for key in difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.4)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(PEAKS)}"
    raise InputError(f'no peak of a device "{name}" is known: {hint}')


def peak_of(device: torch.device | str) -> DevicePeak | None:
    """Return the published limits of a CUDA device of this machine; None for others and unknown ones."""
    if torch.device(device).type != "cuda":
        return None
    return named_peak(torch.cuda.get_device_name(device))


def named_peak(driver_name: str) -> DevicePeak | None:
    """Return the limits that belong to a name as the driver gives it, such as "NVIDIA H100 80GB HBM3"."""
    words = _plain(driver_name)
    fitting = [name for name in PEAKS if all(_plain(part) in words for part in name.split("-"))]
    return PEAKS[max(fitting, key=len)] if fitting else None


def parse_devices(text: str) -> tuple[int, DevicePeak]:
    """Read "8xH100"; a name alone is one device."""
    found = re.fullmatch(r"(?:(\d+)\s*[x*×])?\s*(\S.*)", text.strip())
    if not found or (found[1] is not None and int(found[1]) < 1):
        raise InputError(f'"{text}" names no devices: give a number and a kind, such as 8xH100')
    return int(found[1] or 1), find_peak(found[2])


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def measure_matmul_peak(
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    size: int | None = None,
    seconds: int | float = 0.2,
) -> float:
    """Measure the most FLOP/s that square products reach here; ``size`` None fits the device (8192 or 1024)."""
    device = torch.device(device)
    size = size or (8192 if device.type == "cuda" else 1024)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / measure_call_s(lambda: torch.mm(left, right, out=out), device, seconds=seconds)


def measure_call_s(call: Callable[[], object], device: torch.device | str, *, seconds: int | float = 0.2) -> float:
    """Return the shortest time of a call, repeated for so long after a first, untimed one."""
    is_cuda = torch.device(device).type == "cuda"

    def finish() -> None:
        if is_cuda:
            torch.cuda.synchronize(device)

    call()
    finish()
    best, end_s = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        call()
        finish()
        best = min(best, time.perf_counter() - start_s)
    return best
