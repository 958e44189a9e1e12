"""Triton kernel that updates a chunk of class centers in one pass over their memory.

A tile holds whole centers, so everything that an update needs of a center happens in registers: the gradient of the
matrix product (C, D) gets the contributions of the samples whose target the center is, loses its component along the
center (cos = e·w/|w| does not depend on |w|), and enters SGD with momentum and weight decay:

    g ← h − w (w·h)/|w|² + λ·w      m ← μ·m + g      w ← w − lr·m

With centers, momentum and product in bfloat16 this reads 6 and writes 4 bytes per number. The results are stored with
stochastic rounding, by the same random integers as `stochastic_rounding`, computed in registers. No atomic operations:
two runs give equal bits.
"""

# K rows of a table   C classes of a chunk   D embedding   G gathered batch

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from facetrain.device.kernel_launches import ceil_divide, launch, power_of_2
from facetrain.head.center_gradient import UnfinishedGradient
from facetrain.head.stochastic_rounding import MIX_1, MIX_2, Noise, int8_block

LARGEST_SIZE = 4096
"""Largest embedding: a center must fit into the registers of a thread block."""
_TILE, _WARPS = 2048, 4
"""Numbers of a tile (16 per thread) or one center, if that is longer; and warps of a program."""
_MIX_1, _MIX_2 = tl.constexpr(MIX_1), tl.constexpr(MIX_2)


def update_centers(
    tables: dict[str, Tensor],
    rows: slice | Tensor,
    gradient: Tensor | UnfinishedGradient,
    valid: Tensor,
    noise: Noise,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Update centers in place by SGD.

    Args:
        tables: contiguous tables (K, D) on the device: "weight" in float32 or bfloat16; with momentum "momentum" in
            float32, bfloat16 or int8, and for int8 "momentum_scale" (K, blocks), float32.
        rows: rows of the tables, as a slice or an ascending index without repetitions.
        gradient: complete, float32 (C, D), or unfinished.
        valid: bool scalar on the device. If it is false, nothing changes.
        noise: random integers for stochastic rounding.
        lr: learning rate.
        momentum: factor on the momentum, without effect if there is no such table.
        weight_decay: factor on the centers in their gradient.
    """
    weight, velocity, scale = (tables.get(name) for name in ("weight", "momentum", "momentum_scale"))
    assert weight is not None, "a table of centers is required"
    size = weight.shape[1]
    if isinstance(gradient, Tensor):
        gradient_CD = gradient.contiguous()
        targets = [gradient_CD] * 3  # not read
    else:
        gradient_CD, *targets = gradient
    assert all(table.is_contiguous() for table in (*tables.values(), gradient_CD)), (
        "the kernel knows no strides"
    )
    block = power_of_2(size)
    tile = max(_TILE // block, 1)
    index = rows if isinstance(rows, Tensor) else None
    # Like `RowTable.store`, which takes a constant for each table that it rounds, momentum first.
    constants = [
        0 if table is None or table.dtype == torch.float32 else noise.next_constant()
        for table in (velocity, weight)
    ]
    launch(
        _update,
        (ceil_divide(len(gradient_CD), tile),),
        _bits(weight),
        _bits(weight if velocity is None else velocity),
        weight if scale is None else scale,
        _bits(gradient_CD),
        gradient_CD if index is None else index,
        *targets,
        valid.view(torch.uint8),
        rows.start if isinstance(rows, slice) else 0,
        len(gradient_CD),
        # Triton compiles again for an integer.
        float(lr),
        float(momentum),
        float(weight_decay),
        *noise.keys,
        *constants,
        D=size,
        B=1 if scale is None else scale.shape[1],
        # A block is a power of two; a row without blocks is padded to one, as in BD.
        W=power_of_2(int8_block(size)),
        has_momentum=velocity is not None,
        has_index=index is not None,
        is_unfinished=not isinstance(gradient, Tensor),
        BR=tile,
        BD=block,
        num_warps=_WARPS,
    )


def _bits(table: Tensor) -> Tensor:
    """Return bfloat16 as int16: the kernel rounds bits itself, and Triton's interpreter has no bfloat16."""
    return table.view(torch.int16) if table.dtype == torch.bfloat16 else table


@triton.jit
def _random_bits(place, key_1, key_2):
    """Return the integers of `stochastic_rounding.Noise` for places in a chunk, before the chunk's constant."""
    # A shift of int32 copies the sign bit; the masks remove the copies.
    bits = place.to(tl.int32) + key_1
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _MIX_1 ^ key_2
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _MIX_2
    return (bits >> 16) & 0xFFFF


@triton.jit
def _read(table, place, exists):
    """Return numbers of a float32 table, or of a bfloat16 table passed as int16, in float32."""
    value = tl.load(table + place, mask=exists, other=0)
    if table.dtype.element_ty == tl.int16:
        # A bfloat16 is the upper half of a float32.
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _write(table, place, exists, value, noise):
    """Store numbers in a float32 table, or rounded at random in a bfloat16 table passed as int16."""
    if table.dtype.element_ty == tl.int16:
        bits = value.to(tl.int32, bitcast=True) + noise
        tl.store(table + place, (bits >> 16).to(tl.int16), mask=exists)
    else:
        tl.store(table + place, value, mask=exists)


# Compiled once, for any values of these arguments.
@triton.jit(do_not_specialize=["start", "C", "key_1", "key_2", "momentum_constant", "weight_constant"])
def _update(
    weight, momentum, scale, gradient, index, target_gradient, sample, first, valid, start, C, lr, momentum_factor,
    weight_decay, key_1, key_2, momentum_constant, weight_constant,
    D: tl.constexpr, B: tl.constexpr, W: tl.constexpr, has_momentum: tl.constexpr,
    has_index: tl.constexpr, is_unfinished: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    if tl.load(valid) == 0:
        return
    center = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, BD)
    exists = (center[:, None] < C) & (column[None, :] < D)
    place = center.to(tl.int64)[:, None] * D + column[None, :]
    if has_index:
        table_center = tl.load(index + center, mask=center < C, other=0)
    else:
        table_center = center.to(tl.int64) + start.to(tl.int64)
    table_place = table_center[:, None] * D + column[None, :]
    g = _read(gradient, place, exists)
    w = _read(weight, table_place, exists)

    if is_unfinished:
        begin = tl.load(first + center, mask=center < C, other=0)
        end = tl.load(first + center + 1, mask=center < C, other=0)
        # Few tiles have a target center: the others take no turn of this loop.
        for number in range(tl.max(end - begin, axis=0)):
            present = begin + number < end
            row = tl.load(sample + begin + number, mask=present, other=0)
            g += tl.load(
                target_gradient + row[:, None] * D + column[None, :],
                mask=present[:, None] & exists,
                other=0.0,
            )
        along = tl.sum(g * w, axis=1) / tl.maximum(tl.sum(w * w, axis=1), 1e-24)
        g -= w * along[:, None]
    g += weight_decay * w

    random = _random_bits(place, key_1, key_2)
    if has_momentum:
        noise = random ^ momentum_constant
        if momentum.dtype.element_ty == tl.int8:
            # Blocks of W numbers share a scale: (BR, BD) seen as (BR, BD / W, W).
            block = tl.arange(0, BD // W)
            scale_place = table_center[:, None] * B + block[None, :]
            scale_exists = (center[:, None] < C) & (block[None, :] < B)
            unit = tl.load(scale + scale_place, mask=scale_exists, other=0.0)
            units = tl.load(momentum + table_place, mask=exists, other=0).to(tl.float32)
            old = tl.reshape(tl.reshape(units, (BR, BD // W, W)) * unit[:, :, None], (BR, BD))
            g += momentum_factor * old
            blocks = tl.reshape(tl.where(exists, g, 0.0), (BR, BD // W, W))
            unit = tl.max(tl.abs(blocks), axis=2) / 127.0
            units = blocks / tl.maximum(unit, 1e-30)[:, :, None]
            units = tl.floor(units + tl.reshape(noise, (BR, BD // W, W)).to(tl.float32) * (1.0 / 65536))
            # 127 itself may become 127.0000001, which the noise can raise to 128.
            units = tl.reshape(tl.minimum(units, 127.0), (BR, BD)).to(tl.int8)
            tl.store(momentum + table_place, units, mask=exists)
            tl.store(scale + scale_place, unit, mask=scale_exists)
        else:
            g += momentum_factor * _read(momentum, table_place, exists)
            _write(momentum, table_place, exists, g, noise)
    _write(weight, table_place, exists, w - lr * g, random ^ weight_constant)


IS_INTERPRETED = not isinstance(_update, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, on any device; the tests use it."""
