"""Optimizers that touch only the rows of a step: class centers, their momentum, their decay.

A class that is not in the sample is neither read nor moved nor decayed; its momentum waits with it,
as in the first version of Partial FC.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from facetrain.counter_rng import key_of
from facetrain.errors import ConfigError
from facetrain.head.class_centers import Rows, RowTable
from facetrain.head.row_file import Layout
from facetrain.head.stochastic_rounding import Noise

_BLOCK = 128
"""Numbers that share a scale where momentum is held in 8 bits."""


@dataclass(frozen=True, kw_only=True)
class RowOptimizerSettings:
    """Settings of the centers' optimizer; the section `optim` of the config's schema states the defaults."""

    name: str
    """sgd or adamw."""
    momentum: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def moment_layout(settings: RowOptimizerSettings, columns: int, dtype: torch.dtype) -> Layout:
    """Return the tables that an optimizer keeps for a table with `columns` columns.

    Raises:
        ConfigError: the optimizer cannot keep them in `dtype`.
    """
    if settings.name == "adamw":
        if dtype == torch.int8:
            # A second moment spans many powers of ten, which 127 equal steps cannot tell from 0.
            raise ConfigError("head.momentum_dtype int8 is for optim.name sgd; use bfloat16 with adamw")
        # Each row counts its own steps, by which its moments are corrected.
        return {
            "first_moment": (columns, dtype),
            "second_moment": (columns, dtype),
            "steps": (1, torch.float32),
        }
    if not settings.momentum:
        return {}
    layout = {"momentum": (columns, dtype)}
    if dtype == torch.int8:
        layout["momentum_scale"] = (columns // _BLOCK if columns % _BLOCK == 0 else 1, torch.float32)
    return layout


class RowOptimizer:
    """SGD with momentum, or AdamW, over the rows of a table."""

    def __init__(self, settings: RowOptimizerSettings, device: torch.device, *, seed: int = 0) -> None:
        self._settings, self._device, self._seed = settings, device, seed
        self._noise = Noise(seed, device)

    def begin_step(self, step: int, rank: int) -> None:
        """Start the step's random numbers, by which storage in few bits is rounded."""
        self._noise = Noise(key_of(self._seed, step, rank), self._device)

    def update(
        self, tables: dict[str, RowTable], rows: Rows, gradient: Tensor, lr: float, valid: Tensor
    ) -> None:
        """Step the rows of `tables`, the weight and what `moment_layout` says, by their gradient (S, D).

        The gradient is used up. Where `valid` (a bool scalar on the device) is not set, nothing changes.
        Only on the CPU is it read: a GPU is not waited for, and multiplies by 0 and 1 instead.
        """
        if valid.device.type == "cpu" and not valid:
            return
        # In a file the rows of a table do not follow each other, as the kernel wants them to.
        weight = tables["weight"].fetch(rows).to(gradient.dtype).contiguous()
        (self._adamw_step if self._settings.name == "adamw" else self._sgd_step)(
            tables, rows, weight, gradient, lr, valid
        )
        tables["weight"].store(rows, weight, self._noise)

    def _sgd_step(
        self,
        tables: dict[str, RowTable],
        rows: Rows,
        weight: Tensor,
        gradient: Tensor,
        lr: float,
        valid: Tensor,
    ) -> None:
        settings, momentum = self._settings, None
        if settings.momentum:
            momentum = tables["momentum"].fetch(rows).to(gradient.dtype).contiguous()
        # Fused: one pass over weight, gradient and momentum. The same update by plain operations takes 2.2 times as
        # long on the CPU (2,048 rows of 512, torch 2.13).
        sgd(
            [weight],
            [gradient.contiguous()],
            [momentum],
            fused=True,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            found_inf=None if valid.device.type == "cpu" else (~valid).float(),
        )
        if momentum is not None:
            tables["momentum"].store(rows, momentum, self._noise)

    def _adamw_step(
        self,
        tables: dict[str, RowTable],
        rows: Rows,
        weight: Tensor,
        gradient: Tensor,
        lr: float,
        valid: Tensor,
    ) -> None:
        # A GPU is not asked whether the step is valid: it multiplies by 0 and 1.
        now: float | Tensor = 1.0
        if valid.device.type != "cpu":
            gradient, now = torch.where(valid, gradient, 0.0), valid.to(gradient.dtype)
        kept = [tables[name] for name in ("first_moment", "second_moment", "steps")]
        first, second, count = (table.fetch(rows).to(gradient.dtype) for table in kept)
        keep = [1 - (1 - beta) * now for beta in self._settings.betas]
        first.mul_(keep[0]).add_(gradient * (1 - keep[0]))
        second.mul_(keep[1]).add_(gradient * gradient * (1 - keep[1]))
        count.add_(now)
        corrected = [
            moment / (1 - beta**count).clamp_min(1e-30)
            for moment, beta in zip((first, second), self._settings.betas, strict=True)
        ]
        weight.mul_(1 - lr * self._settings.weight_decay * now)
        _add_(weight, corrected[0] / (corrected[1].sqrt_() + self._settings.eps), -lr * now)
        for table, values in zip(kept, (first, second, count), strict=True):
            table.store(rows, values, self._noise)


def _add_(total: Tensor, x: Tensor, factor: float | Tensor) -> None:
    """Add factor · x in place; a factor that is on the device stays there."""
    if isinstance(factor, Tensor):
        total.addcmul_(x, factor)
    else:
        total.add_(x, alpha=factor)


class AccumulatedGradient:
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
