"""What this process's share of the machine reaches at best: matrix products, and copies in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from facetrain.distributed import collectives

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Machine:
    """Rates of all ranks together, measured on all at the same time."""

    flops: float
    """Operations a second in products of square matrices; a multiply-add counts two."""
    bytes: float
    """Bytes read and written a second, in copies that no cache holds."""


def measure_machine(precision: str, device: torch.device, seconds: float = 0.4) -> Machine:
    """Measure the best of as many products and copies as fit into `seconds` each. Collective."""
    side, size = (8192, 1 << 30) if device.type == "cuda" else (2048, 1 << 28)
    a, b = (torch.randn(side, side, device=device).to(_DTYPES[precision]) for _ in range(2))
    product = torch.empty_like(a)
    there, here = (torch.zeros(size // 4, device=device) for _ in range(2))
    times = (
        _fastest(lambda: torch.mm(a, b, out=product), device, seconds),
        _fastest(lambda: here.copy_(there), device, seconds),
    )
    rates = torch.tensor([2 * side**3 / times[0], 2 * size / times[1]], dtype=torch.float64)
    return Machine(*collectives.sum_(rates).tolist())


def _fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    collectives.barrier()
    until, least = time.perf_counter() + seconds, float("inf")
    work()
    while time.perf_counter() < until:
        wait_for(device)
        since = time.perf_counter()
        work()
        wait_for(device)
        least = min(least, time.perf_counter() - since)
    return least


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
