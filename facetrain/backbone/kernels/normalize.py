"""Forward kernel: batch norm with given statistics, with PReLU or a residual addition."""

# N rows (batch · height · width)   C channels   P programs along N, each of which leaves a partial result

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from facetrain.backbone.kernels.launch import empty_parts, launch, size_of
from facetrain.backbone.kernels.tiles import channel, count_rows, first_row, store_statistics, tile_at


@dataclass(frozen=True)
class Normalization:
    """Statistics and affine parameters of one batch norm; each tensor (C,), float32."""

    mean_C: Tensor
    invstd_C: Tensor
    """1 / sqrt(var + eps), of the biased variance."""
    weight_C: Tensor
    bias_C: Tensor


def normalize(
    x: Tensor,
    norm: Normalization,
    *,
    slope_C: Tensor | None = None,
    residual: Tensor | None = None,
    residual_norm: Normalization | None = None,
    statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return PReLU(batch norm of x) or batch norm of x + residual, and partial statistics of the result.

    Args:
        x: activations (B, C, H, W), channels_last.
        norm: the batch norm of x.
        slope_C: PReLU's slopes, (C,); None: no PReLU.
        residual: is added to the result, of x's shape.
        residual_norm: is applied to the residual first (the shortcut's batch norm).
        statistics: whether to return partial statistics of the result, for `finish_statistics`.

    Returns:
        The result, of x's shape and dtype, and (P, 3, C) float32 or None.
    """
    rows, channels = size_of(x)
    y = torch.empty_like(x)
    parts_P3C = empty_parts(x) if statistics else None
    other = residual_norm or norm
    launch(
        _normalize, x, [x] + ([] if residual is None else [residual]), [y],
        parts_P3C if parts_P3C is not None else norm.mean_C,
        norm.mean_C, norm.invstd_C, norm.weight_C, norm.bias_C,
        norm.mean_C if slope_C is None else slope_C,
        other.mean_C, other.invstd_C, other.weight_C, other.bias_C,
        rows, channels,
        padding=1 if residual is None else 0,
        has_slope=slope_C is not None,
        has_residual=residual is not None,
        has_residual_norm=residual_norm is not None,
        has_statistics=statistics,
    )  # fmt: skip
    return y, parts_P3C


@triton.jit
def _normalize(
    x, residual, y, parts, mean, invstd, weight, bias, slope,
    residual_mean, residual_invstd, residual_weight, residual_bias, N, C, tiles,
    has_slope: tl.constexpr, has_residual: tl.constexpr, has_residual_norm: tl.constexpr,
    has_statistics: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    scale = channel(weight, C, 0.0, BC) * channel(invstd, C, 0.0, BC)
    center = channel(mean, C, 0.0, BC)
    shift = channel(bias, C, 0.0, BC)
    if has_slope:
        a = channel(slope, C, 0.0, BC)
    if has_residual_norm:
        residual_scale = channel(residual_weight, C, 0.0, BC) * channel(residual_invstd, C, 0.0, BC)
        residual_center = channel(residual_mean, C, 0.0, BC)
        shift += channel(residual_bias, C, 0.0, BC)
    origin = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BN, BC), tl.float32)
    squares = tl.zeros((BN, BC), tl.float32)
    for number in range(tiles):
        place, exists = tile_at(tl.program_id(0) * tiles + number, N, C, BN, BC)
        value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
        value = (value - center[None, :]) * scale[None, :] + shift[None, :]
        if has_slope:
            value = tl.where(value > 0, value, value * a[None, :])
        if has_residual:
            other = tl.load(residual + place, mask=exists, other=0.0).to(tl.float32)
            if has_residual_norm:
                other = (other - residual_center[None, :]) * residual_scale[None, :]
            value += other
        stored = value.to(y.dtype.element_ty)
        tl.store(y + place, stored, mask=exists)
        if has_statistics:
            # Of the rounded numbers: they are what the next batch norm reads.
            value = stored.to(tl.float32)
            if number == 0:
                origin = first_row(value, BN)
            deviation = tl.where(exists, value - origin[None, :], 0.0)
            total += deviation
            squares += deviation * deviation
    if has_statistics:
        store_statistics(
            parts, count_rows(N, tiles, BN), origin, tl.sum(total, axis=0), tl.sum(squares, axis=0), C, BC
        )
