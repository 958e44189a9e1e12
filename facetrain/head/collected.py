"""The gradient of a step's rows, where the update waits for the end of the step."""

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.head.storage import Rows


class CollectedGradient:
    """The gradient of some rows, summed over micro-batches whose samples are not the same."""

    def __init__(self) -> None:
        self._parts: list[tuple[Rows, Tensor]] = []

    def add(self, rows: Rows, gradient: Tensor, finite: Tensor) -> None:
        """Add a chunk's gradient (C, D), which is taken over; `finite` is for whoever updates at once."""
        for number, (others, total) in enumerate(self._parts):
            if _equal(rows, others):
                self._parts[number] = (others, total.add_(gradient))
                return
        self._parts.append((rows, gradient))

    def take(self) -> list[tuple[Rows, Tensor]]:
        """Return (rows, gradient) with every row at most once, and start anew."""
        parts, self._parts = self._parts, []
        if all(isinstance(rows, slice) for rows, _ in parts) or len(parts) <= 1:
            return parts
        index = torch.cat([rows for rows, _ in parts if isinstance(rows, Tensor)])
        unique, place = index.unique(return_inverse=True)
        total = parts[0][1].new_zeros(len(unique), parts[0][1].shape[1])
        total.index_add_(0, place, torch.cat([gradient for _, gradient in parts]))
        return [(unique, total)]


def _equal(a: Rows, b: Rows) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return isinstance(a, slice) and isinstance(b, slice) and a == b
