"""Launch of the kernels on activations, and its size."""

# N rows (batch · height · width)   C channels   P programs along N, each of which leaves a partial result

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from facetrain.device import kernel_launches
from facetrain.device.kernel_launches import ceil_divide, multiprocessors

BLOCK_ROWS, BLOCK_CHANNELS = 32, 64
"""Tile of one iteration: 128 contiguous bytes of each row in 16 bits. Each thread sums its own numbers of all tiles,
which are added up once at the end."""
WARPS = 4
STAGES = 2
"""Tiles in flight: the loads of the next one begin before the arithmetic of this one."""
_PROGRAMS_PER_MULTIPROCESSOR = 12
"""A multiple of 1, 2, 3, 4 and 6: however many programs the registers of a multiprocessor can hold, all programs end
in whole waves, and no wave leaves most of the GPU idle."""


def size_of(x: Tensor) -> tuple[int, int]:
    """Return (N, C) of activations (B, C, H, W)."""
    assert x.is_contiguous(memory_format=torch.channels_last), "the kernels read channels_last"
    return x.numel() // x.shape[1], x.shape[1]


def programs_along_rows(x: Tensor) -> int:
    """Return P: enough programs to fill the GPU together with those along C, and at most one for each tile."""
    rows, channels = size_of(x)
    most = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x.device) // ceil_divide(channels, BLOCK_CHANNELS)
    return min(ceil_divide(rows, BLOCK_ROWS), max(most, 1))


def empty_parts(x: Tensor) -> Tensor:
    """Make room for the partial sums of all programs, (P, 3, C)."""
    return x.new_empty((programs_along_rows(x), 3, x.shape[1]), dtype=torch.float32)


def launch(
    kernel: Any,
    x: Tensor,
    reads: Sequence[Tensor | None],
    writes: Sequence[Tensor | None],
    *arguments: object,
    **flags: bool,
) -> None:
    """Launch a kernel on the rows of x: with activations, or None for those that its flags switch off."""
    activations = [tensor for tensor in (*reads, *writes) if tensor is not None]
    assert all(size_of(tensor) == size_of(x) for tensor in activations), "all have the rows and channels of x"
    programs = programs_along_rows(x)
    kernel_launches.launch(
        kernel,
        (programs, ceil_divide(x.shape[1], BLOCK_CHANNELS)),
        *(x if tensor is None else tensor for tensor in (*reads, *writes)),
        *arguments,
        ceil_divide(ceil_divide(size_of(x)[0], BLOCK_ROWS), programs),
        moved=sum(tensor.nbytes for tensor in activations),
        **flags,
        BN=BLOCK_ROWS,
        BC=BLOCK_CHANNELS,
        STAGES=STAGES,
        num_warps=WARPS,
    )


def launch_by_channels(
    kernel: Any, channels: int, *arguments: object, moved: int, images: int = 0, **flags: bool
) -> None:
    """Launch a kernel on tiles of channels, for each image if `images` is given."""
    tiles = ceil_divide(channels, BLOCK_CHANNELS)
    kernel_launches.launch(
        kernel, (images, tiles) if images else (tiles,), *arguments,
        moved=moved, **flags, BN=BLOCK_ROWS, BC=BLOCK_CHANNELS, num_warps=WARPS,
    )  # fmt: skip
