"""Triton kernels of the logits: cosine product and exponential in one pass, so that no logit is written to memory.

A tile of logits z = s·e·w/|w| is computed on tensor cores with float32 sums. |z| ≤ s, so its exponentials are normal
numbers, and need no running maximum (`class_chunk.BoundedChunk`). They are summed for each sample, or written for the
two matrix products of the backward pass, which cuBLAS computes, or both.
"""

# G gathered batch   D embedding   C classes of a chunk   T tiles of the classes   X columns, padded

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from facetrain.device.kernel_launches import ceil_divide, launch, power_of_2

_ROWS, _DEPTH = 128, 64
"""Tile of a program: samples, and numbers of an embedding per product."""
_WARPS, _STAGES = 8, 3
_STRIDE = 64
"""Rows of exponentials begin at multiples of this, so that they are written 16 bytes at a time for any number of
classes, and the matrix library reads them so."""
_CENTERS, _CENTER_WARPS = 4, 4
"""Centers that a program of `_narrow` copies, and its warps."""
_LOG2_E = tl.constexpr(math.log2(math.e))
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class LogitFactors(NamedTuple):
    """Inputs of a chunk's logits."""

    factor_GD: Tensor
    """Unit embeddings times the scale, in the dtype of the products."""
    factor_CD: Tensor
    """Class centers, in the same dtype."""
    inverse_norm_C: Tensor
    """1/|w|, float32."""
    position_G: Tensor
    """Position of each sample's target class, which is left out; int64."""
    start: int
    """Position of the first class of this chunk."""
    limit: float
    """A logit above it is replaced by 0; infinity disables that."""


def add_statistics(statistics_2G: Tensor, factors: LogitFactors) -> Tensor:
    """Return each sample's largest logit and Σ exp(logit) with this chunk added; float32 (2, G).

    The result is deterministic: the sums of the tiles are added in one order.
    """
    sums_T2G = _empty_sums(factors)
    _run(factors, sums_T2G, None)
    return _joined(statistics_2G, sums_T2G)


def add_and_keep(statistics_2G: Tensor, factors: LogitFactors) -> tuple[Tensor, Tensor]:
    """Return the results of `add_statistics` and of `exponentials`."""
    sums_T2G, exponential_GX = _empty_sums(factors), _empty_exponentials(factors)
    _run(factors, sums_T2G, exponential_GX)
    return _joined(statistics_2G, sums_T2G), exponential_GX[:, : len(factors.factor_CD)]


def exponentials(factors: LogitFactors) -> Tensor:
    """Return exp(logit)/|w| of each pair, 0 for target and filtered classes; (G, C) in the dtype of the factors.

    The rows are padded in memory, by zeros.
    """
    exponential_GX = _empty_exponentials(factors)
    _run(factors, None, exponential_GX)
    return exponential_GX[:, : len(factors.factor_CD)]


def narrowed(weight_CD: Tensor, dtype: torch.dtype, inverse_norm_C: Tensor) -> Tensor:
    """Return float32 centers in `dtype`, and write 1/|w| of each, float32 (C,), in one pass over them."""
    classes, size = weight_CD.shape
    narrow_CD = weight_CD.new_empty(weight_CD.shape, dtype=dtype)
    launch(
        _narrow,
        (ceil_divide(classes, _CENTERS),),
        narrow_CD,
        inverse_norm_C,
        weight_CD.contiguous(),
        classes,
        D=size,
        BC=_CENTERS,
        BD=power_of_2(size),
        num_warps=_CENTER_WARPS,
    )
    return narrow_CD


def _empty_sums(factors: LogitFactors) -> Tensor:
    tiles = ceil_divide(len(factors.factor_CD), _columns(factors.factor_GD.device))
    return factors.inverse_norm_C.new_empty((tiles, 2, len(factors.factor_GD)))


def _empty_exponentials(factors: LogitFactors) -> Tensor:
    stride = ceil_divide(len(factors.factor_CD), _STRIDE) * _STRIDE
    return factors.factor_GD.new_empty((len(factors.factor_GD), stride))


def _joined(statistics_2G: Tensor, sums_T2G: Tensor) -> Tensor:
    largest_G = torch.maximum(statistics_2G[0], sums_T2G[:, 0].amax(0))
    return torch.stack([largest_G, statistics_2G[1] + sums_T2G[:, 1].sum(0)])


def _run(factors: LogitFactors, sums_T2G: Tensor | None, exponential_GX: Tensor | None) -> None:
    """Fill the tensors that are given."""
    factor_GD, factor_CD, inverse_norm_C, position_G, start, limit = factors
    (rows, size), classes = factor_GD.shape, len(factor_CD)
    columns = _columns(factor_GD.device)
    # In one dimension, because a second one is limited to 65,535 programs, which is 2^23 classes.
    launch(
        _exponentials,
        (ceil_divide(rows, _ROWS) * ceil_divide(classes, columns),),
        factor_GD if exponential_GX is None else exponential_GX,
        inverse_norm_C if sums_T2G is None else sums_T2G,
        factor_GD.contiguous(),
        factor_CD.contiguous(),
        inverse_norm_C,
        position_G,
        start,
        rows,
        classes,
        0 if exponential_GX is None else exponential_GX.shape[1],
        limit,
        D=size,
        filtered=limit < math.inf,
        has_sums=sums_T2G is not None,
        has_exponentials=exponential_GX is not None,
        BG=_ROWS,
        BC=columns,
        # Tensor cores need products of at least 16 numbers.
        BD=min(_DEPTH, max(power_of_2(size), 16)),
        num_warps=_WARPS,
        num_stages=_STAGES,
    )


def _columns(device: torch.device) -> int:
    """Return how many classes a tile has."""
    # On Hopper, four warps together multiply a tile of twice the width (wgmma). On Blackwell that width needs more
    # registers than there are: Triton 3.7 keeps the sums in the tensor memory, but copies all of them out at once.
    return 256 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 else 128


# The numbers of samples and classes differ from chunk to chunk and from run to run. Not specialized by them, the kernel
# that trains is the one that the self-test has tested.
@triton.jit(do_not_specialize=["start", "G", "C"])
def _exponentials(
    exponential, sums, embedding, center, inverse_norm, position, start, G, C, stride, limit,
    D: tl.constexpr, filtered: tl.constexpr, has_sums: tl.constexpr, has_exponentials: tl.constexpr,
    BG: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    # Neighboring programs have the same centers, which are then in the cache.
    row_tiles = tl.cdiv(G, BG)
    tile = tl.program_id(0) // row_tiles
    row, column = tl.program_id(0) % row_tiles * BG + tl.arange(0, BG), tile * BC + tl.arange(0, BC)
    has_row, has_column = row < G, column < C

    # 32 bits suffice for offsets into the embeddings, which are smaller than a chunk's logits (2^26).
    logit = tl.zeros((BG, BC), dtype=tl.float32)
    for begin in range(0, D, BD):
        depth = begin + tl.arange(0, BD)
        row_mask, column_mask = has_row[:, None], has_column[:, None]
        if D % BD:
            row_mask, column_mask = row_mask & (depth[None, :] < D), column_mask & (depth[None, :] < D)
        e = tl.load(embedding + row[:, None] * D + depth[None, :], mask=row_mask, other=0.0)
        w = tl.load(center + column[:, None].to(tl.int64) * D + depth[None, :], mask=column_mask, other=0.0)
        if _IS_INTERPRETED:
            # The interpreter would multiply the bit patterns of bfloat16 numbers as integers.
            e, w = e.to(tl.float32), w.to(tl.float32)
        logit = tl.dot(e, tl.trans(w), logit, input_precision="ieee")
    inverse = tl.load(inverse_norm + column, mask=has_column, other=0.0)
    logit *= inverse[None, :]

    target_column = tl.load(position + row, mask=has_row, other=-1) - start
    counts = has_column[None, :] & (column[None, :] != target_column[:, None])
    if filtered:
        # A comparison with NaN is false: NaN stays, and the loss shows it.
        counts = counts & ((logit > limit) == 0)
    logit = tl.where(counts, logit, float("-inf"))
    value = tl.exp2(logit * _LOG2_E)
    if has_sums:
        total = tl.sum(value, axis=1)
        if filtered:
            # The logit of a filtered class is 0, its exponential 1. Counted from the values, since a mask that is kept
            # until here takes as many registers as they: no other negative has the value 0.
            columns = tl.minimum(C - tile * BC, BC)
            begin = target_column - tile * BC
            targets = ((begin >= 0) & (begin < columns)).to(tl.float32)
            total += tl.sum((value == 0.0).to(tl.float32), axis=1) - (BC - columns) - targets
        out = sums + tile * 2 * G + row
        tl.store(out, tl.max(logit, axis=1), mask=has_row)
        tl.store(out + G, total, mask=has_row)
    if has_exponentials:
        tl.store(
            exponential + row[:, None].to(tl.int64) * stride + column[None, :],
            _cast(value * inverse[None, :], exponential.dtype.element_ty),
            # Past the last class, the value is 0.
            mask=has_row[:, None] & (column[None, :] < stride),
        )


@triton.jit(do_not_specialize=["C"])
def _narrow(narrow, inverse_norm, weight, C, D: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr):
    center, depth = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BD)
    exists = (center[:, None] < C) & (depth[None, :] < D)
    place = center.to(tl.int64)[:, None] * D + depth[None, :]
    w = tl.load(weight + place, mask=exists, other=0.0)
    # A center of zeros gets the cosine 0, not NaN.
    inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(w * w, axis=1)), 1e-12)
    tl.store(inverse_norm + center, inverse, mask=center < C)
    tl.store(narrow + place, _cast(w, narrow.dtype.element_ty), mask=exists)


@triton.jit
def _cast(value, dtype: tl.constexpr):
    """Return float32 numbers in another dtype, rounded to the nearest."""
    if _IS_INTERPRETED and dtype == tl.bfloat16:
        # The interpreter would cut off the lower half.
        bits = value.to(tl.int32, bitcast=True)
        value = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return value.to(dtype)
