"""Launch of the kernels on activations, and its size."""

# N rows (batch · height · width)   C channels   P programs along N, each of which leaves a partial result

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from facetrain.device.kernel_launches import is_only_counted

BLOCK_ROWS, BLOCK_CHANNELS = 32, 64
"""Tile of one iteration: 128 contiguous bytes of each row in 16 bits. Each thread sums its own numbers of all tiles,
which are added up once at the end."""
WARPS = 4
_MOST_PROGRAMS = 1024
"""Programs along N at most: enough to fill a GPU of 150 processors with 64 channels, few enough to add up quickly."""


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
