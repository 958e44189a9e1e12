"""The one number that the unified cross-entropy learns: a copy on every rank, which all move alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from facetrain.head.objective import UnifiedThreshold
from facetrain.head.placement import place_tables
from facetrain.head.rows import RowOptimizer, moment_layout


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
        dtype = torch.promote_types(dtype, torch.float32)
        moments = moment_layout(rules["name"], 1, momentum=rules["momentum"], dtype=dtype)
        self._tables = place_tables({"weight": (1, dtype), **moments}, 1, device).by_name
        self._optimizer = RowOptimizer(device, **rules)
        threshold = self._tables["weight"].data.fill_(start)
        self.objective = UnifiedThreshold(threshold.view(()), negative_weight)

    def step(self, lr: float, valid: Tensor, grad_scale: float | Tensor = 1.0) -> None:
        """Move the threshold by the gradient collected since the last step, `grad_scale` times too large.

        Where `valid` is not set, the gradient is only forgotten.
        """
        if self.objective.gradient is not None:
            gradient = self.objective.gradient.view(1, 1) / grad_scale
            self._optimizer.update(self._tables, slice(0, 1), gradient, lr, valid)
        self.objective.gradient = None

    def state(self) -> dict[str, Tensor]:
        """Return the threshold and what its optimizer keeps, for a checkpoint."""
        names = {name: f"threshold_{name}" for name in self._tables} | {"weight": "threshold"}
        return {names[name]: table.data for name, table in self._tables.items()}
