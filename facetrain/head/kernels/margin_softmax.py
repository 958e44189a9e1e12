"""The cosine product with margin-softmax in one kernel: logits live in registers, and never in memory.

Both kernels compute the same tile of logits, z = s·e·w/|w|, by tensor cores with float32 sums. The first
reduces it to each sample's largest logit and Σ exp(z − largest), as online softmax does (Milakov and
Gimelshein, arXiv 1805.02867); the second turns it into the derivative exp(z − log Σ exp z)/|w|, the factor of
the two products of the backward pass, which the vendor's matrix library computes.
"""

# G gathered batch   D embedding   C a chunk of classes   P splits of the C, each reduced by a program of its own

from __future__ import annotations

import warnings
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _DEPTH = 128, 64
"""Of a program's tile: samples, and numbers of an embedding at a time."""
_WARPS, _STAGES = 8, 3


def can_launch(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can be built and started: Triton wants a C compiler and Python's headers besides the GPU.

    Says why not, by a warning.
    """
    factor_CD = torch.ones(_ROWS, _DEPTH, dtype=dtype, device=device)
    one_C, own_G = torch.ones(_ROWS, device=device), torch.arange(_ROWS, device=device)
    options: dict[str, Any] = {"inverse_C": one_C, "own_G": own_G, "scale": 1.0, "threshold": 0.0}
    try:
        add_statistics(torch.stack([one_C, one_C]), factor_CD, factor_CD, **options)
        slopes(one_C, factor_CD, factor_CD, **options)
    except Exception as error:  # Triton's own, the compiler's, the driver's
        said = " ".join(str(error).split())[:200]
        warnings.warn(f"the head runs without its kernels, and slower: {said}", stacklevel=2)
        return False
    return True


def add_statistics(
    part_2G: Tensor,
    factor_GD: Tensor,
    factor_CD: Tensor,
    *,
    inverse_C: Tensor,
    own_G: Tensor,
    scale: float,
    threshold: float,
) -> Tensor:
    """Return the largest logit and Σ exp(logit − largest) of each sample, this chunk's added; float32 (2, G).

    `own_G` is the column of a sample's own class, which is left out, or −1; int64. A logit above
    `threshold`·`scale` counts as 0; a threshold of 0 switches that off. Deterministic: each split is reduced
    in order, and the splits are joined in order.
    """
    tile = _tile(factor_GD, threshold)
    tiles = triton.cdiv(len(factor_CD), tile["BC"])
    splits = min(tiles, _splits(factor_GD.device, triton.cdiv(len(factor_GD), _ROWS)))
    parts_P2G = factor_GD.new_empty((splits, 2, len(factor_GD)), dtype=torch.float32)
    _statistics[(triton.cdiv(len(factor_GD), _ROWS), splits)](
        parts_P2G,
        *_inputs(factor_GD, factor_CD, inverse_C, own_G, scale, threshold),
        triton.cdiv(tiles, splits),
        **tile,
    )
    largest_G = torch.maximum(part_2G[0], parts_P2G[:, 0].amax(0))
    base_G = largest_G.clamp_min(torch.finfo(torch.float32).min)
    total_G = part_2G[1] * (part_2G[0] - base_G).exp()
    total_G += (parts_P2G[:, 1] * (parts_P2G[:, 0] - base_G).exp()).sum(0)
    return torch.stack([largest_G, total_G])


def slopes(
    log_total_G: Tensor,
    factor_GD: Tensor,
    factor_CD: Tensor,
    *,
    inverse_C: Tensor,
    own_G: Tensor,
    scale: float,
    threshold: float,
) -> Tensor:
    """Return exp(logit − log_total)/|w| of each pair, 0 for own and filtered classes; (G, C), of the factors' dtype."""
    slope_GC = factor_GD.new_empty((len(factor_GD), len(factor_CD)))
    tile = _tile(factor_GD, threshold)
    _slopes[triton.cdiv(len(factor_GD), _ROWS), triton.cdiv(len(factor_CD), tile["BC"])](
        slope_GC,
        log_total_G,
        *_inputs(factor_GD, factor_CD, inverse_C, own_G, scale, threshold),
        **tile,
    )
    return slope_GC


def _inputs(
    factor_GD: Tensor, factor_CD: Tensor, inverse_C: Tensor, own_G: Tensor, scale: float, threshold: float
) -> tuple[object, ...]:
    sizes = len(factor_GD), len(factor_CD), factor_GD.shape[1]
    factors = factor_GD.contiguous(), factor_CD.contiguous()
    return (*factors, inverse_C, own_G, *sizes, scale, threshold * scale)


def _tile(factor_GD: Tensor, threshold: float) -> dict[str, Any]:
    device = factor_GD.device
    # From Hopper on, four warps together multiply a tile of twice the width.
    wide = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    # A product of fewer than 16 numbers is below what tensor cores take.
    depth = min(_DEPTH, max(triton.next_power_of_2(factor_GD.shape[1]), 16))
    return {
        "filtered": threshold > 0,
        "BG": _ROWS,
        "BC": 256 if wide else 128,
        "BD": depth,
        "num_warps": _WARPS,
        "num_stages": _STAGES,
    }


def _splits(device: torch.device, rows: int) -> int:
    """Return into how many parts to split the classes, so that every processor of the device has work."""
    if device.type != "cuda":
        return 2
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(2 * int(processors) // rows, 1)


@triton.jit
def _logits(
    embedding, center, inverse, own, row, column, G, C, D, scale, limit,
    filtered: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return a tile of logits: −∞ where the class is the sample's own or past the end, 0 where it is filtered."""
    # Rows of the embeddings and of the chunk, times D, fit into 32 bits: both are smaller than a chunk's logits.
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
    inverse_norm = tl.load(inverse + column, mask=column < C, other=0.0)
    logit = sums * (inverse_norm * scale)[None, :]
    trusted = logit <= limit
    if filtered:
        logit = tl.where(trusted, logit, 0.0)
    own_column = tl.load(own + row, mask=row < G, other=-1)
    other = (column[None, :] < C) & (column[None, :] != own_column[:, None])
    return tl.where(other, logit, float("-inf")), trusted, inverse_norm


@triton.jit
def _statistics(
    parts, embedding, center, inverse, own, G, C, D, scale, limit, tiles_per_split,
    filtered: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BG + tl.arange(0, BG)
    split = tl.program_id(1)
    largest = tl.full((BG,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BG,), dtype=tl.float32)
    for tile in range(split * tiles_per_split, (split + 1) * tiles_per_split):
        column = tile * BC + tl.arange(0, BC)
        logit, _, _ = _logits(
            embedding, center, inverse, own, row, column, G, C, D, scale, limit, filtered, BG, BC, BD
        )
        larger = tl.maximum(largest, tl.max(logit, axis=1))
        # −∞ − −∞ is not a number: where there is no class yet, any base does.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(logit - base[:, None]), axis=1)
        largest = larger
    out = parts + split * 2 * G + row
    tl.store(out, largest, mask=row < G)
    tl.store(out + G, total, mask=row < G)


@triton.jit
def _slopes(
    slope, log_total, embedding, center, inverse, own, G, C, D, scale, limit,
    filtered: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BG + tl.arange(0, BG)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    logit, trusted, inverse_norm = _logits(
        embedding, center, inverse, own, row, column, G, C, D, scale, limit, filtered, BG, BC, BD
    )
    normalizer = tl.load(log_total + row, mask=row < G, other=0.0)
    value = tl.exp(logit - normalizer[:, None]) * inverse_norm[None, :]
    if filtered:
        value = tl.where(trusted, value, 0.0)
    tl.store(
        slope + row[:, None].to(tl.int64) * C + column[None, :],
        value.to(slope.dtype.element_ty),
        mask=(row[:, None] < G) & (column[None, :] < C),
    )
