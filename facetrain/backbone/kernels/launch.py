"""Launch of the kernels on activations, and its size."""

# N rows (batch · height · width)   C channels   P programs along N, each of which leaves a partial result

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

BLOCK_ROWS, BLOCK_CHANNELS = 32, 64
"""Tile of one iteration: 128 contiguous bytes of each row in 16 bits. Each thread sums its own numbers of all tiles,
which are added up once at the end."""
WARPS = 4
_MOST_PROGRAMS = 1024
"""Programs along N at most: enough to fill a GPU of 150 processors with 64 channels, few enough to add up quickly."""


class LaunchCounter:
    """Launches of these kernels, and the bytes of the activations that they read and write."""

    def __init__(self) -> None:
        self.launches = 0
        self.bytes = 0


_counter: LaunchCounter | None = None


@contextmanager
def shapes_only() -> Iterator[LaunchCounter]:
    """Allocate results without launching a kernel, and count what would be launched.

    For forecasts and tests, which run the network on fake tensors.
    """
    global _counter
    before, _counter = _counter, LaunchCounter()
    try:
        yield _counter
    finally:
        _counter = before


def is_only_counted(moved_bytes: int) -> bool:
    """Count a launch that moves so many bytes, and return True, inside `shapes_only`; return False outside."""
    if _counter is None:
        return False
    _counter.launches += 1
    _counter.bytes += moved_bytes
    return True


def size_of(x: Tensor) -> tuple[int, int]:
    """Return (N, C) of activations (B, C, H, W)."""
    assert x.is_contiguous(memory_format=torch.channels_last), "the kernels read channels_last"
    return x.numel() // x.shape[1], x.shape[1]


def _programs(x: Tensor) -> int:
    rows, _ = size_of(x)
    return min(-(-rows // BLOCK_ROWS), _MOST_PROGRAMS)


def empty_parts(x: Tensor) -> Tensor:
    """Make room for the partial sums of all programs, (P, 3, C)."""
    return x.new_empty((_programs(x), 3, x.shape[1]), dtype=torch.float32)


def launch(
    kernel: Any,
    x: Tensor,
    reads: list[Tensor],
    writes: list[Tensor],
    *arguments: object,
    padding: int = 0,
    **flags: bool,
) -> None:
    """Launch a kernel on the rows of x: activations first, then `padding` times x for activations that are absent."""
    for tensor in (*reads, *writes):
        size_of(tensor)
    if is_only_counted(sum(tensor.numel() * tensor.element_size() for tensor in (*reads, *writes))):
        return
    programs = _programs(x)
    tiles = triton.cdiv(size_of(x)[0], BLOCK_ROWS)
    kernel[programs, triton.cdiv(x.shape[1], BLOCK_CHANNELS)](
        *reads,
        *[x] * padding,
        *writes,
        *arguments,
        triton.cdiv(tiles, programs),
        **flags,
        BN=BLOCK_ROWS,
        BC=BLOCK_CHANNELS,
        num_warps=WARPS,
    )
