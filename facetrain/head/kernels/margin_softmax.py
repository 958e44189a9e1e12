"""Triton kernels that fuse the cosine product with the softmax: logits stay in registers.

Both kernels compute the same tile of logits, z = s·e·w/|w|, on tensor cores with float32 sums. The first
reduces it to each sample's largest logit and Σ exp(z − largest), as online softmax does (Milakov and
Gimelshein, arXiv 1805.02867). The second turns it into the derivative exp(z − log Σ exp z)/|w|, the factor of
the two matrix products of the backward pass, which cuBLAS computes.
"""

# G gathered batch   D embedding   C classes of a chunk   P splits of the C; one program reduces each

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from facetrain.device.kernel_launches import ceil_divide, launch, multiprocessors

_ROWS, _DEPTH = 128, 64
"""Tile of a program: samples, and numbers of an embedding per product."""
_WARPS, _STAGES = 8, 3
_STRIDE = 64
"""Rows of the slopes begin at multiples of this, so that they are written 16 bytes at a time for any number of classes,
and the matrix library reads them so."""


class LogitFactors(NamedTuple):
    """Inputs of a chunk's logits, scale · e·w/|w|."""

    factor_GD: Tensor
    """Unit embeddings, in the dtype of the products."""
    factor_CD: Tensor
    """Class centers, in the same dtype."""
    inverse_norm_C: Tensor
    """1/|w|, float32."""
    target_G: Tensor
    """Column of each sample's target class, which is left out; −1 if it is not in this chunk. int64."""
    scale: float
    threshold: float
    """A cosine above it is replaced by 0; 0 disables that."""


def add_statistics(statistics_2G: Tensor, factors: LogitFactors) -> Tensor:
    """Return each sample's largest logit and Σ exp(logit − largest) with this chunk added; float32 (2, G).

    The result is deterministic: each split is reduced in order, and the splits are joined in order.
    """
    factor_GD, factor_CD = factors[:2]
    tile = _tile(factors)
    tiles = ceil_divide(len(factor_CD), tile["BC"])
    splits = min(tiles, _splits(factor_GD.device, ceil_divide(len(factor_GD), _ROWS)))
    splits_P2G = factor_GD.new_empty((splits, 2, len(factor_GD)), dtype=torch.float32)
    launch(
        _statistics,
        (ceil_divide(len(factor_GD), _ROWS), splits),
        splits_P2G,
        *_inputs(factors),
        ceil_divide(tiles, splits),
        **tile,
    )
    largest_G = torch.maximum(statistics_2G[0], splits_P2G[:, 0].amax(0))
    base_G = largest_G.clamp_min(torch.finfo(torch.float32).min)
    total_G = statistics_2G[1] * (statistics_2G[0] - base_G).exp()
    total_G += (splits_P2G[:, 1] * (splits_P2G[:, 0] - base_G).exp()).sum(0)
    return torch.stack([largest_G, total_G])


def slopes(log_total_G: Tensor, factors: LogitFactors) -> Tensor:
    """Return exp(logit − log_total)/|w| of each pair, 0 for target and filtered classes; (G, C), factors' dtype.

    The rows are padded in memory, by zeros.
    """
    factor_GD, factor_CD = factors[:2]
    stride = ceil_divide(len(factor_CD), _STRIDE) * _STRIDE
    padded_GX = factor_GD.new_empty((len(factor_GD), stride))
    tile = _tile(factors)
    # In one dimension, because a second one is limited to 65,535 programs, which is 2^23 classes.
    launch(
        _slopes,
        (ceil_divide(len(factor_GD), _ROWS) * ceil_divide(len(factor_CD), tile["BC"]),),
        padded_GX,
        log_total_G,
        stride,
        *_inputs(factors),
        **tile,
    )
    return padded_GX[:, : len(factor_CD)]


def _inputs(factors: LogitFactors) -> tuple[object, ...]:
    """Return the arguments that both kernels take."""
    factor_GD, factor_CD, inverse_norm_C, target_G, scale, threshold = factors
    sizes = len(factor_GD), len(factor_CD), factor_GD.shape[1]
    return (
        factor_GD.contiguous(), factor_CD.contiguous(), inverse_norm_C, target_G, *sizes, scale, threshold * scale
    )  # fmt: skip


def _tile(factors: LogitFactors) -> dict[str, Any]:
    """Return the tile of a program, as constants of both kernels."""
    device, embedding_size = factors.factor_GD.device, factors.factor_GD.shape[1]
    # On Hopper, four warps together multiply a tile of twice the width (wgmma). On Blackwell that width needs more
    # registers than there are: Triton 3.7 keeps the sums in the tensor memory, but copies all of them out at once.
    wide = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    # Tensor cores need products of at least 16 numbers.
    depth = min(_DEPTH, max(triton.next_power_of_2(embedding_size), 16))
    return {
        "filtered": factors.threshold > 0,
        "BG": _ROWS,
        "BC": 256 if wide else 128,
        "BD": depth,
        "num_warps": _WARPS,
        "num_stages": _STAGES,
    }


def _splits(device: torch.device, rows: int) -> int:
    """Return the number of splits of the classes that gives every multiprocessor of the device work."""
    if device.type != "cuda":
        return 2
    return max(2 * multiprocessors(device) // rows, 1)


@triton.jit
def _logits(
    embedding, center, inverse_norm, target, row, column, G, C, D, scale, limit,
    filtered: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return a tile of logits: −∞ for the target class and past the end, 0 for a filtered class."""
    # 32 bits suffice for offsets into the embeddings, which are smaller than a chunk's logits (2^26).
    sums = tl.zeros((BG, BC), dtype=tl.float32)
    for start in range(0, D, BD):
        depth = start + tl.arange(0, BD)
        e = tl.load(
            embedding + row[:, None] * D + depth[None, :],
            mask=(row[:, None] < G) & (depth[None, :] < D),
            other=0.0,
        )
        w = tl.load(
            center + column[:, None].to(tl.int64) * D + depth[None, :],
            mask=(column[:, None] < C) & (depth[None, :] < D),
            other=0.0,
        )
        sums = tl.dot(e, tl.trans(w), sums, input_precision="ieee")
    inverse = tl.load(inverse_norm + column, mask=column < C, other=0.0)
    logit = sums * (inverse * scale)[None, :]
    # A comparison with NaN is false: NaN stays, and the loss shows it.
    is_noise = logit > limit
    if filtered:
        logit = tl.where(is_noise, 0.0, logit)
    target_column = tl.load(target + row, mask=row < G, other=-1)
    other = (column[None, :] < C) & (column[None, :] != target_column[:, None])
    return tl.where(other, logit, float("-inf")), is_noise, inverse


# The numbers of samples and classes differ from chunk to chunk and from run to run. Not specialized by them, the kernel
# that trains is the one that the self-test has tested.
@triton.jit(do_not_specialize=["G", "C", "tiles_per_split"])
def _statistics(
    splits, embedding, center, inverse_norm, target, G, C, D, scale, limit, tiles_per_split,
    filtered: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BG + tl.arange(0, BG)
    split = tl.program_id(1)
    largest = tl.full((BG,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BG,), dtype=tl.float32)
    for tile in range(split * tiles_per_split, (split + 1) * tiles_per_split):
        column = tile * BC + tl.arange(0, BC)
        logit, _, _ = _logits(
            embedding, center, inverse_norm, target, row, column, G, C, D, scale, limit, filtered, BG, BC, BD
        )
        larger = tl.maximum(largest, tl.max(logit, axis=1))
        # −∞ − −∞ would be NaN: before the first class, any finite base works.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(logit - base[:, None]), axis=1)
        largest = larger
    out = splits + split * 2 * G + row
    tl.store(out, largest, mask=row < G)
    tl.store(out + G, total, mask=row < G)


@triton.jit(do_not_specialize=["G", "C"])
def _slopes(
    slope, log_total, stride, embedding, center, inverse_norm, target, G, C, D, scale, limit,
    filtered: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    # Neighboring programs have the same centers, which are then in the cache.
    row_tiles = tl.cdiv(G, BG)
    row = tl.program_id(0) % row_tiles * BG + tl.arange(0, BG)
    column = tl.program_id(0) // row_tiles * BC + tl.arange(0, BC)
    logit, is_noise, inverse = _logits(
        embedding, center, inverse_norm, target, row, column, G, C, D, scale, limit, filtered, BG, BC, BD
    )
    normalizer = tl.load(log_total + row, mask=row < G, other=0.0)
    value = tl.exp(logit - normalizer[:, None]) * inverse[None, :]
    if filtered:
        value = tl.where(is_noise, 0.0, value)
    tl.store(
        slope + row[:, None].to(tl.int64) * stride + column[None, :],
        value.to(slope.dtype.element_ty),
        # Past the last class, the value is 0.
        mask=(row[:, None] < G) & (column[None, :] < stride),
    )
