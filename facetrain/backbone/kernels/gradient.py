"""Backward kernels: the sums that a batch norm's gradient needs, the gradient itself, and sums at the border."""

# N rows (batch · height · width)   C channels   P programs along N, each of which leaves a partial result

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from facetrain.backbone.kernels.launch import empty_parts, launch, launch_by_channels, size_of
from facetrain.backbone.kernels.normalize import Normalization
from facetrain.backbone.kernels.tiles import channel, store_part, tile_at


def reduce_gradient(
    grad: Tensor, x: Tensor, norm: Normalization, *, slope_C: Tensor | None = None, recompute: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the sums that the backward pass of batch norm (and PReLU) needs, and the forward result again.

    Args:
        grad: gradient of the result, (B, C, H, W).
        x: input of the batch norm, of the same shape.
        norm: the batch norm.
        slope_C: PReLU's slopes, (C,); None: no PReLU.
        recompute: whether to return the result of the forward pass too, which was not kept.

    Returns:
        (3, C) float32 with ∂bias = Σ h, ∂weight = Σ h·x̂, ∂slope = Σ g·min(u, 0); and the result or None.
    """
    rows, channels = size_of(x)
    y = torch.empty_like(x) if recompute else None
    parts_P3C = empty_parts(x)
    launch(
        _reduce_gradient, x, [grad, x], [y],
        parts_P3C,
        *norm.arguments(), norm.mean_C if slope_C is None else slope_C,
        rows, channels,
        has_slope=slope_C is not None,
        has_result=recompute,
    )  # fmt: skip
    return parts_P3C.sum(0), y


def apply_gradient(
    grad: Tensor,
    x: Tensor,
    norm: Normalization,
    sums_3C: Tensor,
    *,
    slope_C: Tensor | None = None,
    residual: Tensor | None = None,
    sums: bool = False,
    x_is_normed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of a batch norm's input, and the sum of it over each channel.

    Args:
        grad: gradient of the result, (B, C, H, W).
        x: input of the batch norm, of the same shape.
        norm: the batch norm.
        sums_3C: Σ h and Σ h·x̂, as `reduce_gradient` returns them.
        slope_C: PReLU's slopes, (C,); None: no PReLU.
        residual: a gradient that is added, of x's shape: that of the shortcut.
        sums: whether to return the channel sums of the result as stored, (C,) float32.
        x_is_normed: whether `x` is x̂, which the forward pass has kept in place of the input.
    """
    rows, channels = size_of(x)
    grad_x = torch.empty_like(x)
    parts_P3C = empty_parts(x) if sums else None
    launch(
        _apply_gradient, x, [grad, x, residual], [grad_x],
        parts_P3C if parts_P3C is not None else norm.mean_C,
        *norm.arguments(), norm.mean_C if slope_C is None else slope_C,
        sums_3C, 1.0 / rows,
        rows, channels,
        has_slope=slope_C is not None,
        has_residual=residual is not None,
        has_sums=sums,
        is_normed=x_is_normed,
    )  # fmt: skip
    return grad_x, None if parts_P3C is None else parts_P3C[:, 0].sum(0)


def border_sums(x: Tensor) -> Tensor:
    """Return the channel sums of the first and last row, the first and last column, and the four corners of all images.

    x: (B, C, H, W), channels_last. Returns (8, C) float32, in the order top, bottom, left, right, top left, top right,
    bottom left, bottom right.
    """
    batch, channels, height, width = x.shape
    parts_B8C = x.new_empty((batch, 8, channels), dtype=torch.float32)
    moved = batch * channels * 2 * (height + width) * x.element_size()
    launch_by_channels(
        _border_sums, channels, parts_B8C, x, height, width, channels, moved=moved, images=batch
    )
    return parts_B8C.sum(0)


def finish_weight_gradient(
    by_normed: Tensor, weight: Tensor, norm: Normalization, total_O: Tensor, border_8O: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weight gradient of a 3 × 3 convolution of a batch norm's result, and that batch norm's sums.

    By the identities of `fused_iresnet`, with S[o, k] from the sums of the gradient and of its borders.

    Args:
        by_normed: weight gradient for x̂ as the input, (O, I, 3, 3), channels_last.
        weight: the convolution's weight as it was multiplied, of the same shape and layout.
        norm: the batch norm before the convolution.
        total_O: channel sums of the gradient of the convolution's result, (O,).
        border_8O: its `border_sums`.

    Returns:
        The gradient, float32 (O, I, 3, 3), and (3, I) with ∂bias, ∂weight and 0.
    """
    grad_weight = torch.empty_like(by_normed, dtype=torch.float32)
    parts_P3I = empty_parts(by_normed)
    launch(
        _finish_weight_gradient, by_normed, [by_normed, weight], [grad_weight], parts_P3I,
        norm.weight_C, norm.bias_C, total_O, border_8O, *size_of(by_normed), len(by_normed),
    )  # fmt: skip
    return grad_weight, parts_P3I.sum(0)


@triton.jit
def _reduce_gradient(
    grad, x, y, parts, mean, invstd, weight, bias, slope, N, C, tiles,
    has_slope: tl.constexpr, has_result: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    center, inverse = channel(mean, C, BC), channel(invstd, C, BC)
    w, b = channel(weight, C, BC), channel(bias, C, BC)
    if has_slope:
        a = channel(slope, C, BC)
    # Each thread adds to numbers of its own; the rows of a tile are added up once, after the last tile.
    by_bias = tl.zeros((BN, BC), tl.float32)
    by_weight = tl.zeros((BN, BC), tl.float32)
    by_slope = tl.zeros((BN, BC), tl.float32)
    for number in tl.range(0, tiles, num_stages=STAGES):
        place, exists = tile_at(tl.program_id(0) * tiles + number, N, C, BN, BC)
        g = tl.load(grad + place, mask=exists, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
        normed = (value - center[None, :]) * inverse[None, :]
        if has_slope or has_result:
            u = normed * w[None, :] + b[None, :]
        if has_slope:
            # The sign of u decides as in the forward pass, with u in float32 and not as the kernel has stored it.
            by_slope += tl.where(u > 0, 0.0, g * u)
            g = tl.where(u > 0, g, g * a[None, :])
            if has_result:
                u = tl.where(u > 0, u, u * a[None, :])
        if has_result:
            tl.store(y + place, u.to(y.dtype.element_ty), mask=exists)
        by_bias += g
        by_weight += g * normed
    store_part(parts, 0, tl.sum(by_bias, axis=0), C, BC)
    store_part(parts, 1, tl.sum(by_weight, axis=0), C, BC)
    store_part(parts, 2, tl.sum(by_slope, axis=0), C, BC)


@triton.jit
def _apply_gradient(
    grad, x, residual, grad_x, parts, mean, invstd, weight, bias, slope, gradient_sums, share, N, C, tiles,
    has_slope: tl.constexpr, has_residual: tl.constexpr, has_sums: tl.constexpr, is_normed: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    center, inverse = channel(mean, C, BC), channel(invstd, C, BC)
    w, b = channel(weight, C, BC), channel(bias, C, BC)
    mean_grad = channel(gradient_sums, C, BC) * share
    mean_product = channel(gradient_sums + C, C, BC) * share
    if has_slope:
        a = channel(slope, C, BC)
    total = tl.zeros((BN, BC), tl.float32)
    for number in tl.range(0, tiles, num_stages=STAGES):
        place, exists = tile_at(tl.program_id(0) * tiles + number, N, C, BN, BC)
        g = tl.load(grad + place, mask=exists, other=0.0).to(tl.float32)
        normed = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
        if not is_normed:
            normed = (normed - center[None, :]) * inverse[None, :]
        if has_slope:
            g = tl.where(normed * w[None, :] + b[None, :] > 0, g, g * a[None, :])
        value = (g - mean_grad[None, :] - normed * mean_product[None, :]) * (w * inverse)[None, :]
        if has_residual:
            value += tl.load(residual + place, mask=exists, other=0.0).to(tl.float32)
        stored = value.to(grad_x.dtype.element_ty)
        tl.store(grad_x + place, stored, mask=exists)
        if has_sums:
            # Of the numbers as stored: the convolution's gradients are computed from these.
            total += tl.where(exists, stored.to(tl.float32), 0.0)
    if has_sums:
        store_part(parts, 0, tl.sum(total, axis=0), C, BC)


@triton.jit
def _border_sums(parts, x, H, W, C, BC: tl.constexpr, BN: tl.constexpr):
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    known = column < C
    # 64 bits: a batch can have more than 2^31 numbers.
    image = x + tl.program_id(0).to(tl.int64) * H * W * C
    out = parts + tl.program_id(0) * 8 * C + column
    for edge in tl.static_range(4):
        # Of row 0, row H − 1, column 0, column W − 1: how many pixels, from which on, how far apart.
        length = W if edge < 2 else H
        start = (H - 1) * W if edge == 1 else (W - 1 if edge == 3 else 0)
        stride = 1 if edge < 2 else W
        total = tl.zeros((BC,), tl.float32)
        for first in range(0, length, BN):
            number = first + tl.arange(0, BN)
            place = (start + number * stride)[:, None] * C + column[None, :]
            exists = (number[:, None] < length) & known[None, :]
            total += tl.sum(tl.load(image + place, mask=exists, other=0.0).to(tl.float32), axis=0)
        tl.store(out + edge * C, total, mask=known)
    for corner in tl.static_range(4):
        pixel = (H - 1) * W * (corner // 2) + (W - 1) * (corner % 2)
        value = tl.load(image + pixel * C + column, mask=known, other=0.0).to(tl.float32)
        tl.store(out + (4 + corner) * C, value, mask=known)


@triton.jit
def _finish_weight_gradient(
    by_normed, weight, grad_weight, parts, norm_weight, norm_bias, total, border, N, C, outputs, tiles,
    BN: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A row is an output channel o and a tap k; a column is an input channel.
    w, b = channel(norm_weight, C, BC), channel(norm_bias, C, BC)
    by_bias = tl.zeros((BN, BC), tl.float32)
    by_weight = tl.zeros((BN, BC), tl.float32)
    for number in tl.range(0, tiles, num_stages=STAGES):
        index = tl.program_id(0) * tiles + number
        place, exists = tile_at(index, N, C, BN, BC)
        row = index * BN + tl.arange(0, BN)
        known = row < N
        o, vertical, horizontal = row // 9, row % 9 // 3, row % 3
        # The tap above the center reads padding in the first row of the image, and so on; corners are taken off twice.
        outside_rows, outside_columns = known & (vertical != 1), known & (horizontal != 1)
        s = tl.load(total + o, mask=known, other=0.0)
        s -= tl.load(border + vertical // 2 * outputs + o, mask=outside_rows, other=0.0)
        s -= tl.load(border + (2 + horizontal // 2) * outputs + o, mask=outside_columns, other=0.0)
        corner = 4 + vertical // 2 * 2 + horizontal // 2
        s += tl.load(border + corner * outputs + o, mask=outside_rows & outside_columns, other=0.0)
        by = tl.load(by_normed + place, mask=exists, other=0.0).to(tl.float32)
        factor = tl.load(weight + place, mask=exists, other=0.0).to(tl.float32)
        tl.store(grad_weight + place, by * w[None, :] + s[:, None] * b[None, :], mask=exists)
        by_bias += factor * s[:, None]
        by_weight += factor * by
    store_part(parts, 0, tl.sum(by_bias, axis=0), C, BC)
    store_part(parts, 1, tl.sum(by_weight, axis=0), C, BC)
    store_part(parts, 2, tl.zeros((BC,), tl.float32), C, BC)
