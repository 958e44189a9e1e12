"""Stochastic rounding of rows to bfloat16 and int8."""

# S rows   D columns of a row   B blocks of a row

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.counter_rng import key_of

_BITS = 16
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
"""Factors of the hash, as signed 32-bit integers."""
_INT8_BLOCK = 128


class Noise:
    """Uniform integers in [0, 2^16) for one step, computed once and varied for every chunk.

    The integer of the number at position i of a chunk is the upper half of a 32-bit hash of i (C. Wellons,
    "lowbias32", with the step's keys mixed in), XOR a constant of the chunk. The hash depends on the position alone,
    so it is kept for all chunks: computing it for every number would take longer than all the rest of an update on a
    CPU. Every integer is uniform, so rounding is unbiased; only integers at the same place of two chunks depend on each
    other. A GPU's kernel computes the same integers in registers, see `kernels/center_update.py`.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._count = seed, 0
        key = key_of(seed, 0)
        self.keys = _signed(key >> 32), _signed(key)
        """Keys of the hash, as signed 32-bit integers."""
        self._drawn = torch.empty(0, dtype=torch.int32, device=device)

    def next_constant(self) -> int:
        """Return the constant of the next chunk, in [0, 2^16)."""
        self._count += 1
        return key_of(self._seed, self._count) & ((1 << _BITS) - 1)

    def like(self, x: Tensor) -> Tensor:
        """Return integers with the shape of x, int32, in memory that the caller may change."""
        if x.numel() > len(self._drawn):
            self._drawn = _hash(x.numel(), self.keys, x.device)
        return self._drawn[: x.numel()].view(x.shape) ^ self.next_constant()


def int8_block(columns: int) -> int:
    """Return how many numbers of an int8 row share a scale: 128, or all of a row that is no multiple of it."""
    return columns if columns % _INT8_BLOCK else _INT8_BLOCK


def round_to_bfloat16(x: Tensor, noise: Noise) -> Tensor:
    """Round float32 to bfloat16, up with a probability equal to the fraction that rounding down would lose.

    Rounding to nearest loses every update smaller than half a unit in the last place; here it survives on average.
    """
    # A bfloat16 is the upper half of a float32. Adding noise to the lower half carries into it with the right
    # probability.
    bits = noise.like(x).add_(x.float().contiguous().view(torch.int32))
    return bits.bitwise_right_shift_(_BITS).to(torch.int16).view(torch.bfloat16)


def round_to_int8(x: Tensor, blocks: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """Return rows (S, D) as int8, and the value of one unit in each of their blocks, float32 (S, B); overwrite x.

    Block-wise quantization (Dettmers et al., arXiv 2110.02861), linear in the block's largest magnitude. With
    rounding to nearest, momentum that decays by a tenth per step would stop decaying at half a unit.
    """
    x_SBN = x.float().view(len(x), blocks, -1)
    # Not `abs().amax()`, which would write a second tensor of the size of the rows.
    low, high = x_SBN.aminmax(dim=2)
    scale = torch.maximum(-low, high).div_(127)
    # The bound is for blocks of zeros.
    units = x_SBN.mul_(scale.clamp_min(1e-30).reciprocal_()[..., None])
    units.add_(noise.like(units), alpha=2.0**-_BITS).floor_()
    # 127 itself may become 127.0000001, which the noise can raise to 128.
    return units.clamp_max_(127).to(torch.int8).flatten(1), scale


def _hash(count: int, keys: tuple[int, int], device: torch.device) -> Tensor:
    """Return a hash of 0, 1, … count − 1: int32 (count,), values in [0, 2^16)."""
    # Positions from 2^32 on repeat the integers of the first ones.
    dtype = torch.int32 if count <= 1 << 31 else torch.int64
    bits = torch.arange(count, dtype=dtype, device=device).to(torch.int32).add_(keys[0])
    # torch's shift copies the sign bit; the masks remove the copies.
    shifted = bits.bitwise_right_shift(16)
    bits.bitwise_xor_(shifted.bitwise_and_(0xFFFF)).mul_(MIX_1).bitwise_xor_(keys[1])
    torch.bitwise_right_shift(bits, 15, out=shifted)
    bits.bitwise_xor_(shifted.bitwise_and_(0x1FFFF)).mul_(MIX_2)
    return bits.bitwise_right_shift_(_BITS).bitwise_and_((1 << _BITS) - 1)


def _signed(key: int) -> int:
    key &= (1 << 32) - 1
    return key - (1 << 32) if key >> 31 else key
