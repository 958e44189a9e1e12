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

    def arguments(self) -> tuple[Tensor, ...]:
        """Return the tensors in the order in which the kernels take them."""
        return self.mean_C, self.invstd_C, self.weight_C, self.bias_C


def normalize(
    x: Tensor,
    norm: Normalization,
    *,
    slope_C: Tensor | None = None,
    residual: Tensor | None = None,
    residual_norm: Normalization | None = None,
    statistics: bool = False,
    normed: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return PReLU(batch norm of x) or batch norm of x + residual, partial statistics of the result, and x̂.

    Args:
        x: activations (B, C, H, W), channels_last.
        norm: the batch norm of x.
        slope_C: PReLU's slopes, (C,); None: no PReLU.
        residual: is added to the result, of x's shape.
        residual_norm: is applied to the residual first (the shortcut's batch norm).
        statistics: whether to return partial statistics of the result, for `finish_statistics`.
        normed: whether to return the batch norm of x without weight and bias.

    Returns:
        The result, of x's shape and dtype; (P, 3, C) float32 or None; x̂, of the same shape and dtype, or None.
    """
    rows, channels = size_of(x)
    y, normed_x = torch.empty_like(x), torch.empty_like(x) if normed else None
    parts_P3C = empty_parts(x) if statistics else None
    launch(
        _normalize, x, [x, residual], [y, normed_x],
        parts_P3C if parts_P3C is not None else norm.mean_C,
        *norm.arguments(), norm.mean_C if slope_C is None else slope_C, *(residual_norm or norm).arguments(),
        rows, channels,
        has_slope=slope_C is not None,
        has_residual=residual is not None,
        has_residual_norm=residual_norm is not None,
        has_statistics=statistics,
        has_normed=normed,
    )  # fmt: skip
    return y, parts_P3C, normed_x


@triton.jit
def _normalize(
    x, residual, y, normed, parts, mean, invstd, weight, bias, slope,
    residual_mean, residual_invstd, residual_weight, residual_bias, N, C, tiles,
    has_slope: tl.constexpr, has_residual: tl.constexpr, has_residual_norm: tl.constexpr,
    has_statistics: tl.constexpr, has_normed: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    center, inverse = channel(mean, C, BC), channel(invstd, C, BC)
    scale, shift = channel(weight, C, BC), channel(bias, C, BC)
    if has_slope:
        a = channel(slope, C, BC)
    if has_residual_norm:
        residual_scale = channel(residual_weight, C, BC) * channel(residual_invstd, C, BC)
        residual_center = channel(residual_mean, C, BC)
        shift += channel(residual_bias, C, BC)
    origin = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BN, BC), tl.float32)
    squares = tl.zeros((BN, BC), tl.float32)
    for number in tl.range(0, tiles, num_stages=STAGES):
        place, exists = tile_at(tl.program_id(0) * tiles + number, N, C, BN, BC)
        value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
        # The mean first: where it is far above the deviation, scale·x + shift would cancel.
        value = (value - center[None, :]) * inverse[None, :]
        if has_normed:
            tl.store(normed + place, value.to(normed.dtype.element_ty), mask=exists)
        value = value * scale[None, :] + shift[None, :]
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
            # Sums of deviations from the program's first row, and of their squares, which do not cancel.
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
