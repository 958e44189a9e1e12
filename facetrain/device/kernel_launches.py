"""Launch of facetrain's Triton kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on a grid of programs; tests without a GPU replace this function."""
    kernel[grid](*arguments, **options)


def ceil_divide(number: int, divisor: int) -> int:
    """Return the quotient, rounded up. `triton.cdiv` costs microseconds, because it may run in a kernel too."""
    return -(-number // divisor)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
