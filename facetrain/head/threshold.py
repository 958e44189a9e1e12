"""The one number that the unified cross-entropy learns: a copy on every rank, which all move alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from facetrain.head.objective import UnifiedThreshold
from facetrain.head.rows import RowOptimizer
from facetrain.head.storage import RowTable


class LearnedThreshold:
    """The threshold with its optimizer, whose rules are those of the centres."""

    def __init__(
        self,
        start: float,
        negative_weight: float,
        dtype: torch.dtype,
        device: torch.device,
        rules: dict[str, Any],
    ) -> None:
        self._table = RowTable((1, 1), torch.promote_types(dtype, torch.float32), device)
        self._table.data.fill_(start)
        self._optimizer = RowOptimizer(self._table, momentum_dtype=self._table.data.dtype, **rules)
        self.objective = UnifiedThreshold(self._table.data.view(()), negative_weight)

    def step(self, lr: float, valid: Tensor, grad_scale: float = 1.0) -> None:
        """Move the threshold by the gradient collected since the last step, `grad_scale` times too large."""
        if self.objective.gradient is not None:
            self._optimizer.update(slice(0, 1), self.objective.gradient.view(1, 1) / grad_scale, lr, valid)
        self.discard()

    def discard(self) -> None:
        """Forget the gradient collected since the last step."""
        self.objective.gradient = None

    def state(self) -> dict[str, Tensor]:
        """Return the threshold and what its optimizer keeps, for a checkpoint."""
        tables = {"threshold": self._table, **self._optimizer.tables}
        return {name if name == "threshold" else f"threshold_{name}": t.data for name, t in tables.items()}
