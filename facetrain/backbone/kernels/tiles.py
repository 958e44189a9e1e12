"""Parts of the kernels: tiles of rows and channels, and partial results of a program."""

# N rows   C channels   BN, BC rows and channels of a tile

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(index, N, C, BN: tl.constexpr, BC: tl.constexpr):
    """Return the offsets (BN, BC), of 64 bits, of a tile's numbers, and which of them exist."""
    row = index.to(tl.int64) * BN + tl.arange(0, BN)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    return row[:, None] * C + column[None, :], (row[:, None] < N) & (column[None, :] < C)


@triton.jit
def channel(pointer, C, BC: tl.constexpr):
    """Return the numbers of this program's channels, (BC,), in float32."""
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    return tl.load(pointer + column, mask=column < C, other=0.0).to(tl.float32)


@triton.jit
def store_part(parts, number, value, C, BC: tl.constexpr):
    """Store one of this program's three partial results, (BC,)."""
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    tl.store(parts + (tl.program_id(0) * 3 + number) * C + column, value, mask=column < C)


@triton.jit
def first_row(value, BN: tl.constexpr):
    """Return row 0 of a tile, (BC,)."""
    return tl.sum(tl.where(tl.arange(0, BN)[:, None] == 0, value, 0.0), axis=0)


@triton.jit
def count_rows(N, tiles, BN: tl.constexpr):
    """Return how many rows this program has, float32."""
    start = tl.minimum(tl.program_id(0).to(tl.int64) * tiles * BN, N)
    stop = tl.minimum((tl.program_id(0).to(tl.int64) + 1) * tiles * BN, N)
    return (stop - start).to(tl.float32)


@triton.jit
def store_statistics(parts, count, origin, total, squares, C, BC: tl.constexpr):
    """Store count, mean and sum of squared deviations from sums of deviations from an origin near the mean."""
    safe = tl.maximum(count, 1.0)
    store_part(parts, 0, count + tl.zeros((BC,), tl.float32), C, BC)
    store_part(parts, 1, origin + total / safe, C, BC)
    store_part(parts, 2, tl.maximum(squares - total * total / safe, 0.0), C, BC)
