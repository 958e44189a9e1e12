"""Stochastic rounding of rows to bfloat16 and int8."""

# S rows   D columns of a row   B blocks of a row

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.counter_rng import key_of

_BITS = 16


class Noise:
    """Uniform integers in [0, 2^16) for one step, drawn once and varied for every chunk.

    Drawing a new integer for every number takes longer than all the rest of an update. Each chunk instead gets
    the step's draw XOR a constant of its own. Every integer is uniform, so rounding is unbiased; only integers at
    the same place of two chunks depend on each other.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._count = seed, 0
        self._generator = torch.Generator(device)
        self._drawn = torch.empty(0, dtype=torch.int32, device=device)

    def like(self, x: Tensor) -> Tensor:
        """Return integers with the shape of x, int32, in memory that the caller may change."""
        if x.numel() > len(self._drawn):
            self._generator.manual_seed(key_of(self._seed, 0) & (2**63 - 1))
            self._drawn = torch.randint(
                0, 1 << _BITS, (x.numel(),), dtype=torch.int32, device=x.device, generator=self._generator
            )
        self._count += 1
        return self._drawn[: x.numel()].view(x.shape) ^ (key_of(self._seed, self._count) & ((1 << _BITS) - 1))


def round_to_bfloat16(x: Tensor, noise: Noise) -> Tensor:
    """Round float32 to bfloat16, up with a probability equal to the fraction that rounding down would lose.

    Rounding to nearest loses every update smaller than half a unit in the last place; here it survives on average.
    """
    # A bfloat16 is the upper half of a float32. Adding noise to the lower half carries into it with the right
    # probability.
    bits = noise.like(x).add_(x.float().contiguous().view(torch.int32))
    return bits.bitwise_right_shift_(_BITS).to(torch.int16).view(torch.bfloat16)


def round_to_int8(x: Tensor, blocks: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """Return rows (S, D) as int8, and the value of one unit in each of their blocks, float32 (S, B).

    Block-wise quantization (Dettmers et al., arXiv 2110.02861), linear in the block's largest magnitude. With
    rounding to nearest, momentum that decays by a tenth per step would stop decaying at half a unit.
    """
    x_SBN = x.float().view(len(x), blocks, -1)
    low, high = x_SBN.aminmax(dim=2)
    scale = torch.maximum(-low, high).div_(127)
    units = x_SBN * scale.clamp_min(1e-30).reciprocal_()[..., None]
    units.add_(noise.like(units), alpha=2.0**-_BITS).floor_()
    # 127 itself may become 127.0000001, which the noise can raise to 128.
    return units.clamp_max_(127).to(torch.int8).flatten(1), scale
