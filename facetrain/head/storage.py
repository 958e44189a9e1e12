"""Tables of which a few rows at a time are brought to the device, changed and put back."""

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.head.noise import Noise, round_to_bfloat16, round_to_int8

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
            # Several times faster on a CPU than indexing.
            near = torch.index_select(self.data, 0, rows.to(self.data.device))
        else:
            near = self.data[rows]
        values = near.to(self._device, non_blocking=True)
        if self.scale is None:
            return values
        scale = self.scale.fetch(rows)
        return (values.view(*scale.shape, -1) * scale[..., None]).flatten(1)

    def store(self, rows: Rows, values: Tensor, noise: Noise | None = None) -> None:
        """Put rows back; into fewer bits they are rounded up or down at random, right on average."""
        if self.scale is not None and noise is not None:
            values, scale = round_to_int8(values, self.scale.data.shape[1], noise)
            self.scale.store(rows, scale)
        if self.data.dtype == torch.bfloat16 and values.dtype != torch.bfloat16 and noise is not None:
            values = round_to_bfloat16(values, noise)
        if isinstance(rows, Tensor):
            self.data.index_copy_(0, rows.to(self.data.device), values.to(self.data.device, self.data.dtype))
        elif values.data_ptr() != self.data[rows].data_ptr():
            self.data[rows].copy_(values)
