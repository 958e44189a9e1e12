"""Optimizers that touch only the rows of a step: class centres, their momentum, their decay.

A class that is not in the sample is neither read nor moved nor decayed; its momentum waits with it,
as in the first version of Partial FC.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from facetrain.counter import key_of
from facetrain.head.storage import Rows, RowTable


class RowOptimizer:
    """SGD with momentum, or AdamW, over the rows of a table."""

    def __init__(
        self,
        weight: RowTable,
        *,
        name: str = "sgd",
        momentum: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_dtype: torch.dtype = torch.float32,
        placement: str = "device",
        folder: Path | None = None,
        seed: int = 0,
    ) -> None:
        self.weight = weight
        self._adamw = name == "adamw"
        self._momentum, self._betas, self._eps, self._decay = momentum, betas, eps, weight_decay
        self._seed = seed
        self._generator: torch.Generator | None = None
        shape, device = tuple(weight.data.shape), weight._device

        def table(what: str, size: tuple[int, ...], dtype: torch.dtype) -> RowTable:
            path = folder / f"{what}.bin" if folder else None
            return RowTable(size, dtype, device, placement=placement, path=path)

        self.tables: dict[str, RowTable] = {}
        if self._adamw:
            # Each row counts its own steps, by which its moments are corrected.
            self.tables = {
                name: table(name, shape, momentum_dtype) for name in ("first_moment", "second_moment")
            }
            self.tables["steps"] = RowTable((shape[0], 1), torch.float32, device)
        elif momentum:
            self.tables = {"momentum": table("momentum", shape, momentum_dtype)}

    def begin_step(self, step: int, rank: int) -> None:
        """Start the step's random numbers, by which 16-bit storage is rounded."""
        if any(t.data.dtype == torch.bfloat16 for t in (self.weight, *self.tables.values())):
            self._generator = torch.Generator(self.weight._device)
            self._generator.manual_seed(key_of(self._seed, step, rank) & (2**63 - 1))

    def update(self, rows: Rows, gradient: Tensor, lr: float, valid: Tensor) -> None:
        """Step the rows by their gradient (S, D). Where `valid` (a bool scalar on the device) is not set,
        nothing changes: the host need not know whether it is."""
        weight = self.weight.fetch(rows).to(gradient.dtype)
        gradient = torch.where(valid, gradient, 0.0)
        lr_now = _where(valid, lr, 0.0, gradient)
        if self._adamw:
            weight = self._adamw_step(rows, weight, gradient, lr_now, valid)
        else:
            weight = self._sgd_step(rows, weight, gradient, lr_now, valid)
        self.weight.store(rows, weight, self._generator)

    def _sgd_step(self, rows: Rows, weight: Tensor, gradient: Tensor, lr: Tensor, valid: Tensor) -> Tensor:
        direction = gradient.add_(weight * valid, alpha=self._decay) if self._decay else gradient
        if self._momentum:
            table = self.tables["momentum"]
            keep = _where(valid, self._momentum, 1.0, gradient)
            direction = (table.fetch(rows).to(gradient.dtype) * keep).add_(direction)
            table.store(rows, direction, self._generator)
        return torch.addcmul(weight, direction, -lr)

    def _adamw_step(self, rows: Rows, weight: Tensor, gradient: Tensor, lr: Tensor, valid: Tensor) -> Tensor:
        first, second, steps = (self.tables[name] for name in ("first_moment", "second_moment", "steps"))
        keep = [_where(valid, beta, 1.0, gradient) for beta in self._betas]
        count = steps.fetch(rows) + valid
        moment = first.fetch(rows).to(gradient.dtype) * keep[0] + gradient * (1 - keep[0])
        square = second.fetch(rows).to(gradient.dtype) * keep[1] + gradient * gradient * (1 - keep[1])
        for table, values in ((first, moment), (second, square), (steps, count)):
            table.store(rows, values, self._generator)
        age = count.to(gradient.dtype)
        corrected = moment / (1 - self._betas[0] ** age).clamp_min(1e-30)
        scale = (square / (1 - self._betas[1] ** age).clamp_min(1e-30)).sqrt() + self._eps
        return weight * (1 - lr * self._decay) - lr * corrected / scale


def _where(valid: Tensor, value: float, otherwise: float, like: Tensor) -> Tensor:
    return torch.where(valid, like.new_tensor(value), like.new_tensor(otherwise))
