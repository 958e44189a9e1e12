"""Peak rates of the machine: matrix products and memory copies, measured on all ranks at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from facetrain.distributed import collectives

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MachinePeak:
    """Rates of all ranks together."""

    flops: float
    """Operations per second in products of square matrices; a multiply-add counts as two."""
    bytes: float
    """Bytes read and written per second, in copies that do not fit in any cache."""


def measure_peak(precision: str, device: torch.device, seconds: float = 0.4) -> MachinePeak:
    """Return the rates of the fastest product and of the fastest copy. Collective.

    Repeats each of the two for `seconds`: other processes on the machine can only slow a measurement
    down, so the fastest repetition is the closest to the hardware.
    """
    # On a GPU, a product of 8192 x 8192 fills all multiprocessors, and 1 GiB exceeds the L2 cache; on a CPU,
    # 2048 x 2048 takes some 20 ms, and 256 MiB exceeds the last cache.
    side, size = (8192, 1 << 30) if device.type == "cuda" else (2048, 1 << 28)
    a, b = (torch.randn(side, side, device=device).to(_DTYPES[precision]) for _ in range(2))
    product = torch.empty_like(a)
    source, target = (torch.zeros(size // 4, device=device) for _ in range(2))
    times = (
        _fastest_seconds(lambda: torch.mm(a, b, out=product), device, seconds),
        _fastest_seconds(lambda: target.copy_(source), device, seconds),
    )
    # A copy reads and writes each byte.
    rates = torch.tensor([2 * side**3 / times[0], 2 * size / times[1]], dtype=torch.float64)
    return MachinePeak(*collectives.sum_(rates).tolist())


def _fastest_seconds(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    # All ranks start together: they share memory bandwidth, and on a CPU the cores.
    collectives.barrier()
    work()
    fastest, until = float("inf"), time.perf_counter() + seconds
    while True:  # At least once, also if a busy machine takes longer than `seconds` for it.
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        end = time.perf_counter()
        fastest = min(fastest, end - start)
        if end >= until:
            return fastest


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
