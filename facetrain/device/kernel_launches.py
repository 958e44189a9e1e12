"""Counter of the launches of facetrain's Triton kernels, and of the bytes that they move."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class LaunchCounter:
    """Launches of the kernels, and the bytes of the tensors that they read and write, each of them once."""

    def __init__(self) -> None:
        self.launches = 0
        self.bytes = 0


_counter: LaunchCounter | None = None


@contextmanager
def shapes_only() -> Iterator[LaunchCounter]:
    """Allocate results without launching a kernel, and count what would be launched; for runs on fake tensors."""
    global _counter
    before, _counter = _counter, LaunchCounter()
    try:
        yield _counter
    finally:
        _counter = before


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, moved: int | None = None, **options: Any
) -> None:
    """Launch a kernel on a grid of programs, or count it inside `shapes_only`.

    `moved` is the number of bytes that the kernel reads and writes; None: those of all its tensors.
    """
    if _counter is None:
        kernel[grid](*arguments, **options)
        return
    if moved is None:
        moved = sum(argument.nbytes for argument in arguments if isinstance(argument, Tensor))
    _counter.launches += 1
    _counter.bytes += moved


def ceil_divide(number: int, divisor: int) -> int:
    """Return the quotient, rounded up. `triton.cdiv` costs microseconds, because it may run in a kernel too."""
    return -(-number // divisor)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; of an H100 for tensors elsewhere, which are only counted."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
