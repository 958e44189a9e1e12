"""Tables of which a few rows at a time are brought to the device, changed and put back."""

from __future__ import annotations

import torch
from torch import Tensor

Rows = slice | Tensor
"""Consecutive rows, or chosen ones as an ascending int64 index."""


class RowTable:
    """A table (K, ...) that may lie elsewhere than on the device, and may hold its numbers in fewer bits."""

    def __init__(self, data: Tensor, device: torch.device, scale: RowTable | None = None) -> None:
        self.data, self._device = data, device
        self.scale = scale
        """What 1 stands for in each block of an int8 table."""

    def fetch(self, rows: Rows) -> Tensor:
        """Return rows on the device. Consecutive rows may be the table itself; who changes them stores them."""
        if isinstance(rows, Tensor):
            rows = rows.to(self.data.device)
        values = self.data[rows].to(self._device, non_blocking=True)
        if self.scale is None:
            return values
        scale = self.scale.fetch(rows)
        return (values.view(*scale.shape, -1) * scale[..., None]).flatten(1)

    def store(self, rows: Rows, values: Tensor, generator: torch.Generator | None = None) -> None:
        """Put rows back; into fewer bits they are rounded up or down at random, right on average."""
        if self.scale is not None:
            values, scale = _to_int8(values, self.scale.data.shape[1], generator)
            self.scale.store(rows, scale)
        if self.data.dtype == torch.bfloat16 and values.dtype != torch.bfloat16:
            values = round_stochastically(values, generator)
        if isinstance(rows, Tensor):
            self.data.index_copy_(0, rows.to(self.data.device), values.to(self.data.device, self.data.dtype))
        elif values.data_ptr() != self.data[rows].data_ptr():
            self.data[rows].copy_(values)


def round_stochastically(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 to bfloat16, up with the probability of what rounding down would lose.

    An update smaller than half a unit in the last place is lost by rounding to nearest, every time;
    here it survives on average.
    """
    bits = x.float().contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x.float()).to(torch.bfloat16)


def _to_int8(x: Tensor, blocks: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return the numbers of each row (S, D) as int8, and for each block of them what 1 stands for (S, blocks).

    Linear in the block's largest magnitude (Dettmers et al., arXiv 2110.02861, block-wise quantisation),
    rounded at random: momentum that decays by a tenth a step would otherwise stop at half a unit.
    """
    x_SBN = x.float().view(len(x), blocks, -1)
    scale = x_SBN.abs().amax(2) / 127
    noise = torch.rand(x_SBN.shape, device=x.device, generator=generator)
    units = (x_SBN / scale.clamp_min(1e-30)[..., None]).add_(noise).floor_().clamp_(-127, 127)
    return units.to(torch.int8).flatten(1), scale
