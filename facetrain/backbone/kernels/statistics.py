"""Kernels for the mean and variance of a batch: partial sums, and their combination."""

# N rows (batch · height · width)   C channels   P programs along N, each of which leaves a partial result

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from facetrain.backbone.kernels.launch import empty_parts, launch, launch_by_channels, size_of
from facetrain.backbone.kernels.tiles import count_rows, first_row, store_statistics, tile_at


def partial_statistics(x: Tensor) -> Tensor:
    """Return count, mean and sum of squared deviations of each channel of x (B, C, H, W), by program; (P, 3, C)."""
    rows, channels = size_of(x)
    parts_P3C = empty_parts(x)
    launch(_statistics, x, [x], [], parts_P3C, rows, channels)
    return parts_P3C


def finish_statistics(
    parts_P3C: Tensor, eps: float, *, running: tuple[Tensor, Tensor], momentum: float
) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(biased variance + eps) from partial statistics; (C,) float32 each.

    Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983, equation 2.1: a difference of large
    sums of squares never occurs. `running` holds running mean and variance (C,), which are moved by `momentum` toward
    the mean and the unbiased variance.
    """
    programs, _, channels = parts_P3C.shape
    found_2C = parts_P3C.new_empty((2, channels))
    launch_by_channels(
        _finish_statistics,
        channels,
        parts_P3C,
        found_2C,
        *running,
        programs,
        channels,
        eps,
        momentum,
        moved=0,
    )
    mean_C, invstd_C = found_2C.unbind()
    return mean_C, invstd_C


@triton.jit
def _statistics(x, parts, N, C, tiles, BN: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):
    # Deviations from the program's first row: their squares do not cancel where |mean| is far above the deviation.
    place, exists = tile_at(tl.program_id(0) * tiles, N, C, BN, BC)
    origin = first_row(tl.load(x + place, mask=exists, other=0.0).to(tl.float32), BN)
    total = tl.zeros((BN, BC), tl.float32)
    squares = tl.zeros((BN, BC), tl.float32)
    for number in tl.range(0, tiles, num_stages=STAGES):
        place, exists = tile_at(tl.program_id(0) * tiles + number, N, C, BN, BC)
        value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
        deviation = tl.where(exists, value - origin[None, :], 0.0)
        total += deviation
        squares += deviation * deviation
    store_statistics(
        parts, count_rows(N, tiles, BN), origin, tl.sum(total, axis=0), tl.sum(squares, axis=0), C, BC
    )


@triton.jit
def _finish_statistics(
    parts, found, running_mean, running_var, P, C, eps, momentum, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    known = column < C
    count = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BC,), tl.float32)
    for first in range(0, P, BN):
        part = first + tl.arange(0, BN)
        place = part[:, None] * 3 * C + column[None, :]
        exists = (part[:, None] < P) & known[None, :]
        counts = tl.load(parts + place, mask=exists, other=0.0)
        count += tl.sum(counts, axis=0)
        total += tl.sum(counts * tl.load(parts + place + C, mask=exists, other=0.0), axis=0)
    mean = total / tl.maximum(count, 1.0)
    # A second pass over the parts, which are in the cache: deviations from the mean of all need that mean first.
    squares = tl.zeros((BC,), tl.float32)
    for first in range(0, P, BN):
        part = first + tl.arange(0, BN)
        place = part[:, None] * 3 * C + column[None, :]
        exists = (part[:, None] < P) & known[None, :]
        counts = tl.load(parts + place, mask=exists, other=0.0)
        apart = tl.load(parts + place + C, mask=exists, other=0.0) - mean[None, :]
        deviation = tl.load(parts + place + 2 * C, mask=exists, other=0.0)
        squares += tl.sum(deviation + counts * apart * apart, axis=0)
    var = squares / tl.maximum(count, 1.0)
    tl.store(found + column, mean, mask=known)
    tl.store(found + C + column, 1.0 / tl.sqrt(var + eps), mask=known)
    # As torch does: the batch is normalized by the biased variance, and the running one is unbiased.
    before = tl.load(running_mean + column, mask=known, other=0.0)
    tl.store(running_mean + column, before + momentum * (mean - before), mask=known)
    before = tl.load(running_var + column, mask=known, other=0.0)
    unbiased = squares / tl.maximum(count - 1.0, 1.0)
    tl.store(running_var + column, before + momentum * (unbiased - before), mask=known)
