"""Random bits in bulk, by which numbers are rounded up or down when they are stored in fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.counter_rng import key_of

_BITS = 16


class Noise:
    """Uniform whole numbers in [0, 2^16) for one step: drawn once, and turned into others for every chunk.

    Drawing as many as there are numbers takes longer than all else that an update does. Each chunk gets the
    step's draw XOR a constant of its own: every number is uniform, and rounds right on average; only
    numbers at the same place of two chunks depend on one another.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._count = seed, 0
        self._generator = torch.Generator(device)
        self._drawn = torch.empty(0, dtype=torch.int32, device=device)

    def like(self, x: Tensor) -> Tensor:
        """Return numbers shaped like x, int32, which the caller may change."""
        if x.numel() > len(self._drawn):
            self._generator.manual_seed(key_of(self._seed, 0) & (2**63 - 1))
            self._drawn = torch.randint(
                0, 1 << _BITS, (x.numel(),), dtype=torch.int32, device=x.device, generator=self._generator
            )
        self._count += 1
        return self._drawn[: x.numel()].view(x.shape) ^ (key_of(self._seed, self._count) & ((1 << _BITS) - 1))


def round_to_bfloat16(x: Tensor, noise: Noise) -> Tensor:
    """Round float32 to bfloat16, up with the probability of what rounding down would lose.

    An update smaller than half a unit in the last place is lost by rounding to nearest, every time;
    here it survives on average.
    """
    # A bfloat16 is the upper half of a float32; the lower half decides whether the sum carries into it.
    bits = noise.like(x).add_(x.float().contiguous().view(torch.int32))
    return bits.bitwise_right_shift_(_BITS).to(torch.int16).view(torch.bfloat16)


def round_to_int8(x: Tensor, blocks: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """Return the numbers of each row (S, D) as int8, and for each block of them what 1 stands for (S, blocks).

    Linear in the block's largest magnitude (Dettmers et al., arXiv 2110.02861, block-wise quantization),
    rounded at random: momentum that decays by a tenth a step would otherwise stop at half a unit.
    """
    x_SBN = x.float().view(len(x), blocks, -1)
    low, high = x_SBN.aminmax(dim=2)
    scale = torch.maximum(-low, high).div_(127)
    units = x_SBN * scale.clamp_min(1e-30).reciprocal_()[..., None]
    units.add_(noise.like(units), alpha=2.0**-_BITS).floor_()
    # 127 itself may come out as 127.0000001, and be raised to 128.
    return units.clamp_max_(127).to(torch.int8).flatten(1), scale
