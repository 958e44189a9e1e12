"""Batch normalization, PReLU and residual addition as Triton kernels that read each activation once.

An IResNet at 112 × 112 is bound by memory: on a GPU, batch norm, PReLU and the residual addition move more bytes than
the convolutions. These kernels fuse them. All tensors are activations in channels_last layout, seen as rows (N, C) with
N = batch · height · width. Sums are float32, whatever the dtype of the activations, and are formed in a fixed order
without atomic operations: the results of two runs are equal bit for bit.

The forward pass of batch norm with batch statistics, with PReLU slope a (Ioffe and Szegedy, arXiv 1502.03167; He et
al., arXiv 1502.01852):

    x̂ = (x − mean) / sqrt(var + eps)      u = w·x̂ + b      y = max(u, 0) + a·min(u, 0)

With g the gradient of y, h = g where u > 0 and a·g elsewhere, and M the mean over N (over all ranks for SyncBN):

    ∂w = Σ h·x̂      ∂b = Σ h      ∂a = Σ g·min(u, 0)      ∂x = w / sqrt(var + eps) · (h − M[h] − x̂·M[h·x̂])
"""

# N rows (batch · height · width)   C channels   P programs along N, each of which leaves a partial result

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ROWS, _BLOCK_CHANNELS = 32, 64
"""Tile of one iteration: 128 contiguous bytes of each row in 16 bits. Each thread sums its own numbers of all tiles,
which are added up once at the end."""
_WARPS = 4
_MOST_PROGRAMS = 1024
"""Programs along N at most: enough to fill a GPU of 150 processors with 64 channels, few enough to add up quickly."""


@dataclass(frozen=True)
class Normalization:
    """Statistics and affine parameters of one batch norm; each tensor (C,), float32."""

    mean_C: Tensor
    invstd_C: Tensor
    """1 / sqrt(var + eps), of the biased variance."""
    weight_C: Tensor
    bias_C: Tensor


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


def why_unusable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the kernels cannot be used on a device, "" if they can.

    Compiles and launches them once, and compares them with PyTorch's batch norm and PReLU on a small batch: Triton
    needs a C compiler and Python's headers besides a GPU, which a container may lack.
    """
    interpreted = not isinstance(_normalize, triton.JITFunction)
    if not interpreted and device.type != "cuda":
        return f"the kernels need a GPU, and this is {device.type}"
    if not interpreted and torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need a GPU of compute capability 8.0 or higher"
    try:
        error = _error_beside_torch(device, dtype)
    except Exception as failure:  # of Triton, the C compiler or the driver: they have no common type
        return " ".join(str(failure).split())[:200] or type(failure).__name__
    # Rounding gives 2e-6 (float32), 1e-3 (float16) and 8e-3 (bfloat16).
    return "" if error < 0.03 else f"the kernels differ from PyTorch's batch norm by {error:.2g}"


def _error_beside_torch(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of a forward and backward pass on (2, 64, 5, 5), in the norm of each result."""
    generator = torch.Generator().manual_seed(0)
    x, grad, residual = (torch.randn(2, 64, 5, 5, generator=generator) for _ in range(3))
    x, grad, residual = (
        t.to(device, dtype).contiguous(memory_format=torch.channels_last) for t in (x, grad, residual)
    )
    weight_C, bias_C, slope_C = (torch.linspace(low, 1.0, 64, device=device) for low in (0.5, -1.0, 0.1))
    leaves = [t.float().requires_grad_() for t in (x, weight_C, bias_C, slope_C)]
    y_true = F.prelu(F.batch_norm(leaves[0], None, None, leaves[1], leaves[2], training=True), leaves[3])
    grads_true = torch.autograd.grad(y_true, leaves, grad.float())
    mean_C, _, invstd_C = finish_statistics(partial_statistics(x), 1e-5)
    norm = Normalization(mean_C, invstd_C, weight_C, bias_C)
    y, _ = normalize(x, norm, slope_C=slope_C)
    z, _ = normalize(x, norm, residual=residual, residual_norm=norm, statistics=True)
    moments_C = mean_C, 1 / invstd_C**2, weight_C, bias_C
    z_true = F.batch_norm(x.float(), *moments_C, eps=0.0) + F.batch_norm(
        residual.float(), *moments_C, eps=0.0
    )
    sums_3C, again = reduce_gradient(grad, x, norm, slope_C=slope_C, recompute=True)
    grad_x, _ = apply_gradient(grad, x, norm, sums_3C, x.numel() // 64, slope_C=slope_C)
    assert again is not None
    pairs = [(y, y_true), (again, y_true), (z, z_true), (grad_x, grads_true[0])]
    pairs += list(zip((sums_3C[1], sums_3C[0], sums_3C[2]), grads_true[1:], strict=True))
    return max(((found.float() - true).norm() / true.norm()).item() for found, true in pairs)


def partial_statistics(x: Tensor) -> Tensor:
    """Return count, mean and sum of squared deviations of each channel of x (B, C, H, W), by program; (P, 3, C)."""
    rows, channels = _size(x)
    parts_P3C = _parts(x)
    _launch(_statistics, x, [x], [], parts_P3C, rows, channels)
    return parts_P3C


def finish_statistics(
    parts_P3C: Tensor, eps: float, *, running: tuple[Tensor, Tensor] | None = None, momentum: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and 1 / sqrt(variance + eps) from partial statistics; (C,) float32 each.

    Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983, equation 2.1: a difference of large
    sums of squares never occurs. `running` holds running mean and variance (C,), which are moved by `momentum` toward
    the mean and the unbiased variance.
    """
    programs, _, channels = parts_P3C.shape
    found_3C = parts_P3C.new_empty((3, channels))
    if _counter is not None:
        _counter.launches += 1
    else:
        running_mean, running_var = running or (found_3C, found_3C)
        _finish_statistics[(triton.cdiv(channels, _BLOCK_CHANNELS),)](
            parts_P3C, found_3C, running_mean, running_var, programs, channels, eps, momentum,
            has_running=running is not None, BP=_BLOCK_ROWS, BC=_BLOCK_CHANNELS, num_warps=_WARPS,
        )  # fmt: skip
    mean_C, var_C, invstd_C = found_3C.unbind()
    return mean_C, var_C, invstd_C


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
    rows, channels = _size(x)
    y = torch.empty_like(x)
    parts_P3C = _parts(x) if statistics else None
    other = residual_norm or norm
    _launch(
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
    rows, channels = _size(x)
    y = torch.empty_like(x) if recompute else None
    parts_P3C = _parts(x)
    _launch(
        _reduce_gradient, x, [grad, x], [] if y is None else [y],
        parts_P3C,
        norm.mean_C, norm.invstd_C, norm.weight_C, norm.bias_C,
        norm.mean_C if slope_C is None else slope_C,
        rows, channels,
        padding=0 if recompute else 1,
        has_slope=slope_C is not None,
        has_result=recompute,
    )  # fmt: skip
    return parts_P3C.sum(0), y


def apply_gradient(
    grad: Tensor,
    x: Tensor,
    norm: Normalization,
    sums_3C: Tensor,
    count: int,
    *,
    slope_C: Tensor | None = None,
    residual: Tensor | None = None,
    sums: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of a batch norm's input, and the sum of it over each channel.

    Args:
        grad: gradient of the result, (B, C, H, W).
        x: input of the batch norm, of the same shape.
        norm: the batch norm.
        sums_3C: Σ h and Σ h·x̂ of all ranks whose statistics the batch norm used, as `reduce_gradient` returns them.
        count: rows over which these sums go.
        slope_C: PReLU's slopes, (C,); None: no PReLU.
        residual: a gradient that is added, of x's shape: that of the shortcut.
        sums: whether to return the channel sums of the result as stored, (C,) float32.
    """
    rows, channels = _size(x)
    grad_x = torch.empty_like(x)
    parts_P3C = _parts(x) if sums else None
    _launch(
        _apply_gradient, x, [grad, x] + ([] if residual is None else [residual]), [grad_x],
        parts_P3C if parts_P3C is not None else norm.mean_C,
        norm.mean_C, norm.invstd_C, norm.weight_C, norm.bias_C,
        norm.mean_C if slope_C is None else slope_C,
        sums_3C, 1.0 / count,
        rows, channels,
        padding=1 if residual is None else 0,
        has_slope=slope_C is not None,
        has_residual=residual is not None,
        has_sums=sums,
    )  # fmt: skip
    return grad_x, None if parts_P3C is None else parts_P3C[:, 0].sum(0)


def border_sums(x: Tensor) -> Tensor:
    """Return the channel sums of the first and last row, the first and last column, and the four corners of all images.

    x: (B, C, H, W), channels_last. Returns (8, C) float32, in the order top, bottom, left, right, top left, top right,
    bottom left, bottom right.
    """
    batch, channels, height, width = x.shape
    parts_P8C = x.new_empty((batch, 8, channels), dtype=torch.float32)
    if _counter is not None:
        _counter.launches += 1
        _counter.bytes += batch * channels * 2 * (height + width) * x.element_size()
    else:
        _border_sums[(batch, triton.cdiv(channels, _BLOCK_CHANNELS))](
            parts_P8C, x, height, width, channels, BC=_BLOCK_CHANNELS, BN=_BLOCK_ROWS, num_warps=_WARPS
        )
    return parts_P8C.sum(0)


def _size(x: Tensor) -> tuple[int, int]:
    """Return (N, C) of activations (B, C, H, W)."""
    assert x.is_contiguous(memory_format=torch.channels_last), "the kernels read channels_last"
    return x.numel() // x.shape[1], x.shape[1]


def _programs(x: Tensor) -> int:
    rows, _ = _size(x)
    return min(-(-rows // _BLOCK_ROWS), _MOST_PROGRAMS)


def _parts(x: Tensor) -> Tensor:
    """Make room for the partial sums of all programs, (P, 3, C)."""
    return x.new_empty((_programs(x), 3, x.shape[1]), dtype=torch.float32)


def _launch(
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
        _size(tensor)
    if _counter is not None:
        _counter.launches += 1
        _counter.bytes += sum(tensor.numel() * tensor.element_size() for tensor in (*reads, *writes))
        return
    programs = _programs(x)
    tiles = triton.cdiv(_size(x)[0], _BLOCK_ROWS)
    kernel[programs, triton.cdiv(x.shape[1], _BLOCK_CHANNELS)](
        *reads,
        *[x] * padding,
        *writes,
        *arguments,
        triton.cdiv(tiles, programs),
        **flags,
        BN=_BLOCK_ROWS,
        BC=_BLOCK_CHANNELS,
        num_warps=_WARPS,
    )


@triton.jit
def _tile(tile, N, C, BN: tl.constexpr, BC: tl.constexpr):
    """Return offsets (BN, BC) of a tile's numbers and which of them exist; offsets are 64 bits wide."""
    row = tile.to(tl.int64) * BN + tl.arange(0, BN)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    return row[:, None] * C + column[None, :], (row[:, None] < N) & (column[None, :] < C)


@triton.jit
def _channel(pointer, C, other, BC: tl.constexpr):
    """Return the numbers of this program's channels, (BC,)."""
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    return tl.load(pointer + column, mask=column < C, other=other).to(tl.float32)


@triton.jit
def _store_part(parts, number, value, C, BC: tl.constexpr):
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    tl.store(parts + (tl.program_id(0) * 3 + number) * C + column, value, mask=column < C)


@triton.jit
def _first_row(value, BN: tl.constexpr):
    """Return row 0 of a tile, (BC,)."""
    return tl.sum(tl.where(tl.arange(0, BN)[:, None] == 0, value, 0.0), axis=0)


@triton.jit
def _rows(N, tiles, BN: tl.constexpr):
    """Return how many rows this program has, float32."""
    start = tl.minimum(tl.program_id(0).to(tl.int64) * tiles * BN, N)
    stop = tl.minimum((tl.program_id(0).to(tl.int64) + 1) * tiles * BN, N)
    return (stop - start).to(tl.float32)


@triton.jit
def _store_statistics(parts, count, origin, total, squares, C, BC: tl.constexpr):
    """Store count, mean and sum of squared deviations from sums of deviations from an origin near the mean."""
    safe = tl.maximum(count, 1.0)
    _store_part(parts, 0, count + tl.zeros((BC,), tl.float32), C, BC)
    _store_part(parts, 1, origin + total / safe, C, BC)
    _store_part(parts, 2, tl.maximum(squares - total * total / safe, 0.0), C, BC)


@triton.jit
def _statistics(x, parts, N, C, tiles, BN: tl.constexpr, BC: tl.constexpr):
    # Deviations from the program's first row: their squares do not cancel where |mean| is far above the deviation.
    place, exists = _tile(tl.program_id(0) * tiles, N, C, BN, BC)
    origin = _first_row(tl.load(x + place, mask=exists, other=0.0).to(tl.float32), BN)
    total = tl.zeros((BN, BC), tl.float32)
    squares = tl.zeros((BN, BC), tl.float32)
    for number in range(tiles):
        place, exists = _tile(tl.program_id(0) * tiles + number, N, C, BN, BC)
        value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
        deviation = tl.where(exists, value - origin[None, :], 0.0)
        total += deviation
        squares += deviation * deviation
    _store_statistics(
        parts, _rows(N, tiles, BN), origin, tl.sum(total, axis=0), tl.sum(squares, axis=0), C, BC
    )


@triton.jit
def _finish_statistics(
    parts, found, running_mean, running_var, P, C, eps, momentum,
    has_running: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    known = column < C
    count = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BC,), tl.float32)
    for first in range(0, P, BP):
        part = first + tl.arange(0, BP)
        place = part[:, None] * 3 * C + column[None, :]
        exists = (part[:, None] < P) & known[None, :]
        counts = tl.load(parts + place, mask=exists, other=0.0)
        count += tl.sum(counts, axis=0)
        total += tl.sum(counts * tl.load(parts + place + C, mask=exists, other=0.0), axis=0)
    mean = total / tl.maximum(count, 1.0)
    squares = tl.zeros((BC,), tl.float32)
    for first in range(0, P, BP):
        part = first + tl.arange(0, BP)
        place = part[:, None] * 3 * C + column[None, :]
        exists = (part[:, None] < P) & known[None, :]
        counts = tl.load(parts + place, mask=exists, other=0.0)
        apart = tl.load(parts + place + C, mask=exists, other=0.0) - mean[None, :]
        deviation = tl.load(parts + place + 2 * C, mask=exists, other=0.0)
        squares += tl.sum(deviation + counts * apart * apart, axis=0)
    var = squares / tl.maximum(count, 1.0)
    tl.store(found + column, mean, mask=known)
    tl.store(found + C + column, var, mask=known)
    tl.store(found + 2 * C + column, 1.0 / tl.sqrt(var + eps), mask=known)
    if has_running:
        before = tl.load(running_mean + column, mask=known, other=0.0)
        tl.store(running_mean + column, before + momentum * (mean - before), mask=known)
        before = tl.load(running_var + column, mask=known, other=0.0)
        unbiased = squares / tl.maximum(count - 1.0, 1.0)
        tl.store(running_var + column, before + momentum * (unbiased - before), mask=known)


@triton.jit
def _normalize(
    x, residual, y, parts, mean, invstd, weight, bias, slope,
    residual_mean, residual_invstd, residual_weight, residual_bias, N, C, tiles,
    has_slope: tl.constexpr, has_residual: tl.constexpr, has_residual_norm: tl.constexpr,
    has_statistics: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    scale = _channel(weight, C, 0.0, BC) * _channel(invstd, C, 0.0, BC)
    center = _channel(mean, C, 0.0, BC)
    shift = _channel(bias, C, 0.0, BC)
    if has_slope:
        a = _channel(slope, C, 0.0, BC)
    if has_residual_norm:
        residual_scale = _channel(residual_weight, C, 0.0, BC) * _channel(residual_invstd, C, 0.0, BC)
        residual_center = _channel(residual_mean, C, 0.0, BC)
        shift += _channel(residual_bias, C, 0.0, BC)
    origin = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BN, BC), tl.float32)
    squares = tl.zeros((BN, BC), tl.float32)
    for number in range(tiles):
        place, exists = _tile(tl.program_id(0) * tiles + number, N, C, BN, BC)
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
                origin = _first_row(value, BN)
            deviation = tl.where(exists, value - origin[None, :], 0.0)
            total += deviation
            squares += deviation * deviation
    if has_statistics:
        _store_statistics(
            parts, _rows(N, tiles, BN), origin, tl.sum(total, axis=0), tl.sum(squares, axis=0), C, BC
        )


@triton.jit
def _reduce_gradient(
    grad, x, y, parts, mean, invstd, weight, bias, slope, N, C, tiles,
    has_slope: tl.constexpr, has_result: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    center, inverse = _channel(mean, C, 0.0, BC), _channel(invstd, C, 0.0, BC)
    w, b = _channel(weight, C, 0.0, BC), _channel(bias, C, 0.0, BC)
    if has_slope:
        a = _channel(slope, C, 0.0, BC)
    by_bias = tl.zeros((BN, BC), tl.float32)
    by_weight = tl.zeros((BN, BC), tl.float32)
    by_slope = tl.zeros((BN, BC), tl.float32)
    for number in range(tiles):
        place, exists = _tile(tl.program_id(0) * tiles + number, N, C, BN, BC)
        g = tl.load(grad + place, mask=exists, other=0.0).to(tl.float32)
        normed = (tl.load(x + place, mask=exists, other=0.0).to(tl.float32) - center[None, :]) * inverse[
            None, :
        ]
        if has_slope or has_result:
            u = normed * w[None, :] + b[None, :]
        if has_slope:
            by_slope += tl.where(u > 0, 0.0, g * u)
            g = tl.where(u > 0, g, g * a[None, :])
            if has_result:
                u = tl.where(u > 0, u, u * a[None, :])
        if has_result:
            tl.store(y + place, u.to(y.dtype.element_ty), mask=exists)
        by_bias += g
        by_weight += g * normed
    _store_part(parts, 0, tl.sum(by_bias, axis=0), C, BC)
    _store_part(parts, 1, tl.sum(by_weight, axis=0), C, BC)
    _store_part(parts, 2, tl.sum(by_slope, axis=0), C, BC)


@triton.jit
def _apply_gradient(
    grad, x, residual, grad_x, parts, mean, invstd, weight, bias, slope, gradient_sums, share, N, C, tiles,
    has_slope: tl.constexpr, has_residual: tl.constexpr, has_sums: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    center, inverse = _channel(mean, C, 0.0, BC), _channel(invstd, C, 0.0, BC)
    w, b = _channel(weight, C, 0.0, BC), _channel(bias, C, 0.0, BC)
    mean_grad = _channel(gradient_sums, C, 0.0, BC) * share
    mean_product = _channel(gradient_sums + C, C, 0.0, BC) * share
    if has_slope:
        a = _channel(slope, C, 0.0, BC)
    total = tl.zeros((BN, BC), tl.float32)
    for number in range(tiles):
        place, exists = _tile(tl.program_id(0) * tiles + number, N, C, BN, BC)
        g = tl.load(grad + place, mask=exists, other=0.0).to(tl.float32)
        normed = (tl.load(x + place, mask=exists, other=0.0).to(tl.float32) - center[None, :]) * inverse[
            None, :
        ]
        if has_slope:
            g = tl.where(normed * w[None, :] + b[None, :] > 0, g, g * a[None, :])
        value = (g - mean_grad[None, :] - normed * mean_product[None, :]) * (w * inverse)[None, :]
        if has_residual:
            value += tl.load(residual + place, mask=exists, other=0.0).to(tl.float32)
        stored = value.to(grad_x.dtype.element_ty)
        tl.store(grad_x + place, stored, mask=exists)
        if has_sums:
            total += tl.where(exists, stored.to(tl.float32), 0.0)
    if has_sums:
        _store_part(parts, 0, tl.sum(total, axis=0), C, BC)


@triton.jit
def _border_sums(parts, x, H, W, C, BC: tl.constexpr, BN: tl.constexpr):
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    known = column < C
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
